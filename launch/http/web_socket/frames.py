"""Frames of RFC 6455 as a server reads and writes them: no socket, no clock."""

import base64
import hashlib
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""Added to the client's key, by RFC 6455."""
MAX_CONTROL_BYTES = 125
# Frames without the end of a message, which cost time and bring nothing: one per BYTES_PER_FRAME, besides FREE_FRAMES.
FREE_FRAMES = 4096
BYTES_PER_FRAME = 256
SHORT_BYTES = 1024
FINAL, RESERVED_BITS, MASKED = 0x80, 0x70, 0x80


class Opcode(IntEnum):
    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


class CloseCode(IntEnum):
    """Reasons to close a connection."""

    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    UNSUPPORTED = 1003
    INVALID_TEXT = 1007
    POLICY = 1008
    TOO_BIG = 1009
    INTERNAL = 1011
    TRY_LATER = 1013


class SocketClosed(Exception):
    """The connection must be closed with ``code`` and ``reason``."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Text:
    """A whole message, which is valid UTF-8."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Ping:
    data: bytes


@dataclass(frozen=True, slots=True)
class Close:
    """``code``: the client's, or None if it gave none."""

    code: int | None


Received = Text | Ping | Close


def accept_key(key: bytes) -> bytes:
    """Return the ``Sec-WebSocket-Accept`` for a client's ``Sec-WebSocket-Key``."""
    return base64.b64encode(hashlib.sha1(key + GUID, usedforsecurity=False).digest())


def is_key(key: bytes) -> bool:
    """Whether ``key`` is 16 bytes in base64, as RFC 6455 requires."""
    try:
        return len(base64.b64decode(key, validate=True)) == 16
    except ValueError:
        return False


def frame(opcode: Opcode, data: bytes) -> bytes:
    """Return one unmasked frame that is a whole message."""
    size = len(data)
    if size < 126:
        length = bytes((size,))
    elif size < 2**16:
        length = b"\x7e" + size.to_bytes(2)
    else:
        length = b"\x7f" + size.to_bytes(8)
    return bytes((FINAL | opcode,)) + length + data


def close_frame(code: int, reason: str = "") -> bytes:
    text = reason.encode()[: MAX_CONTROL_BYTES - 2].decode(errors="ignore")
    return frame(Opcode.CLOSE, code.to_bytes(2) + text.encode())


@dataclass(frozen=True, slots=True)
class _Head:
    opcode: int
    is_final: bool
    mask: bytes
    begin: int
    size: int


class FrameReader:
    """Reads a client's bytes, in any pieces, as messages.

    ``num_bytes``: what is kept of a message that is not complete; at most ``max_bytes`` and a frame's head.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._unread = bytearray()
        self._message = bytearray()
        """Data of earlier frames of a message in fragments."""
        self._in_message = False
        self._num_frames = 0
        """Frames since the end of the last message."""

    @property
    def num_bytes(self) -> int:
        return len(self._unread) + len(self._message)

    def feed(self, data: bytes) -> list[Received]:
        """Return what ``data`` completes.

        Raises:
            SocketClosed: the client breaks the protocol, or sends what this server does not read.
        """
        self._unread += data
        found: list[Received] = []
        while (head := self._head()) is not None and len(self._unread) >= head.begin + head.size:
            payload = _unmasked(self._unread[head.begin : head.begin + head.size], head.mask)
            del self._unread[: head.begin + head.size]
            self._count()
            message = self._control(head, payload) if head.opcode >= Opcode.CLOSE else self._data(head, payload)
            if message is not None:
                found.append(message)
            if isinstance(message, Close):
                break
        return found

    def _head(self) -> _Head | None:
        """Return the head of the next frame, or None if it is not complete. Its size is checked before its data."""
        unread = self._unread
        if len(unread) < 2:
            return None
        opcode, size = unread[0] & 0x0F, unread[1] & 0x7F
        is_final = bool(unread[0] & FINAL)
        if unread[0] & RESERVED_BITS:
            raise SocketClosed(CloseCode.PROTOCOL_ERROR, "extensions are not supported")
        if not unread[1] & MASKED:
            raise SocketClosed(CloseCode.PROTOCOL_ERROR, "frames of a client must be masked")
        self._check_opcode(opcode, is_final, size)
        extended = {126: 2, 127: 8}.get(size, 0)
        begin = 2 + extended + 4
        if len(unread) < begin:
            return None
        if extended:
            size = int.from_bytes(unread[2 : 2 + extended])
            if size < 126 or (extended == 8 and size < 2**16):
                raise SocketClosed(CloseCode.PROTOCOL_ERROR, "the length of a frame must be written in its short form")
        if opcode < Opcode.CLOSE and len(self._message) + size > self._max_bytes:
            raise SocketClosed(CloseCode.TOO_BIG, f"a message must be at most {self._max_bytes} bytes")
        return _Head(opcode, is_final, bytes(unread[begin - 4 : begin]), begin, size)

    def _count(self) -> None:
        self._num_frames += 1
        if self._num_frames > FREE_FRAMES + len(self._message) // BYTES_PER_FRAME:
            raise SocketClosed(CloseCode.POLICY, "too many frames for one message")

    def _check_opcode(self, opcode: int, is_final: bool, size: int) -> None:
        if opcode not in Opcode.__members__.values():
            raise SocketClosed(CloseCode.PROTOCOL_ERROR, f"unknown opcode {opcode}")
        if opcode >= Opcode.CLOSE:
            if not is_final or size > MAX_CONTROL_BYTES:
                raise SocketClosed(CloseCode.PROTOCOL_ERROR, "control frames must be whole and at most 125 bytes")
        elif self._in_message != (opcode == Opcode.CONTINUATION):
            raise SocketClosed(CloseCode.PROTOCOL_ERROR, "fragments of a message must follow each other")
        elif opcode == Opcode.BINARY:
            raise SocketClosed(CloseCode.UNSUPPORTED, "messages must be text")

    def _data(self, head: _Head, payload: bytes) -> Text | None:
        self._in_message = not head.is_final
        if self._in_message:
            self._message += payload
            return None
        self._num_frames = 0
        whole = bytes(self._message) + payload if self._message else payload
        self._message.clear()
        try:
            whole.decode()
        except UnicodeDecodeError:
            raise SocketClosed(CloseCode.INVALID_TEXT, "messages must be valid UTF-8") from None
        return Text(whole)

    def _control(self, head: _Head, payload: bytes) -> Received | None:
        if head.opcode == Opcode.PING:
            return Ping(payload)
        if head.opcode == Opcode.PONG:
            return None
        if not payload:
            return Close(None)
        code = int.from_bytes(payload[:2])
        try:
            payload[2:].decode()
        except UnicodeDecodeError:
            raise SocketClosed(CloseCode.INVALID_TEXT, "the reason must be valid UTF-8") from None
        if len(payload) < 2 or not _is_sendable(code):
            raise SocketClosed(CloseCode.PROTOCOL_ERROR, "invalid close code")
        return Close(code)


def _is_sendable(code: int) -> bool:
    """Whether a close frame may have this code: 1004 to 1006 and 1015 only describe connections."""
    return 3000 <= code < 5000 or (1000 <= code <= 1014 and code not in (1004, 1005, 1006))


def _unmasked(data: bytearray, mask: bytes) -> bytes:
    """Return the data that a client masked."""
    size = len(data)
    if size <= SHORT_BYTES:  # NumPy takes longer to start
        whole_mask = (mask * (size // 4 + 1))[:size]
        return (int.from_bytes(data) ^ int.from_bytes(whole_mask)).to_bytes(size)
    words = np.frombuffer(data + bytes(-size % 4), np.uint32)
    return (words ^ np.frombuffer(mask, np.uint32)).tobytes()[:size]
