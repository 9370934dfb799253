"""The stream of diagnostics when it cannot be written: closed, a full disk, a pipe without a reader."""

import contextlib
import io
import os
import sys


class LossyStream(io.TextIOWrapper):
    """Text to a file descriptor; what the descriptor does not take is lost without a word."""

    def __init__(self, fd: int) -> None:
        # Unbuffered: what failed to be written once would be tried again, and fail again, at the process's end.
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
    """For a process that serves: from here on no diagnostics can end it.

    Standard descriptors that were closed become ``/dev/null``: a socket would take their number else, and our
    children, or a library's message, would find it there.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
            os.set_inheritable(fd, True)
    if sys.stderr is sys.__stderr__:  # else it is captured
        sys.stderr = LossyStream(2)
