"""The files of one trace: the first, and its continuations after a rotation or in a new scheduler."""

import importlib
import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from quire.protocol.errors import ConfigError
from quire.scheduler_proc.trace.lines import End, Header, decode_line, encode_line
from quire.version import install_command

ZSTD_LEVEL = 1
"""zstd level: recording must be cheap."""
LONGEST_HEADER = 2**24
"""Bytes."""


def open_private(path: Path, *, new: bool = False) -> BinaryIO:
    """Open a new or emptied file that only its owner can read, because it may contain prompts.

    ``new``: fail when the name exists, even as a dangling link.

    Raises OSError.
    """
    flags = os.O_EXCL | os.O_NOFOLLOW if new else os.O_TRUNC
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
    os.fchmod(descriptor, 0o600)  # an existing file would keep its mode
    return os.fdopen(descriptor, "wb", buffering=0)


def part_path(path: Path, part: int) -> Path:
    """FILE, FILE.1, FILE.2, ..."""
    return path if not part else path.with_name(f"{path.name}.{part}")


class TraceFiles:
    """Writes whole lines unbuffered, so that a crash leaves a readable file; with ``.zst`` one frame per ``write``.

    Every file but the first starts with the header of the first, with its own part number and time. Every file but the
    last ends with an End line with ``next_part``, unless the scheduler died.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = 0,
        is_restart: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            max_bytes: size after which the next file starts; 0 for a single file.
            is_restart: begin with the part after those that previous schedulers wrote, instead of emptying the first.

        Raises:
            ConfigError: the file cannot be written, or the compression package is not installed.
        """
        self._path = path
        self._max_bytes = max_bytes
        self._clock = clock
        self._compress = _compressor(path)
        self._header: Header | None = None
        self._previous = _last_header(path) if is_restart else None
        self._size = 0
        try:
            self._file = open_private(part_path(path, self._previous.part + 1 if self._previous is not None else 0))
        except OSError as error:
            raise ConfigError(f"--trace {path} cannot be written: {error.strerror}") from None

    def begin(self, header: Header) -> None:
        """Write the first line. Raises OSError."""
        if (last := self._previous) is not None:
            self._previous = None
            header = msgspec.structs.replace(header, part=last.part + 1, began=last.trace_id, restarted=True)
        self._header = header
        self._append(encode_line(header) + b"\n")

    def write(self, lines: bytes) -> None:
        """Append whole lines, starting the next file when this one is large enough. Raises OSError."""
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
        began = header.trace_id
        self.begin(msgspec.structs.replace(header, now=now, wall=time.time(), part=part, began=began, restarted=False))

    def _append(self, data: bytes) -> None:
        remaining = memoryview(self._compress(data))
        while remaining:
            written = self._file.write(remaining)
            self._size += written
            remaining = remaining[written:]


def _last_header(path: Path) -> Header | None:
    """Return the header of the last part of the trace at ``path``, or None if there is none to continue."""
    last: Header | None = None
    while True:
        header = _read_header(part_path(path, 0 if last is None else last.part + 1), path.suffix == ".zst")
        if header is None or (last is not None and header.trace_id != last.trace_id):
            return last
        last = header


def _read_header(file: Path, is_compressed: bool) -> Header | None:
    """Return the first line of ``file``, or None if that is no header."""
    if not file.is_file():  # reading from a pipe would wait
        return None
    try:
        with file.open("rb") as raw:
            reader: Any = raw
            if is_compressed:
                zstandard: Any = importlib.import_module("zstandard")
                reader = io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw))
            line = decode_line(reader.readline(LONGEST_HEADER))
    except Exception:  # of the system, of the compression, or because the content is something else
        return None
    return line if isinstance(line, Header) else None


def _compressor(path: Path) -> Callable[[bytes], bytes]:
    """Return the compression function for the name. Raises ConfigError when its package is not installed."""
    if path.suffix != ".zst":
        return bytes
    try:
        zstandard: Any = importlib.import_module("zstandard")
    except ImportError:
        raise ConfigError(f"--trace {path} needs the package zstandard: {install_command('trace')}") from None
    compress: Callable[[bytes], bytes] = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress
    return compress
