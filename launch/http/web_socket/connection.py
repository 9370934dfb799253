"""One web socket: its handshake, its messages one after the other, and its end."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.types import Receive, Send

from quire.launch.http.schema.errors import ApiError, ClientDisconnected, as_api_error
from quire.launch.http.serving.body_budget import HeldBytes
from quire.launch.http.serving.connections import ConnectionLimits
from quire.launch.http.serving.gate import HELD_BYTES
from quire.launch.http.serving.socket_protocol import UPGRADE, Upgrade
from quire.launch.http.web_socket.frames import (
    Close,
    CloseCode,
    FrameReader,
    Opcode,
    Ping,
    SocketClosed,
    Text,
    accept_key,
    close_frame,
    frame,
    is_key,
)

VERSION = "13"
MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Messages are put together on the event loop, which takes 2 ms per MiB."""
MAX_PENDING = 8
"""Messages that wait for the answer to an earlier one."""

Answer = Callable[[bytes], Awaitable[None]]


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
        self._frames = FrameReader(MAX_MESSAGE_BYTES)
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
        headers.append((b"sec-websocket-accept", accept_key(self._key)))
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

    async def _write(self, frames: bytes) -> None:
        await self._send({"type": "http.response.body", "body": frames, "more_body": True})

    async def _close(self, ended: list[BaseException | None]) -> None:
        error = next(each for each in ended if not isinstance(each, asyncio.CancelledError))
        match error:
            case SocketClosed():
                await self._write(close_frame(error.code, error.reason))
            case Exception() if not isinstance(error, ClientDisconnected):
                as_api_error(error)  # logs it
                await self._write(close_frame(CloseCode.INTERNAL, "internal error"))
        self._upgrade.end()

    async def _read(self) -> None:
        while True:
            for message in await self._next():
                match message:
                    case Text():
                        self._pending.append(message.data)
                    case Ping():
                        await self._write(frame(Opcode.PONG, message.data))
                    case Close():
                        raise SocketClosed(message.code or CloseCode.NORMAL)
            if len(self._pending) > MAX_PENDING:
                raise SocketClosed(CloseCode.POLICY, f"at most {MAX_PENDING} messages may wait for an answer")
            if self._pending:
                self._arrived.set()

    async def _next(self) -> list[Text | Ping | Close]:
        """Return the messages that the next bytes of the client complete."""
        try:
            async with asyncio.timeout_at(self._deadline()):
                received = await self._receive()
        except TimeoutError:
            self._check_times()
            return []
        if received["type"] == "http.disconnect":
            raise ClientDisconnected
        if self._upgrade.is_shutting_down:
            raise SocketClosed(CloseCode.GOING_AWAY, "the server is shutting down")
        found = self._frames.feed(received["body"])
        texts = [each for each in found if isinstance(each, Text)]
        if not self._frames.num_bytes:
            self._message_since = None
        elif self._message_since is None or texts:
            self._message_since = self._now()
        self._count(sum(len(each.data) for each in texts))
        return found

    def _deadline(self) -> float:
        """Return the time of the next check. An answer may end before it and make the connection idle."""
        idle = (self._now() if self._is_busy else self._idle_since) + self._limits.socket_idle_s
        return idle if self._message_since is None else min(idle, self._message_since + self._limits.socket_message_s)

    def _check_times(self) -> None:
        now = self._now()
        if self._message_since is not None and now >= self._message_since + self._limits.socket_message_s:
            raise SocketClosed(CloseCode.POLICY, "message timed out")
        if not self._is_busy and now >= self._idle_since + self._limits.socket_idle_s:
            raise SocketClosed(CloseCode.GOING_AWAY, "no message for too long")

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

    def _count(self, num_new: int = 0) -> None:
        """Count the bytes that are kept. ``num_new``: bytes that are not yet among the pending messages."""
        kept = self._frames.num_bytes + sum(map(len, self._pending)) + self._num_answering + num_new
        try:
            self._held.resize(kept)
        except ApiError as error:
            raise SocketClosed(CloseCode.TRY_LATER, error.message) from None


def check_handshake(request: Request) -> ApiError | None:
    """Return the error of a request that is no handshake of a web socket, or None."""
    if request.scope["state"].get(UPGRADE) is None:
        text = "this path needs the headers of a WebSocket handshake for GET: use POST for one response"
        return ApiError(426, text, None, "upgrade_required")
    if request.headers.get("sec-websocket-version") != VERSION:
        return ApiError(426, f"sec-websocket-version must be {VERSION}", "sec-websocket-version", "upgrade_required")
    if not is_key(request.headers.get("sec-websocket-key", "").encode()):
        return ApiError(400, "sec-websocket-key must be 16 bytes in base64", "sec-websocket-key", "invalid_value")
    return None


HANDSHAKE_HEADERS = {"upgrade": "websocket", "sec-websocket-version": VERSION}
"""Headers of the response 426."""
