"""/v1/responses as a web socket: each message begins a response, whose events are messages, too."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from wsproto.frame_protocol import CloseReason

from quire.frontend.http.dialects.responses_body import ResponsesRequest, parse_responses
from quire.frontend.http.dialects.responses_events import EventFraming, ResponsesFormatter, Store, encode_request
from quire.frontend.http.routes.generate import Generation
from quire.frontend.http.schema.errors import ApiError, ClientDisconnected, as_api_error, shorten
from quire.frontend.http.serving.access_log import AccessLog
from quire.frontend.http.serving.body import parse_body
from quire.frontend.http.serving.server import Server
from quire.frontend.http.web_socket.connection import (
    HANDSHAKE_HEADERS,
    SocketClosed,
    WebSocket,
    check_handshake,
    text_frame,
)
from quire.frontend.sessions.open_session import OpenSession, Piece
from quire.protocol.errors import InvalidRequest

CREATE = "response.create"
UNSUPPORTED = {"background": False, "stream_id": None}
"""Fields that OpenAI has for a connection and that this server does not have, with the value that changes nothing."""


def open_socket(server: Server, request: Request) -> ASGIApp:
    if (error := check_handshake(request)) is not None:
        return error.response(request.scope["path"], HANDSHAKE_HEADERS if error.status == 426 else None)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        conversation = _SocketConversation(server, scope, WebSocket(request, receive, send))
        try:
            await conversation.socket.serve(conversation.answer)
        finally:
            conversation.forget()

    return serve


class _SocketConversation:
    """The responses of one connection.

    The newest response that is not stored for other connections can be continued on this one. A request that continues
    the newest response begins with the tokens of that one as they were sampled, if its conversation begins with their
    text.
    """

    def __init__(self, server: Server, scope: Scope, socket: WebSocket) -> None:
        self._server = server
        self._scope = scope
        self.socket = socket
        self._responses = server.responses_of(scope, socket)
        self._own: str | None = None
        """Id of that response."""
        self._previous: str | None = None
        """Id of the response that the current message continues."""
        self._newest: tuple[str, OpenSession] | None = None
        """The newest response, its id and its tokens."""

    async def answer(self, message: bytes) -> None:
        if self.socket.is_too_old:
            limit = "this connection has reached its age limit: open a new one"
            await self._send_error(ApiError(400, limit, None, "websocket_connection_limit_reached"))
            raise SocketClosed(CloseReason.NORMAL_CLOSURE, limit)
        # Each response has a line in the log, as over HTTP.
        scope = {**self._scope, "state": dict(self._scope["state"])}
        await AccessLog(partial(self._respond, message))(scope, _never, self._send)

    async def _respond(self, message: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        self._previous, server = None, self._server
        try:
            server.require_generation(scope["path"])
            parsed = await server.texts.run(len(message), lambda: parse_body(message, self._parse))
            transport = EventFraming(lambda kind, data: text_frame(data), error=self._failed)
            newest, session = self._newest, OpenSession(0, 0.0)
            so_far = newest[1] if newest is not None and newest[0] == self._previous else None
            prompt, new_reader = await encode_request(server, parsed, len(message), so_far)
            given = server, parsed, prompt, new_reader()
            formatter = ResponsesFormatter(*given, transport, store=self._store(parsed, session))
            piece = Piece("", session, prompt.token_ids.tolist(), server.engine.max_model_len, items=prompt.items)
            respond = Generation(server, parsed.chat, [prompt], formatter, formatter.style, piece=piece)
            await respond(scope, receive, watched_send)
        except ClientDisconnected:
            raise
        except Exception as error:
            if started:
                raise
            refusal = as_api_error(error)
            await send({"type": "http.response.start", "status": refusal.status, "headers": []})
            await self._send_error(refusal)

    def _failed(self, error: ApiError, number: int) -> bytes:
        """Return the one event of a failure, as JSON. A response whose continuation fails cannot be continued again."""
        if self._previous is not None and self._previous == self._own:
            self.forget()
        fields: dict[str, Any] = msgspec.json.decode(error.body())
        fields["error"]["code"] = error.code or "server_error"
        return msgspec.json.encode({"type": "error", "status": error.status, "sequence_number": number, **fields})

    def _parse(self, raw: Mapping[str, Any]) -> ResponsesRequest:
        if raw.get("type") != CREATE:
            raise InvalidRequest(f"type must be {CREATE} (got {shorten(str(raw.get('type')))})", "type")
        for name, unset in UNSUPPORTED.items():
            if raw.get(name) not in (None, unset):
                text = f"{name} is not supported on a connection: open another one"
                raise InvalidRequest(text, name, "unsupported")
        if isinstance(raw.get("previous_response_id"), str):
            self._previous = raw["previous_response_id"]
        fields = {name: value for name, value in raw.items() if name not in ("type", *UNSUPPORTED)}
        return parse_responses(self._server.parser, {**fields, "stream": True}, self._responses)

    def _store(self, parsed: ResponsesRequest, session: OpenSession) -> Store | None:
        """Return what stores a response, which has its tokens in ``session``."""
        if parsed.is_stored and not self._responses.store.is_enabled:
            return None

        def keep(response_id: str, body: bytes, output: Sequence[dict[str, Any]]) -> None:
            if not parsed.is_stored:
                self.forget()
                self._own = response_id
            parsed.store_in(self._responses, response_id, body, output)
            self._newest = response_id, session

        return keep

    def forget(self) -> None:
        if self._own is not None:
            self._responses.delete(self._own)
            self._own = None

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.body" and message["body"]:
            await self.socket.send(message["body"])

    async def _send_error(self, error: ApiError) -> None:
        await self.socket.send(text_frame(self._failed(error, 0)))


async def _never() -> Message:
    """Receive nothing: the connection's end cancels the answer."""
    return await asyncio.Future()
