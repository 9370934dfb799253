"""Requests that continue a session of another front end, asked for over unix sockets in the server's private directory.

A session is in the memory of the front end that has opened it, whose number its id has. Another one that the client
reaches sends it the request as it is, and passes the response on, message by message.
"""

import asyncio
from pathlib import Path

import msgspec
from starlette.types import ASGIApp, Message, Scope

from quire.frontend.http.routes.fork_peers import answer_over
from quire.frontend.http.serving.body import MAX_BODY_BYTES
from quire.frontend.http.serving.gate import REQUEST_ID, TENANT
from quire.frontend.http.stored.peer_frames import listen, write_frame

MAX_QUESTION_BYTES = MAX_BODY_BYTES + 64 * 1024


class SessionQuestion(msgspec.Struct, frozen=True):
    """A request. ``tenant``, ``client_id``: of the client that asks; ``headers``: those of its trace."""

    method: str
    path: str
    tenant: int
    client_id: str
    body: bytes
    headers: list[tuple[bytes, bytes]]


def session_address(directory: Path, index: int) -> Path:
    """Return the socket of front end ``index``."""
    return directory / f"sessions-{index}"


async def share_sessions(router: ASGIApp, address: Path) -> asyncio.Server:
    """Answer the questions of other front ends by this one's routes."""

    async def answer(question: SessionQuestion, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        scope: Scope = {"type": "http", "method": question.method, "path": question.path}
        scope["state"] = {TENANT: question.tenant, REQUEST_ID: question.client_id}
        scope["headers"], scope["query_string"] = question.headers, b""
        body: Message | None = {"type": "http.request", "body": question.body}
        write_frame(writer, True)  # the question has arrived
        await answer_over(router, scope, reader, writer, body)

    return await listen(address, SessionQuestion, MAX_QUESTION_BYTES, answer)
