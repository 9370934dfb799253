"""One web socket: its handshake, its messages one after the other, and its end."""

import asyncio
import base64
from collections import deque
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.types import Receive, Send
from wsproto.extensions import Extension
from wsproto.frame_protocol import CloseReason, Frame, FrameDecoder, FrameProtocol, Opcode, ParseFailed, RsvBits
from wsproto.utilities import generate_accept_token

from quire.frontend.http.schema.errors import ApiError, ClientDisconnected, as_api_error
from quire.frontend.http.serving.body_budget import HeldBytes
from quire.frontend.http.serving.connections import ConnectionLimits
from quire.frontend.http.serving.gate import HELD_BYTES
from quire.frontend.http.serving.socket_protocol import UPGRADE, Upgrade

VERSION = "13"
MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Messages are put together on the event loop, in the pieces in which they arrive; 1 MiB takes 5 ms in all."""
MAX_PENDING = 8
"""Messages that wait for the answer to an earlier one."""
# Frames without the end of a message, which cost time and bring nothing: one per BYTES_PER_FRAME, besides FREE_FRAMES.
FREE_FRAMES = 4096
BYTES_PER_FRAME = 256
REFUSALS = {
    CloseReason.UNSUPPORTED_DATA: "messages must be text",
    CloseReason.INVALID_FRAME_PAYLOAD_DATA: "text must be valid UTF-8",
    CloseReason.MESSAGE_TOO_BIG: f"a message must be at most {MAX_MESSAGE_BYTES} bytes",
}
"""Reasons of the codes for which wsproto has none or the text of an exception."""

Answer = Callable[[bytes], Awaitable[None]]


class SocketClosed(Exception):
    """The connection must be closed with ``code`` and ``reason``."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def text_frame(data: bytes) -> bytes:
    """Return a frame that is a whole message.

    wsproto's takes nine times as long, because it is written for fragments and extensions, too.
    """
    size = len(data)
    if size < 126:
        return bytes((0x81, size)) + data
    return (b"\x81\x7e" + size.to_bytes(2) if size < 2**16 else b"\x81\x7f" + size.to_bytes(8)) + data


class _FrameLimits(Extension):
    """Refuses frames by their heads, before their data are kept. It is not offered to clients."""

    def __init__(self, message: bytearray) -> None:
        """``message``: what has arrived of it in earlier frames."""
        self._message = message

    def enabled(self) -> bool:
        return True

    def offer(self) -> bool:
        return False

    def frame_inbound_header(
        self, proto: FrameDecoder | FrameProtocol, opcode: Opcode, rsv: RsvBits, payload_length: int
    ) -> CloseReason | RsvBits:
        if opcode is Opcode.BINARY:
            return CloseReason.UNSUPPORTED_DATA
        if not opcode.iscontrol() and len(self._message) + payload_length > MAX_MESSAGE_BYTES:
            return CloseReason.MESSAGE_TOO_BIG
        return RsvBits(False, False, False)


class WebSocket:
    """Serves the messages of one client. While one is answered, the next ones wait.

    The bytes of messages that are not yet answered count as those of request bodies.
    """

    def __init__(self, request: Request, receive: Receive, send: Send) -> None:
        """``request``: the handshake, as ``check_handshake`` accepts it."""
        self._upgrade: Upgrade = request.scope["state"][UPGRADE]
        self._held: HeldBytes = request.scope["state"][HELD_BYTES]
        self._key = request.headers["sec-websocket-key"].encode()
        self._receive, self._send = receive, send
        self._limits: ConnectionLimits = self._upgrade.limits
        self._message = bytearray()
        """What has arrived of a message that is not complete. wsproto keeps at most one control frame besides."""
        self._frames = FrameProtocol(client=False, extensions=[_FrameLimits(self._message)])
        self._num_frames = 0
        """Since the end of the last message."""
        self._pending: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._num_answering = 0
        """Bytes of the message that is being answered, until the first event of its answer."""
        self._now = asyncio.get_running_loop().time
        self._began = self._idle_since = self._now()
        self._message_since: float | None = None
        self._is_busy = False

    @property
    def is_too_old(self) -> bool:
        return self._now() >= self._began + self._limits.socket_s

    async def serve(self, answer: Answer) -> None:
        """Accept the connection, and await ``answer`` for each message until the client or the server closes.

        ``answer`` may raise SocketClosed. It is cancelled if the connection ends first.
        """
        self._upgrade.begin()
        headers = [(b"upgrade", b"websocket"), (b"connection", b"Upgrade")]
        headers.append((b"sec-websocket-accept", generate_accept_token(self._key)))
        await self._send({"type": "http.response.start", "status": 101, "headers": headers})
        tasks = [asyncio.ensure_future(work) for work in (self._read(), self._answer_all(answer))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            self._held.resize(0)
        await self._close(ended)

    async def send(self, frames: bytes) -> None:
        if self._num_answering:
            self._num_answering = 0
            self._count()
        await self._write(frames)

    async def _write(self, frames: bytes | bytearray) -> None:
        await self._send({"type": "http.response.body", "body": bytes(frames), "more_body": True})

    async def _close(self, ended: list[BaseException | None]) -> None:
        error = next(each for each in ended if not isinstance(each, asyncio.CancelledError))
        match error:
            case SocketClosed():
                await self._write(self._frames.close(error.code, error.reason))
            case Exception() if not isinstance(error, ClientDisconnected):
                as_api_error(error)  # logs it
                await self._write(self._frames.close(CloseReason.INTERNAL_ERROR, "internal error"))
        self._upgrade.end()

    async def _read(self) -> None:
        while True:
            self._frames.receive_bytes(await self._next())
            try:
                for frame in self._frames.received_frames():
                    await self._handle(frame)
            except ParseFailed as error:
                raise SocketClosed(error.code, REFUSALS.get(error.code, str(error))) from None
            self._count()

    async def _handle(self, frame: Frame) -> None:
        """``frame``: a whole control frame, or what has arrived of a frame of a message."""
        self._num_frames += frame.frame_finished
        if self._num_frames > FREE_FRAMES + len(self._message) // BYTES_PER_FRAME:
            raise SocketClosed(CloseReason.POLICY_VIOLATION, "too many frames for one message")
        match frame.opcode, frame.payload:
            case Opcode.TEXT, str(text):
                self._add(text.encode(), frame.message_finished)
            case Opcode.PING, (bytes() | bytearray()) as data:
                await self._write(self._frames.pong(data))
            case Opcode.CLOSE, (int(code), _):
                raise SocketClosed(CloseReason.NORMAL_CLOSURE if code == CloseReason.NO_STATUS_RCVD else code)

    def _add(self, data: bytes, is_last: bool) -> None:
        self._message += data
        if not is_last:
            self._message_since = self._message_since or self._now()
            return
        if len(self._pending) == MAX_PENDING:
            text = f"at most {MAX_PENDING} messages may wait for an answer"
            raise SocketClosed(CloseReason.POLICY_VIOLATION, text)
        self._pending.append(bytes(self._message))
        self._message.clear()
        self._message_since, self._num_frames = None, 0
        self._arrived.set()

    async def _next(self) -> bytes:
        """Return the next bytes of the client; none when it is time for the next check."""
        try:
            async with asyncio.timeout_at(self._deadline()):
                received = await self._receive()
        except TimeoutError:
            self._check_times()
            return b""
        if received["type"] == "http.disconnect":
            raise ClientDisconnected
        if self._upgrade.is_shutting_down:
            raise SocketClosed(CloseReason.GOING_AWAY, "the server is shutting down")
        data: bytes = received["body"]
        return data

    def _deadline(self) -> float:
        """Return the time of the next check. An answer may end before it and make the connection idle."""
        idle = (self._now() if self._is_busy else self._idle_since) + self._limits.socket_idle_s
        return idle if self._message_since is None else min(idle, self._message_since + self._limits.socket_message_s)

    def _check_times(self) -> None:
        now = self._now()
        if self._message_since is not None and now >= self._message_since + self._limits.socket_message_s:
            raise SocketClosed(CloseReason.POLICY_VIOLATION, "message timed out")
        if not self._is_busy and now >= self._idle_since + self._limits.socket_idle_s:
            raise SocketClosed(CloseReason.GOING_AWAY, "no message for too long")

    async def _answer_all(self, answer: Answer) -> None:
        while True:
            if not self._pending:
                self._set_busy(False)
                self._arrived.clear()
                await self._arrived.wait()
            self._set_busy(True)
            message = self._pending.popleft()
            self._num_answering = len(message)
            await answer(message)
            self._num_answering = 0
            self._count()

    def _set_busy(self, is_busy: bool) -> None:
        self._is_busy = is_busy
        self._idle_since = self._now()
        self._upgrade.set_idle(not is_busy)

    def _count(self) -> None:
        kept = len(self._message) + sum(map(len, self._pending)) + self._num_answering
        try:
            self._held.resize(kept)
        except ApiError as error:
            raise SocketClosed(CloseReason.TRY_AGAIN_LATER, error.message) from None


def check_handshake(request: Request) -> ApiError | None:
    """Return the error of a request that is no handshake of a web socket, or None."""
    if request.scope["state"].get(UPGRADE) is None:
        text = "this path needs the headers of a WebSocket handshake for GET: use POST for one response"
        return ApiError(426, text, None, "upgrade_required")
    if request.headers.get("sec-websocket-version") != VERSION:
        return ApiError(426, f"sec-websocket-version must be {VERSION}", "sec-websocket-version", "upgrade_required")
    if not _is_key(request.headers.get("sec-websocket-key", "")):
        return ApiError(400, "sec-websocket-key must be 16 bytes in base64", "sec-websocket-key", "invalid_value")
    return None


def _is_key(key: str) -> bool:
    """Whether ``key`` is 16 bytes in base64, as RFC 6455 requires."""
    try:
        return len(base64.b64decode(key, validate=True)) == 16
    except ValueError:
        return False


HANDSHAKE_HEADERS = {"upgrade": "websocket", "sec-websocket-version": VERSION}
"""Headers of the response 426."""
