"""The disk with the scheduler's trace, which may be full from some time on."""

import errno
from collections.abc import Callable

import msgspec

from quire.scheduler_proc.trace.lines import Header, Line, encode_line
from quire.scheduler_proc.trace.writer import TraceWriter


class SimDisk:
    """Implements the part of ``TraceFiles`` that a TraceWriter needs; each scheduler adds its part to ``content``."""

    def __init__(self, is_full: Callable[[], bool], content: list[bytes]) -> None:
        self._is_full = is_full
        self._content = content

    def begin(self, header: Header) -> None:
        header = msgspec.structs.replace(header, restarted=bool(self._content))
        self.write(encode_line(header) + b"\n")

    def write(self, lines: bytes) -> None:
        if self._is_full():
            raise OSError(errno.ENOSPC, "No space left on device")
        self._content.append(lines)

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
