"""Two disks: that with the scheduler's trace, which may be full from some time on, and that with pages."""

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from fake_pages import Page

from quire.protocol.config import EngineConfig
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


class SimPageFiles:
    """Implements ``transport.PageFiles``. It outlives schedulers and workers.

    Attributes:
        contents: path → pages by their index in the file.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._size = config.ssd_cache_bytes
        self.paths = [Path(f"rank {rank}") for rank in range(config.tensor_parallel_size)]
        self.contents: dict[str, dict[int, Page]] = {str(path): {} for path in self.paths}
        self.num_pages = self.forgotten = 0

    def open(self, page_bytes: Sequence[int]) -> None:
        self.num_pages = self._size // sum(page_bytes)

    def forget(self, generation: int) -> None:
        self.forgotten = generation

    def wipe(self, pages: Sequence[int]) -> None:
        for content in self.contents.values():
            for page in pages:
                content.pop(page, None)


class TwoTiers(dict[int, Page]):
    """Pages of host memory, and those on disk from ``first`` on."""

    def __init__(self, host: dict[int, Page], disk: dict[int, Page], first: int) -> None:
        self._host, self._disk, self._first = host, disk, first

    def _place(self, page: int) -> tuple[dict[int, Page], int]:
        return (self._host, page) if page < self._first else (self._disk, page - self._first)

    def get(self, page: int, default: Page | None = None) -> Page | None:  # type: ignore[override]
        tier, at = self._place(page)
        return tier.get(at, default)

    def __getitem__(self, page: int) -> Page:
        tier, at = self._place(page)
        return tier[at]

    def __setitem__(self, page: int, stored: Page) -> None:
        tier, at = self._place(page)
        tier[at] = stored

    def __contains__(self, page: object) -> bool:
        return isinstance(page, int) and self.get(page) is not None
