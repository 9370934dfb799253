"""Decompression with bounded memory: the data of a file may be thousands of times its size."""

import gzip
import importlib
import io
import lzma
import zlib
from pathlib import Path
from typing import IO, Any, Protocol, cast

from quire.protocol.errors import ConfigError
from quire.version import install_command

_GZIP, _XZ, _ZSTD = b"\x1f\x8b", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"
_MAX_MEMORY = 128 * 2**20
"""Bytes for a decompressor's window; a larger window means a corrupt or malicious file."""
_PIECE = 2**20
_ZSTD_CHUNK = 256
"""Compressed bytes per call: four bytes may expand to 128 KiB, and zstd has no other bound on the output of a call."""


class DamagedFile(OSError):
    """Corrupt compressed data, or data that needs too much memory."""


DECOMPRESSION_ERRORS = (EOFError, OSError, zlib.error)
"""Errors of reading a compressed file that is cut short or damaged."""


def find_file(folder: Path, name: str) -> Path | None:
    """Return the path of ``name`` in ``folder``, compressed or not, or None."""
    return next((path for end in ("", ".gz", ".xz", ".zst") if (path := folder / (name + end)).is_file()), None)


def open_decompressed(file: Path) -> IO[bytes]:
    """Open a file and decompress it. The first bytes determine the compression, not the name.

    Raises:
        ConfigError: the file cannot be opened, or the package for its compression is not installed.
    """
    try:
        with file.open("rb") as raw:
            magic = raw.read(6)
        if magic.startswith(_GZIP):
            return cast(IO[bytes], gzip.open(file))
        if magic.startswith(_XZ):
            return io.BufferedReader(_DecompressedFile(file.open("rb"), _Xz()), _PIECE)
        if magic.startswith(_ZSTD):
            decompressor = _zstd(file)
            return io.BufferedReader(_DecompressedFile(file.open("rb"), decompressor), _PIECE)
        return file.open("rb")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from None


class _Decompressor(Protocol):
    """Decompresses concatenated streams."""

    at_end: bool
    """Whether the position is between two streams, where the file may end."""

    def decompress(self, read: Any) -> bytes:
        """Return some decompressed bytes, empty at the end of the input or if none are ready yet.

        ``read(count)`` returns compressed bytes.

        Raises:
            DamagedFile: the data is corrupt.
        """
        ...


class _Xz:
    def __init__(self) -> None:
        self.at_end = True
        self._stream: lzma.LZMADecompressor | None = None
        self._rest = b""

    def decompress(self, read: Any) -> bytes:
        compressed = b""
        if self._stream is None or self._stream.needs_input:
            compressed, self._rest = self._rest or read(_PIECE // 16), b""
        if self._stream is None:
            if not compressed:
                return b""
            self._stream, self.at_end = lzma.LZMADecompressor(lzma.FORMAT_XZ, _MAX_MEMORY), False
        try:
            ready = self._stream.decompress(compressed, _PIECE)
        except lzma.LZMAError as error:
            raise DamagedFile(str(error)) from None
        if self._stream.eof:
            self._rest = self._stream.unused_data.lstrip(b"\0")  # streams may be padded
            self._stream, self.at_end = None, True
        return ready


class _Zstd:
    def __init__(self, package: Any) -> None:
        self.at_end = True
        self._package = package
        self._decompressor = package.ZstdDecompressor(max_window_size=_MAX_MEMORY)
        self._stream: Any = None
        self._rest = b""

    def decompress(self, read: Any) -> bytes:
        compressed, self._rest = self._rest or read(_ZSTD_CHUNK), b""
        if not compressed:
            return b""
        if self._stream is None:
            self._stream, self.at_end = self._decompressor.decompressobj(), False
        try:
            ready: bytes = self._stream.decompress(compressed)
        except self._package.ZstdError as error:
            raise DamagedFile(str(error)) from None
        if self._stream.eof:
            self._rest = self._stream.unused_data
            self._stream, self.at_end = None, True
        return ready


def _zstd(file: Path) -> _Zstd:
    try:
        return _Zstd(importlib.import_module("zstandard"))
    except ImportError:
        raise ConfigError(f"{file}: package zstandard is not installed: {install_command('trace')}") from None


class _DecompressedFile(io.RawIOBase):
    """Decompressed bytes of a file. Reading raises EOFError if a stream is cut short, DamagedFile if it is corrupt."""

    def __init__(self, compressed: IO[bytes], decompressor: _Decompressor) -> None:
        self._compressed = compressed
        self._decompressor = decompressor
        self._ready = memoryview(b"")
        self._at_eof = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if self._at_eof and self._decompressor.at_end:
                return 0
            ready = self._decompressor.decompress(self._read)
            if not ready and self._at_eof and not self._decompressor.at_end:
                raise EOFError("the file ends within a frame")
            self._ready = memoryview(ready)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _read(self, count: int) -> bytes:
        compressed = self._compressed.read(count)
        self._at_eof = not compressed
        return compressed

    def close(self) -> None:
        self._compressed.close()
        super().close()
