"""The disk that a scheduler writes its trace to, which may be full from some moment on."""

import errno
from collections.abc import Callable

from quire.scheduler_proc.trace.lines import Header, Line
from quire.scheduler_proc.trace.writer import TraceWriter


class SimDisk:
    """Implements what a TraceWriter needs of ``TraceFiles``; keeps nothing but how much it has taken."""

    def __init__(self, is_full: Callable[[], bool]) -> None:
        self._is_full = is_full
        self.num_bytes = 0

    def begin(self, header: Header) -> None:
        self.write(b"")

    def write(self, lines: bytes) -> None:
        if self._is_full():
            raise OSError(errno.ENOSPC, "No space left on device")
        self.num_bytes += len(lines)

    def close(self) -> None:
        pass


class InlineWriter(TraceWriter):
    """Without a thread: what is flushed is written at once."""

    def begin(self, header: Header) -> None:
        self._files.begin(header)

    def flush(self) -> None:
        super().flush()
        self.write_buffer()

    def close(self, last: Line) -> None:
        self.flush()
        super().close(last)
