"""Open sessions: /v1/sessions, and the requests of completions and chat that continue one."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.frontend.http.schema.bodies import SessionBody
from quire.frontend.http.schema.schema import CommonRequest
from quire.frontend.http.serving.body import json_response
from quire.frontend.http.serving.gate import IGNORED_FIELDS, TENANT
from quire.frontend.http.serving.row import Row
from quire.frontend.http.serving.server import Server
from quire.frontend.sessions.chat_piece import check_kind, whole_prompt
from quire.frontend.sessions.open_session import TEXT, OpenSession, Piece, check_number
from quire.frontend.text.prompts import Prompt
from quire.protocol.errors import InvalidRequest

R = TypeVar("R", bound=CommonRequest)


async def open_session(server: Server, request: Request) -> Response:
    """Open a session, which begins without tokens."""
    server.require_generation(request.scope["path"])
    tenant = request.scope["state"][TENANT]
    with counted(server):
        session_id = server.sessions.open(tenant)
    return _object(server, session_id, server.sessions.get(tenant, session_id))


async def session(server: Server, request: Request) -> Response:
    """Return a session, or end it."""
    session_id = request.path_params["id"]
    tenant, is_end = request.scope["state"][TENANT], request.method == "DELETE"
    found = (server.sessions.close if is_end else server.sessions.get)(tenant, session_id)
    return _object(server, session_id, found, "ended" if is_end else None)


ROUTES = (Row("POST", "/v1/sessions", open_session), Row("GET DELETE", "/v1/sessions/{id}", session))


def _object(server: Server, session_id: str, found: OpenSession, status: str | None = None) -> Response:
    """Return a session as clients see it: the number of its next piece, and after how many seconds without it ends."""
    return json_response(
        {
            "id": session_id,
            "object": "session",
            "status": status or ("busy" if found.is_busy else "idle"),
            "pieces": found.num_pieces,
            "tokens": found.num_tokens,
            "timeout": server.sessions.timeout_s,
        }
    )


async def relay_piece(server: Server, request: Request, parsed: CommonRequest, body: bytes) -> ASGIApp | None:
    """Return the response of another front end to a request that continues a session; None if this one has that.

    Raises:
        ApiError: as ``Peers.relay``.
    """
    assert parsed.session is not None
    request.scope["state"][IGNORED_FIELDS] = parsed.ignored  # a header of the response, which this front end writes
    return await server.peers.relay(request, parsed.session.id, body)


def begin_piece(server: Server, request: Request, given: SessionBody, *, is_chat: bool) -> OpenSession:
    """Return the session that a request continues.

    Raises:
        InvalidRequest: there is none, another piece is due, or it continues the other kind of input.
    """
    with counted(server):
        tenant = request.scope["state"][TENANT]
        server.sessions.require_room(tenant)
        found = server.sessions.use(tenant, given.id)
        check_number(given.id, found, given.piece)
        check_kind(given.id, found, is_chat=is_chat)
        return found


@contextlib.contextmanager
def counted(server: Server) -> Iterator[None]:
    """Count a refusal in the metrics."""
    try:
        yield
    except InvalidRequest as refused:
        server.metrics.rejected(refused.code)
        raise


def as_piece(
    server: Server, found: OpenSession, given: SessionBody, prompt: Prompt | None, end: str = TEXT
) -> tuple[Piece, Prompt]:
    """Return the next piece of a session, and the prompt of its request: all tokens so far, and those of the piece.

    Args:
        prompt: the piece alone; None without tokens.
        end: as of ``Piece``.
    """
    piece = Piece(
        given.id,
        found,
        [] if prompt is None else prompt.token_ids.tolist(),
        server.engine.max_model_len,
        end=end,
        items=() if prompt is None else prompt.items,
        number=given.piece,
        on_end=partial(server.sessions.piece_ended, given.id, close=given.close),
    )
    return piece, whole_prompt(piece, prompt, is_chat=end != TEXT)
