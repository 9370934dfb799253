"""The disk with the scheduler's trace, which may be full from some time on."""

import errno
from collections.abc import Callable

from quire.scheduler_proc.trace.lines import Header, Line
from quire.scheduler_proc.trace.writer import TraceWriter


class SimDisk:
    """Implements the part of ``TraceFiles`` that a TraceWriter needs; counts bytes instead of storing them."""

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
    """A TraceWriter without a thread: flushed lines are written at once."""

    def begin(self, header: Header) -> None:
        self._files.begin(header)

    def flush(self) -> None:
        super().flush()
        self.write_buffer()

    def close(self, last: Line) -> None:
        self.flush()
        super().close(last)
