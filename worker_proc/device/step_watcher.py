"""Wakes a loop that waits for messages when the device has finished a step, or another thread its work."""

import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread


class StepWatcher:
    """Owns a file descriptor, and the thread that waits for the device, which starts with the first ``watch``."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waits: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._end: weakref.finalize[..., StepWatcher] = weakref.finalize(self, os.close, self._fd)

    def fileno(self) -> int:
        """Readable after a watched step has finished, or a call of ``wake``, until ``fired`` is called."""
        return self._fd

    def watch(self, wait: Callable[[], None]) -> None:
        """Make the descriptor readable when ``wait``, which must not hold the GIL while it waits, has returned."""
        if self._thread is None:
            self._thread = Thread(target=_run, args=(self._fd, self._waits), name="step watcher", daemon=True)
            self._thread.start()
            # From now on the thread closes the descriptor: it must not write to another one with the same number.
            self._end.detach()
            self._end = weakref.finalize(self, self._waits.put, None)
        self._waits.put(wait)

    def wake(self) -> None:
        """Make the descriptor readable; for other threads."""
        os.eventfd_write(self._fd, 1)

    def fired(self) -> bool:
        """Return whether a watched step has finished, or ``wake`` was called, since the last call."""
        try:
            return bool(os.eventfd_read(self._fd))
        except BlockingIOError:
            return False


def _run(fd: int, waits: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (wait := waits.get()) is not None:
        with suppress(Exception):  # the loop gets an error of the device when it reads the result
            wait()
        os.eventfd_write(fd, 1)
    os.close(fd)
