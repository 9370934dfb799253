"""A WebSocket client that sends any bytes, right or wrong."""

import base64
import json
import os
import socket
from typing import Any

PATH = "/v1/responses"
KEY = base64.b64encode(b"0123456789abcdef").decode()
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


def handshake(*headers: str, path: str = PATH, version: str = "13", key: str = KEY) -> bytes:
    """Return the bytes of a handshake; ``headers``: further ones."""
    given = ("host: 127.0.0.1", "upgrade: websocket", "connection: Upgrade", f"sec-websocket-version: {version}")
    lines = (f"GET {path} HTTP/1.1", *given, f"sec-websocket-key: {key}", *headers)
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def client_frame(opcode: int, data: bytes, *, final: bool = True, mask: bytes | None = None) -> bytes:
    """Return a masked frame. ``mask``: four bytes; None: random ones."""
    mask = os.urandom(4) if mask is None else mask
    size = len(data)
    if size < 126:
        length = bytes((0x80 | size,))
    else:
        length = b"\xfe" + size.to_bytes(2) if size < 2**16 else b"\xff" + size.to_bytes(8)
    whole_mask = (mask * (size // 4 + 1))[:size]
    body = (int.from_bytes(data) ^ int.from_bytes(whole_mask)).to_bytes(size)
    return bytes((opcode | (0x80 if final else 0),)) + length + mask + body


class SocketClient:
    """One connection, whose handshake was accepted."""

    def __init__(self, connection: socket.socket, *headers: str) -> None:
        """``headers``: of the handshake."""
        self.connection = connection
        self._unread = b""
        connection.sendall(handshake(*headers))
        while b"\r\n\r\n" not in self._unread:
            self._receive()
        self.head, _, self._unread = self._unread.partition(b"\r\n\r\n")
        assert self.head.startswith(b"HTTP/1.1 101 "), self.head + self._unread

    def send(self, *frames: bytes) -> None:
        self.connection.sendall(b"".join(frames))

    def create(self, **fields: Any) -> None:
        self.send(client_frame(TEXT, json.dumps({"type": "response.create", **fields}).encode()))

    def frame(self) -> tuple[int, bytes]:
        """Return the opcode and the data of the next frame, which must be final and unmasked."""
        head = self._take(2)
        assert head[0] & 0xF0 == 0x80 and not head[1] & 0x80
        size = head[1]
        if size >= 126:
            size = int.from_bytes(self._take(2 if size == 126 else 8))
        return head[0] & 0x0F, self._take(size)

    def event(self) -> Any:
        opcode, data = self.frame()
        assert opcode == TEXT, (opcode, data)
        return json.loads(data)

    def turn(self, **fields: Any) -> list[Any]:
        """Return the events of one response, or the one of its failure."""
        self.create(**fields)
        events = [self.event()]
        while events[-1]["type"] not in ("error", "response.completed", "response.incomplete", "response.failed"):
            events.append(self.event())
        return events

    def close_code(self) -> int:
        """Return the code with which the server closes the connection; other frames before it are skipped."""
        opcode, data = self.frame()
        while opcode != CLOSE:
            opcode, data = self.frame()
        assert self.connection.recv(1) == b""
        return int.from_bytes(data[:2])

    def close(self) -> None:
        self.connection.close()

    def _take(self, size: int) -> bytes:
        while len(self._unread) < size:
            self._receive()
        taken, self._unread = self._unread[:size], self._unread[size:]
        return taken

    def _receive(self) -> None:
        data = self.connection.recv(65536)
        assert data, "the connection has ended"
        self._unread += data
