"""Keeps a process alive when stderr cannot be written: closed, a full disk, a pipe without a reader."""

import contextlib
import io
import os
import sys


class LossyStream(io.TextIOWrapper):
    """Text stream to a file descriptor that drops output silently when a write fails."""

    def __init__(self, fd: int) -> None:
        # Unbuffered: a buffer that could not be written would be flushed, and fail, again at exit.
        raw = io.FileIO(fd, "w", closefd=False)
        super().__init__(raw, "utf-8", errors="backslashreplace", write_through=True)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def survive_without_stderr() -> None:
    """Make writes to stderr harmless for the rest of the process.

    Closed standard descriptors are opened on ``/dev/null``: otherwise a socket would get their number, and child
    processes or a library's message would write to it.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is fd
            os.set_inheritable(fd, True)
    if sys.stderr is sys.__stderr__:  # otherwise a test captures it
        sys.stderr = LossyStream(2)
