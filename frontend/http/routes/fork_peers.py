"""Forks of requests of the other front ends, asked for over unix sockets in the server's private directory.

A request can be forked only by the front end that has it. The one that a client has reached sends it the order, and
passes the response on, message by message.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.frontend.http.schema.bodies import ForkBody
from quire.frontend.http.schema.errors import ApiError, ClientDisconnected, as_api_error
from quire.frontend.http.serving.gate import REQUEST_ID, TENANT
from quire.frontend.http.serving.sse import run_until_disconnect
from quire.frontend.http.stored.peer_frames import FRONT_END_SILENT, TIMEOUT_S, listen, read_frame, write_frame
from quire.protocol.errors import QuireError

PATH = "/v1/requests/fork"
MAX_QUESTION_BYTES = 64 * 1024


class ForkQuestion(msgspec.Struct, frozen=True):
    """``id``, ``body``: of the request to fork, and how; ``tenant``, ``client_id``: of the client that asks."""

    id: str
    tenant: int
    client_id: str
    body: ForkBody


Fork = Callable[[Scope, str, ForkBody], ASGIApp | None]
"""Returns the response to a fork, from scope, id and body. None: the front end has no request of that id."""


def fork_address(directory: Path, index: int) -> Path:
    """Return the socket of front end ``index``."""
    return directory / f"forks-{index}"


async def share_forks(fork: Fork, address: Path) -> asyncio.Server:
    """Answer the questions of other front ends."""

    async def answer(question: ForkQuestion, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        scope: Scope = {"type": "http", "method": "POST", "path": PATH, "headers": []}
        scope["state"] = {TENANT: question.tenant, REQUEST_ID: question.client_id}
        try:
            app = fork(scope, question.id, question.body)
        except QuireError as error:
            app = as_api_error(error).response(PATH)
        write_frame(writer, app is not None)
        if app is not None:
            await answer_over(app, scope, reader, writer)

    return await listen(address, ForkQuestion, MAX_QUESTION_BYTES, answer)


async def answer_over(
    app: ASGIApp,
    scope: Scope,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    request: Message | None = None,
) -> None:
    """Send the messages of a response to the front end that passes it on. An error is a response, too.

    ``request``: the message with the request's body, if it has one.
    """
    started = False

    async def receive() -> Message:
        nonlocal request
        if request is not None:
            message, request = request, None
            return message
        await reader.read(1)  # nothing follows the question
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal started
        started = True
        write_frame(writer, message)
        await writer.drain()

    try:
        await app(scope, receive, send)
    except (ClientDisconnected, OSError):
        raise
    except Exception as error:
        if not started:  # otherwise the end of the connection shows that the response is incomplete
            await as_api_error(error).response(scope["path"])(scope, receive, send)


async def ask_peers(addresses: Sequence[Path], question: ForkQuestion) -> ASGIApp | None:
    """Return the response of the front end that has the request; None if none has it.

    Raises:
        ApiError: 503, one of them does not answer.
    """
    for address in addresses:
        if (response := await ask_peer(address, question)) is not None:
            return response
    return None


async def ask_peer(address: Path, question: msgspec.Struct) -> ASGIApp | None:
    """Return the response of the front end at this address; None if it has none, or has died.

    Raises:
        ApiError: 503, it does not answer.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(str(address))
            found = False
            try:
                write_frame(writer, question)
                found = msgspec.msgpack.decode(await read_frame(reader), type=bool)
            finally:
                if not found:
                    writer.close()
            return RelayedResponse(reader, writer) if found else None
    except TimeoutError:
        raise ApiError(503, FRONT_END_SILENT, None, "engine_unavailable") from None
    except (OSError, EOFError):
        return None


class RelayedResponse:
    """An ASGI application: the response of another front end, whose messages are read from a socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self._relay(send))
        finally:
            self._writer.close()

    async def _relay(self, send: Send) -> None:
        more = True
        while more:
            try:
                message: dict[str, Any] = msgspec.msgpack.decode(await read_frame(self._reader))
            except (OSError, EOFError):
                text = "the front end that has the request has died"
                raise ApiError(503, text, None, "engine_unavailable") from None
            if message["type"] == "http.response.start":
                message["headers"] = [(name, value) for name, value in message["headers"]]
            else:
                more = message.get("more_body", False)
            await send(message)
