"""Packed files as plain bytes, a bounded piece at a time: what is packed may be thousands of times its size."""

import gzip
import importlib
import io
import lzma
import zlib
from pathlib import Path
from typing import IO, Any, Protocol, cast

from quire.protocol.errors import ConfigError

_GZIP, _XZ, _ZSTD = b"\x1f\x8b", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"
_MOST_MEMORY = 128 * 2**20
"""That an unpacker may take for what it looks back to; who wants more is damaged, or means it ill."""
_PIECE = 2**20
_ZSTD_CHUNK = 256
"""Packed bytes at a time: four of them may stand for 128 KiB, and nothing else bounds what they unpack to at once."""


class Damaged(OSError):
    """Packed data that cannot be, or wants too much memory."""


DECOMPRESSION_ERRORS = (EOFError, OSError, zlib.error)
"""What reading such a file raises where it is cut short or damaged."""


def open_decompressed(file: Path) -> IO[bytes]:
    """The unpacked bytes of a file; its first bytes tell how it is packed, whatever its name.

    Raises:
        ConfigError: it cannot be opened, or nothing here can unpack it.
    """
    try:
        with file.open("rb") as raw:
            magic = raw.read(6)
        if magic.startswith(_GZIP):
            return cast(IO[bytes], gzip.open(file))
        if magic.startswith(_XZ):
            return io.BufferedReader(_Unpacked(file.open("rb"), _Xz()), _PIECE)
        if magic.startswith(_ZSTD):
            unpacker = _zstd(file)
            return io.BufferedReader(_Unpacked(file.open("rb"), unpacker), _PIECE)
        return file.open("rb")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from None


class _Unpacker(Protocol):
    """One stream after the other."""

    at_end: bool
    """Between two streams: more may come, and nothing must."""

    def unpack(self, read: Any) -> bytes:
        """Some bytes; ``read(count)`` gives packed ones. Empty when there are no more of those, or none came out yet.

        Raises:
            Damaged: they are none.
        """
        ...


class _Xz:
    def __init__(self) -> None:
        self.at_end = True
        self._stream: lzma.LZMADecompressor | None = None
        self._rest = b""

    def unpack(self, read: Any) -> bytes:
        packed = b""
        if self._stream is None or self._stream.needs_input:
            packed, self._rest = self._rest or read(_PIECE // 16), b""
        if self._stream is None:
            if not packed:
                return b""
            self._stream, self.at_end = lzma.LZMADecompressor(lzma.FORMAT_XZ, _MOST_MEMORY), False
        try:
            ready = self._stream.decompress(packed, _PIECE)
        except lzma.LZMAError as error:
            raise Damaged(str(error)) from None
        if self._stream.eof:
            self._rest = self._stream.unused_data.lstrip(b"\0")  # streams may be padded
            self._stream, self.at_end = None, True
        return ready


class _Zstd:
    def __init__(self, package: Any) -> None:
        self.at_end = True
        self._package = package
        self._unpacker = package.ZstdDecompressor(max_window_size=_MOST_MEMORY)
        self._stream: Any = None
        self._rest = b""

    def unpack(self, read: Any) -> bytes:
        packed, self._rest = self._rest or read(_ZSTD_CHUNK), b""
        if not packed:
            return b""
        if self._stream is None:
            self._stream, self.at_end = self._unpacker.decompressobj(), False
        try:
            ready: bytes = self._stream.decompress(packed)
        except self._package.ZstdError as error:
            raise Damaged(str(error)) from None
        if self._stream.eof:
            self._rest = self._stream.unused_data
            self._stream, self.at_end = None, True
        return ready


def _zstd(file: Path) -> _Zstd:
    try:
        return _Zstd(importlib.import_module("zstandard"))
    except ImportError:
        raise ConfigError(f"{file}: reading it needs the package zstandard: pip install 'quire[trace]'") from None


class _Unpacked(io.RawIOBase):
    """Reading raises EOFError where a stream is cut short, Damaged where it is damaged."""

    def __init__(self, packed: IO[bytes], unpacker: _Unpacker) -> None:
        self._packed = packed
        self._unpacker = unpacker
        self._ready = memoryview(b"")
        self._at_eof = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if self._at_eof and self._unpacker.at_end:
                return 0
            ready = self._unpacker.unpack(self._read)
            if not ready and self._at_eof and not self._unpacker.at_end:
                raise EOFError("it ends within a frame")
            self._ready = memoryview(ready)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _read(self, count: int) -> bytes:
        packed = self._packed.read(count)
        self._at_eof = not packed
        return packed

    def close(self) -> None:
        self._packed.close()
        super().close()
