"""Writes a trace's lines to its files, beside whoever makes them: a thread, and a buffer that never grows too large."""

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from quire.protocol.errors import ConfigError
from quire.scheduler_proc.trace.lines import End, Header, Line, Lost, encode_line

log = logging.getLogger(__name__)

MAX_BUFFERED_BYTES = 32 * 2**20
WRITE_INTERVAL_S = 0.25
"""How much a crash may take away."""
BATCH_BYTES = 2**20
CLOSE_DEADLINE_S = 5.0

Clock = Callable[[], float]


def open_private(path: Path) -> BinaryIO:
    """A new or emptied file that only its owner reads: prompts may be in it, and who asked what is.

    Raises OSError.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)  # one that was there before keeps its mode otherwise
    return os.fdopen(descriptor, "wb", buffering=0)


def compressor(path: Path) -> Callable[[bytes], bytes]:
    """What makes the bytes of a file of this name: a whole zstd frame for each call, or the bytes as they are.

    Raises:
        ConfigError: the package is not installed.
    """
    if path.suffix != ".zst":
        return bytes
    try:
        zstandard: Any = importlib.import_module("zstandard")
    except ImportError:
        raise ConfigError(f"--trace {path} needs the package zstandard: pip install 'quire[trace]'") from None
    compress: Callable[[bytes], bytes] = zstandard.ZstdCompressor().compress
    return compress


class TraceWriter:
    """``add`` and ``flush`` are for the thread that makes lines; a thread of its own does all that waits for the disk.

    A file is whole lines at any time, as far as it was written (and whole zstd frames), so that what a crash leaves
    can be read. A disk that is too slow costs lines, not memory and not time: they are counted, and said in the file.

    Attributes:
        lost: lines that were not written since the start.
    """

    def __init__(
        self, path: Path, *, max_bytes: int = 0, max_buffered: int = MAX_BUFFERED_BYTES, clock: Clock = time.monotonic
    ) -> None:
        """
        Args:
            max_bytes: a file that is so large is followed by another; 0: one file.

        Raises:
            ConfigError: the file cannot be written, or the package that compresses it is missing.
        """
        self._path = path
        self._max_bytes, self._max_buffered = max_bytes, max_buffered
        self._clock = clock
        self._compress = compressor(path)
        try:
            self._file = open_private(path)
        except OSError as error:
            raise ConfigError(f"--trace {path} cannot be written: {error.strerror}") from None
        self.lost = 0
        self._header: Header | None = None
        self._size = 0
        self._failed = False
        self._pending: list[Line] = []
        self._gap = 0
        self._lock = threading.Lock()
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._wake = threading.Event()
        self._closing = self._ended = False
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)

    def begin(self, header: Header) -> None:
        """The first line, and the thread. Before it, and without it, lines are kept or lost, but not written."""
        self._header = header
        self.add(header)
        self.flush()
        self._thread.start()

    # ---- for the thread that makes lines

    def add(self, line: Line) -> None:
        """Costs nearly nothing: it is encoded by the next ``flush``."""
        self._pending.append(line)

    def flush(self) -> None:
        """Encode what was added, when there is time for it."""
        if not self._pending:
            return
        lines, self._pending = self._pending, []
        if self._failed:
            self._lose(len(lines))
            return
        room = self._max_buffered - self._buffered
        if self._gap:
            if room < self._max_buffered // 2:  # else a slow disk would have a gap after every line
                self._lose(len(lines))
                return
            lines.insert(0, Lost(lines=self._gap))
            self._gap = 0
        data = b"\n".join([encode_line(line) for line in lines]) + b"\n"
        if len(data) > room:
            self._lose(len(lines))
            return
        with self._lock:
            self._buffer.append(data)
            self._buffered += len(data)
        if self._buffered > BATCH_BYTES:
            self._wake.set()

    def close(self, reason: str = "") -> None:
        """Write what is left and an End; the first call counts. Waits for the disk, but not for ever."""
        if self._closing:
            return
        self._closing = True
        if self._header is None:
            self._file.close()
            return
        self.add(End(now=self._clock(), reason=reason))
        self.flush()
        self._ended = True
        self._wake.set()
        self._thread.join(CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            log.error("the trace %s was not written to its end: the disk is too slow", self._path)

    def _lose(self, count: int) -> None:
        if not self.lost:
            log.error("the trace %s loses lines: the disk is too slow, or failed", self._path)
        self._gap += count
        self.lost += count

    # ---- the thread

    def _run(self) -> None:
        while not self._ended:
            self._wake.wait(WRITE_INTERVAL_S)
            self._wake.clear()
            self._write_buffer()
        self._write_buffer()
        self._file.close()

    def _write_buffer(self) -> None:
        """All that is buffered, in batches; after an error, nothing any more."""
        while self._buffer:
            batch, size = self._next_batch()
            try:
                if self._max_bytes and self._size >= self._max_bytes and not self._failed:
                    self._begin_next_part()
                if not self._failed:
                    self._write(batch)
            except OSError as error:
                self._failed = True
                log.error("the trace %s ends here: %s", self._path, error.strerror)
            with self._lock:
                self._buffered -= size

    def _next_batch(self) -> tuple[bytes, int]:
        with self._lock:
            count = size = 0
            while count < len(self._buffer) and (not count or size + len(self._buffer[count]) <= BATCH_BYTES):
                size += len(self._buffer[count])
                count += 1
            parts, self._buffer = self._buffer[:count], self._buffer[count:]
        return b"".join(parts), size

    def _write(self, data: bytes) -> None:
        rest = memoryview(self._compress(data))
        while rest:
            written = self._file.write(rest)
            self._size += written
            rest = rest[written:]

    def _begin_next_part(self) -> None:
        """The next file says itself what a reader needs, but what ran goes on."""
        assert self._header is not None
        now = self._clock()
        self._write(encode_line(End(now=now, next_part=True)) + b"\n")
        self._file.close()
        self._header = msgspec.structs.replace(
            self._header, crc=None, now=now, wall=time.time(), part=self._header.part + 1
        )
        self._file = open_private(part_path(self._path, self._header.part))
        self._size = 0
        self._write(encode_line(self._header) + b"\n")


def part_path(path: Path, part: int) -> Path:
    """FILE, FILE.1, FILE.2, ..."""
    return path if not part else path.with_name(f"{path.name}.{part}")
