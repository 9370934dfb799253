"""The supervisor in a thread of the caller's process: for the offline API, whose own thread waits for answers.

The thread lives as long as the engine: what it starts would be killed by the kernel at its end.
"""

import contextlib
import os
import threading
from collections.abc import Callable

from quire.launch.supervision.supervisor import Supervisor
from quire.protocol.errors import EngineError, QuireError


class EngineThread:
    """Runs a Supervisor, made in the thread itself. ``fileno`` is readable while there is news."""

    def __init__(self, make: Callable[[Callable[[int], None]], Supervisor]) -> None:
        """``make``: is given what to call with the number of each new scheduler.

        Raises:
            ConfigError, EngineError: the engine did not come up.
        """
        self._make = make
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ready = threading.Event()
        self._closing = False
        self._supervisor: Supervisor | None = None
        self.failure: QuireError | None = None
        """Why the engine cannot go on; None while it can."""
        self.incarnation = 1
        """Of the scheduler."""
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
        """To be looked at only."""
        assert self._supervisor is not None
        return self._supervisor

    def fileno(self) -> int:
        return self._news

    def take_news(self) -> None:
        """``incarnation`` and ``failure`` are about to be looked at."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._news)

    def close(self) -> None:
        """End the engine's processes. May be called twice."""
        if self._closing:
            return
        self._closing = True
        if self._supervisor is not None and self._supervisor.wakeup_fd >= 0:
            os.write(self._supervisor.wakeup_fd, b"x")
        self._thread.join()
        os.close(self._news)

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
            self.failure = EngineError(f"the supervisor failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._ready.set()
            if not self._closing:
                os.eventfd_write(self._news, 1)

    def _on_new_scheduler(self, incarnation: int) -> None:
        self.incarnation = incarnation
        os.eventfd_write(self._news, 1)
