"""The child processes of one process, and the selector that waits for their reports and their ends."""

import contextlib
import os
import selectors
from collections.abc import Iterator
from typing import TypeVar

from quire.launch.supervision.members import WatchedProcess
from quire.protocol.process.child import Report

C = TypeVar("C", bound=WatchedProcess)


class Children:
    """Waits for children. All methods must be called from one thread, which must not end before the
    children: they are killed when it ends.

    Attributes:
        wakeup_fd: a byte written to it makes ``wait`` return.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wakeup, self.wakeup_fd = os.pipe()
        for fd in (self._wakeup, self.wakeup_fd):
            os.set_blocking(fd, False)
        self.wake_on(self._wakeup)

    def wake_on(self, fd: int) -> None:
        """Let ``wait`` return while ``fd`` is readable."""
        self._selector.register(fd, selectors.EVENT_READ, None)

    def add(self, child: C) -> C:
        """Wait for this process, too, and return it."""
        for fd in child.watched:
            self._selector.register(fd, selectors.EVENT_READ, child)
        return child

    def wait(self, timeout: float) -> Iterator[tuple[WatchedProcess, list[Report], bool]]:
        """Wait for at most ``timeout`` seconds; yield each child that has reported or ended, with its reports and
        whether it has ended. A child that has ended stays open until ``close_child``."""
        for key, _ in self._selector.select(timeout):
            child: WatchedProcess | None = key.data
            if child is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 4096)
            elif child.watched:  # it was not killed while this event was pending
                yield (child, *child.read_reports())

    def kill(self, child: WatchedProcess) -> None:
        child.kill()
        self.close_child(child)

    def close_child(self, child: WatchedProcess) -> None:
        for fd in child.watched:
            self._selector.unregister(fd)
        child.close()

    def close(self) -> None:
        """Close the selector; the children have ended. May be called twice."""
        self._selector.close()
        for fd in (self._wakeup, self.wakeup_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._wakeup = self.wakeup_fd = -1
