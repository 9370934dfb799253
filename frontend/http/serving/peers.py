"""The other front ends: requests about what one of them alone has, over unix sockets in the server's private directory.

A connection may reach any front end, but a running request, an open session and a stored response are in the memory of
one, whose number their ids have. The front end that a client has reached sends the request to that one, and passes the
response on, message by message. Shared memory instead would cost every request something, and the death of one front
end would concern all.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.frontend.http.schema.errors import ApiError, ClientDisconnected, as_api_error
from quire.frontend.http.serving.body import MAX_BODY_BYTES
from quire.frontend.http.serving.gate import REQUEST_ID, TENANT
from quire.frontend.http.serving.sse import run_until_disconnect
from quire.frontend.http.serving.tracing import PARENT_HEADERS
from quire.frontend.ids import front_end_of

TIMEOUT_S = 5.0
SIZE_BYTES = 8
MAX_REQUEST_BYTES = MAX_BODY_BYTES + 64 * 1024


class RelayedRequest(msgspec.Struct, frozen=True):
    """A request. ``tenant``, ``client_id``: of the client that sends it; ``headers``: those of its trace."""

    method: str
    path: str
    query: bytes = b""
    tenant: int = 0
    client_id: str = ""
    body: bytes = b""
    headers: list[tuple[bytes, bytes]] = []


class RelayedPart(msgspec.Struct, frozen=True):
    """A message of a response, with the fields of ASGI: the first has a status, the others a body."""

    type: Literal["http.response.start", "http.response.body"]
    status: int = 0
    headers: list[tuple[bytes, bytes]] = []
    body: bytes = b""
    more_body: bool = False


class Peers:
    """This front end and the others of its server."""

    def __init__(self, directory: Path = Path(), index: int = 0, count: int = 1) -> None:
        """``index``: number of this front end among ``count``."""
        self._directory, self.index, self._count = directory, index, count

    def address(self, index: int) -> Path:
        """Return the socket of a front end."""
        return self._directory / f"front-end-{index}"

    async def listen(self, app: ASGIApp) -> asyncio.Server | None:
        """Answer the requests of the other front ends with ``app``; return None if there are none.

        A socket that an earlier process of this number has left is replaced.
        """
        if self._count == 1:
            return None

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # the other process has ended, or gave up
            ended = OSError, EOFError, TimeoutError, msgspec.MsgspecError, ClientDisconnected
            with contextlib.closing(writer), contextlib.suppress(*ended):
                async with asyncio.timeout(TIMEOUT_S):
                    frame = await _read_frame(reader, MAX_REQUEST_BYTES)
                request = msgspec.msgpack.decode(frame, type=RelayedRequest)
                _write_frame(writer, True)  # the request has arrived
                await _answer(app, request, reader, writer)

        address = self.address(self.index)
        address.unlink(missing_ok=True)
        return await asyncio.start_unix_server(serve, str(address))

    def is_elsewhere(self, held_id: str) -> bool:
        """Whether another front end has what ``held_id`` names, if it exists."""
        index = front_end_of(held_id)
        return index is not None and index != self.index and index < self._count

    async def relay(self, request: Request, held_id: str, body: bytes) -> ASGIApp | None:
        """Return the response of the front end that has what ``held_id`` names; None if that is this one, or it has
        died.

        Raises:
            ApiError: 503, the other front end does not answer.
        """
        index = front_end_of(held_id)
        if index is None or not self.is_elsewhere(held_id):
            return None
        scope, state = request.scope, request.scope["state"]
        relayed = RelayedRequest(
            request.method,
            scope["path"],
            scope["query_string"],
            state[TENANT],
            state[REQUEST_ID],
            body,
            [each for each in scope["headers"] if each[0] in PARENT_HEADERS],
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(str(self.address(index)))
                with contextlib.ExitStack() as stack:
                    stack.callback(writer.close)
                    _write_frame(writer, relayed)
                    await _read_frame(reader)  # before any of the response, which may take long: it has arrived
                    stack.pop_all()
        except TimeoutError:
            text = "the front end that may have it does not answer: retry later"
            raise ApiError(503, text, None, "engine_unavailable") from None
        except (OSError, EOFError):
            return None
        return _passed_on(reader, writer)


def _passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> ASGIApp:
    """Return the response that another front end sends over a connection."""

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        async def pass_on() -> None:
            try:
                async for message in _messages(reader):
                    await send(message)
            except EOFError:
                text = "the front end that has the request has died"
                raise ApiError(503, text, None, "engine_unavailable") from None

        with contextlib.closing(writer):
            await run_until_disconnect(receive, pass_on())

    return respond


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[Message]:
    """Yield the ASGI messages of one response. Raise EOFError if it is not complete."""
    more = True
    while more:
        try:
            part = msgspec.msgpack.decode(await _read_frame(reader), type=RelayedPart)
        except (OSError, msgspec.MsgspecError):
            raise EOFError from None
        if part.type == "http.response.start":
            yield {"type": part.type, "status": part.status, "headers": part.headers}
        else:
            more = part.more_body
            yield {"type": part.type, "body": part.body, "more_body": more}


async def _answer(
    app: ASGIApp, request: RelayedRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Send the messages of the response to the front end that passes it on. An error is a response, too."""
    scope: Scope = {"type": "http", "method": request.method, "path": request.path, "query_string": request.query}
    scope["state"], scope["headers"] = {TENANT: request.tenant, REQUEST_ID: request.client_id}, request.headers
    received = iter([{"type": "http.request", "body": request.body}])
    started = False

    async def receive() -> Message:
        if (message := next(received, None)) is not None:
            return message
        await reader.read(1)  # nothing follows the request: this ends with the connection
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal started
        started = True
        _write_frame(writer, message)
        await writer.drain()

    try:
        await app(scope, receive, send)
    except (ClientDisconnected, OSError):
        raise
    except Exception as error:
        if not started:  # otherwise the end of the connection shows that the response is incomplete
            await as_api_error(error).response(request.path)(scope, receive, send)


def _write_frame(writer: asyncio.StreamWriter, message: Any) -> None:
    """Write the size of a message, and the message."""
    data = msgspec.msgpack.encode(message)
    writer.write(len(data).to_bytes(SIZE_BYTES) + data)


async def _read_frame(reader: asyncio.StreamReader, most: int | None = None) -> bytes:
    """Return one message, still encoded; raise EOFError if it has more than ``most`` bytes, or the connection ends."""
    size = int.from_bytes(await reader.readexactly(SIZE_BYTES))
    if most is not None and size > most:
        raise EOFError
    return await reader.readexactly(size)
