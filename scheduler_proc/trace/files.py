"""The files of one trace: the first, and those that it goes on in."""

import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from quire.protocol.errors import ConfigError
from quire.scheduler_proc.trace.lines import End, Header, encode_line

FAST = 1
"""zstd level: recording is to cost little."""


def open_private(path: Path, *, new: bool = False) -> BinaryIO:
    """A new or emptied file that only its owner reads: who asks what is in it, and prompts may be.

    ``new``: there may be nothing of this name yet, not even a link that leads nowhere.

    Raises OSError.
    """
    how = os.O_EXCL | os.O_NOFOLLOW if new else os.O_TRUNC
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | how, 0o600)
    os.fchmod(descriptor, 0o600)  # one that was there before keeps its mode otherwise
    return os.fdopen(descriptor, "wb", buffering=0)


def part_path(path: Path, part: int) -> Path:
    """FILE, FILE.1, FILE.2, ..."""
    return path if not part else path.with_name(f"{path.name}.{part}")


class TraceFiles:
    """Writes whole lines, unbuffered, so that what a crash leaves can be read; compressed, where the name says so, as
    a zstd frame for each ``write``.

    Every file but the first begins with the header of the first, its own number and time; every file but the last ends
    with an End that says so.
    """

    def __init__(self, path: Path, *, max_bytes: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            max_bytes: a file that is so large is followed by another; 0: one file.

        Raises:
            ConfigError: the file cannot be written, or the package that compresses it is missing.
        """
        self._path = path
        self._max_bytes = max_bytes
        self._clock = clock
        self._compress = _compressor(path)
        self._header: Header | None = None
        self._size = 0
        try:
            self._file = open_private(path)
        except OSError as error:
            raise ConfigError(f"--trace {path} cannot be written: {error.strerror}") from None

    def begin(self, header: Header) -> None:
        """Write the first line. Raises OSError."""
        self._header = header
        self._append(encode_line(header) + b"\n")

    def write(self, lines: bytes) -> None:
        """Append whole lines, to the next file where this one is large enough. Raises OSError."""
        if self._max_bytes and self._size >= self._max_bytes and self._header is not None:
            self._begin_next_part(self._header)
        self._append(lines)

    def close(self) -> None:
        self._file.close()

    def _begin_next_part(self, header: Header) -> None:
        now = self._clock()
        self._append(encode_line(End(now=now, next_part=True)) + b"\n")
        self._file.close()
        part = header.part + 1
        self._file = open_private(part_path(self._path, part))
        self._size = 0
        self.begin(msgspec.structs.replace(header, now=now, wall=time.time(), part=part))

    def _append(self, data: bytes) -> None:
        rest = memoryview(self._compress(data))
        while rest:
            written = self._file.write(rest)
            self._size += written
            rest = rest[written:]


def _compressor(path: Path) -> Callable[[bytes], bytes]:
    """Raises ConfigError where the package that the name asks for is not installed."""
    if path.suffix != ".zst":
        return bytes
    try:
        zstandard: Any = importlib.import_module("zstandard")
    except ImportError:
        raise ConfigError(f"--trace {path} needs the package zstandard: pip install 'quire[trace]'") from None
    compress: Callable[[bytes], bytes] = zstandard.ZstdCompressor(level=FAST).compress
    return compress
