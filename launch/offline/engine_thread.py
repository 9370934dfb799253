"""Runs the supervisor in a thread of the caller's process, because the offline API blocks in its own thread.

The thread must not end before the engine: the kernel kills the child processes when the thread that started them ends.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable

from quire.launch.supervision.supervisor import Supervisor
from quire.protocol.errors import EngineError, QuireError
from quire.protocol.process.log import first_line

CLOSE_S = 60.0
"""Limit of the wait for the engine's end, which may need a lock of the code that the garbage collector interrupted."""


class EngineThread:
    """Creates and runs a Supervisor in a thread. ``fileno`` is readable after its public attributes changed."""

    def __init__(self, make: Callable[[Callable[[int], None]], Supervisor]) -> None:
        """Start the engine and wait until it is ready.

        Args:
            make: returns the Supervisor; its argument is a callback for the incarnation of each new scheduler.

        Raises:
            ConfigError, EngineError: the engine failed to start.
        """
        self._make = make
        self._notification = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._notification)
        self._ready = threading.Event()
        self._closing = False
        self._supervisor: Supervisor | None = None
        self.failure: QuireError | None = None
        """The reason why the engine cannot continue, or None."""
        self.incarnation = 1
        """The incarnation of the current scheduler."""
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()
        try:
            self._ready.wait()
        except BaseException:
            self.close()
            raise
        if self.failure is not None:
            self.close()
            raise self.failure

    @property
    def supervisor(self) -> Supervisor:
        """The supervisor, for reading only: its methods belong to the thread."""
        assert self._supervisor is not None
        return self._supervisor

    def fileno(self) -> int:
        return self._notification

    def clear_notification(self) -> None:
        """Reset ``fileno``; call before reading ``incarnation`` and ``failure``."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._notification)

    def close(self) -> None:
        """End the engine's processes. May be called twice."""
        if self._closing:
            return
        self._closing = True
        if self._supervisor is not None and self._supervisor.wakeup_fd >= 0:
            os.write(self._supervisor.wakeup_fd, b"x")
        if threading.current_thread() is not self._thread:  # the garbage collector may run there
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            with self._make(self._on_new_scheduler) as supervisor:
                self._supervisor = supervisor
                supervisor.start_engine()
                while not self._closing:
                    supervisor.watch(None if self._ready.is_set() else 0.5)
                    if supervisor.is_ready:
                        self._ready.set()
        except QuireError as error:
            self.failure = error
        except Exception as error:
            self.failure = EngineError(f"the supervisor failed: {type(error).__name__}: {first_line(str(error))}")
            raise
        finally:
            self._ready.set()
            if not self._closing:
                os.eventfd_write(self._notification, 1)

    def _on_new_scheduler(self, incarnation: int) -> None:
        self.incarnation = incarnation
        os.eventfd_write(self._notification, 1)
