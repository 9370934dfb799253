"""Wakes a loop that waits for messages when the device has finished a step, or another thread its work."""

import os
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread


class StepWatcher:
    """Owns a file descriptor, and the thread that waits for the device, which starts with the first ``watch``."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waits: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: Thread | None = None

    def fileno(self) -> int:
        """Readable after a watched step has finished, or a call of ``wake``, until ``fired`` is called."""
        return self._fd

    def watch(self, wait: Callable[[], None]) -> None:
        """Make the descriptor readable when ``wait``, which must not hold the GIL while it waits, has returned."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="step watcher", daemon=True)
            self._thread.start()
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

    def _run(self) -> None:
        while True:
            wait = self._waits.get()
            with suppress(Exception):  # the loop gets an error of the device when it reads the result
                wait()
            self.wake()
