"""Responses that run in the background: begun by one request, read by others, and continued by the next front end."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import BinaryIO

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message

from quire.frontend.engine.kept_updates import KeptUpdates
from quire.frontend.engine.update import Update
from quire.frontend.http.dialects.responses import (
    encode_request,
    find_stored,
    generation,
    not_stored,
    read_request,
    read_with_stored,
    store_response,
)
from quire.frontend.http.dialects.responses_body import ResponsesRequest, parse_responses
from quire.frontend.http.dialects.responses_events import SSE, EventFraming, ResponsesFormatter
from quire.frontend.http.routes.conversation import AnswerReader
from quire.frontend.http.routes.generate import Generation
from quire.frontend.http.schema.errors import ApiError, as_api_error
from quire.frontend.http.serving.body import json_response
from quire.frontend.http.serving.gate import IGNORED_FIELDS, REQUEST_ID, TENANT
from quire.frontend.http.serving.server import Server
from quire.frontend.http.serving.sse import HEADERS
from quire.frontend.http.stored.response_files import BegunResponse, append
from quire.frontend.http.stored.running_responses import RunningResponse
from quire.frontend.http.stored.stored_response import StoredResponse
from quire.frontend.text.prompts import Prompt
from quire.protocol.errors import InvalidRequest, printable

MAX_DEATHS = 3
"""Front ends that may die while a response runs; then it has failed, because it may be the cause."""
SECRETS = (b"authorization", b"x-api-key", b"cookie")


async def create_response(server: Server, request: Request) -> ASGIApp:
    server.require_generation(request.scope["path"])
    parsed, body = await read_request(server, request)
    if parsed.background:
        return await _begin(server, request, parsed, body)
    store = None
    if parsed.store and server.response_store.is_enabled:
        store = partial(store_response, server.responses_of(request.scope), parsed)
    return await generation(server, parsed, len(body), store)


async def stored_response(server: Server, request: Request) -> Response:
    """Return a response as it is now, or its events; or delete it."""
    own, response_id = server.responses_of(request.scope), request.path_params["id"]
    running = own.running(response_id)
    if request.method == "DELETE":
        if running is not None:
            await running.cancel()
        if not own.delete(response_id):
            raise not_stored(own, response_id, None)
        return json_response({"id": response_id, "object": "response", "deleted": True})
    first = _first_event(request)
    if running is None and own.get(response_id) is None and (begun := own.begun(response_id)) is not None:
        if first is not None:
            raise ApiError(503, "the response waits for a front end to continue it", "id", "engine_unavailable")
        return _as_json(begun.shown)
    found = running or find_stored(own, response_id)
    if first is None:
        return _as_json(found.body)
    if found.events is None:
        text = "the events of this response are not kept: create it with background and stream, or get it without"
        raise ApiError(400, text, "stream", "unsupported")
    return _as_events(found.follow(first) if isinstance(found, RunningResponse) else _joined(found.events[first:]))


async def cancel_response(server: Server, request: Request) -> Response:
    """Cancel a response that runs in the background, and return it. One that has ended stays as it is."""
    own, response_id = server.responses_of(request.scope), request.path_params["id"]
    if (running := own.running(response_id)) is not None:
        await running.cancel()
        return _as_json(running.body)
    if own.get(response_id) is None and own.begun(response_id) is not None:
        raise ApiError(503, "the response waits for a front end to continue it", "id", "engine_unavailable")
    body = find_stored(own, response_id).body
    if not msgspec.json.decode(body)["background"]:
        raise ApiError(400, "only a response created with background can be cancelled", "id", "unsupported_value")
    return _as_json(body)


async def continue_responses(server: Server) -> None:
    """Continue what the predecessor of this front end has begun. What cannot be continued has failed."""
    store = server.response_store
    for response_id, begun, parts, file in store.files.own_begun():
        if store.get(begun.tenant, response_id) is not None:  # it has ended just before its front end
            file.close()
            store.files.end(response_id)
            continue
        append(file, b"")  # each front end that continues it leaves this mark
        try:
            if parts.count(b"") + 1 >= MAX_DEATHS:
                raise ApiError(500, f"{MAX_DEATHS} front ends have died while it ran", None, "engine_fault")
            own = server.responses_of({"state": {TENANT: begun.tenant}})
            parsed = await read_with_stored(server, own, begun.body, partial(parse_responses, server.parser))
            earlier = [msgspec.msgpack.decode(part, type=Update) for part in parts if part]
            encoded = await encode_request(server, parsed, len(begun.body))
            work = _Work(server, response_id, begun, parsed, encoded, earlier)
        except Exception as error:
            file.close()
            refused = as_api_error(error)
            ended = {"status": "failed", "error": {"code": refused.code or "server_error", "message": refused.message}}
            body = msgspec.json.encode(msgspec.json.decode(begun.shown) | ended)
            store.add(begun.tenant, response_id, StoredResponse(body, (), 0, 0, ()))
            store.files.end(response_id)
        else:
            work.start(file)


async def _begin(server: Server, request: Request, parsed: ResponsesRequest, body: bytes) -> ASGIApp:
    state, store = request.scope["state"], server.response_store
    if not store.is_enabled:
        text = "background is not supported: this server stores no responses (--max-stored-response-bytes 0)"
        raise InvalidRequest(text, "background", "unsupported")
    store.running.require_room(state[TENANT])
    headers = [each for each in request.scope["headers"] if each[0] not in SECRETS]
    response_id = server.new_id("resp_")
    begun = BegunResponse(state[TENANT], state[REQUEST_ID], headers, body, int(time.time()), b"")
    work = _Work(server, response_id, begun, parsed, await encode_request(server, parsed, len(body)))
    try:
        file = store.files.begin(response_id, msgspec.structs.replace(begun, shown=work.running.body))
    except OSError:
        store.running.remove(response_id)
        raise ApiError(503, "no room for a response in the background: retry later", None, "out_of_memory") from None
    work.start(file)
    state[IGNORED_FIELDS] = parsed.chat.ignored
    return _as_events(work.running.follow(0)) if parsed.chat.stream else _as_json(work.running.body)


class _Work:
    """What computes one response, and stores it when it has ended."""

    def __init__(
        self,
        server: Server,
        response_id: str,
        begun: BegunResponse,
        parsed: ResponsesRequest,
        encoded: tuple[Prompt, Callable[[], AnswerReader]],
        earlier: Sequence[Update] = (),
    ) -> None:
        """``encoded``: as ``encode_request`` returns it; ``earlier``: the updates that other front ends have had."""
        self._server, self._response_id, self._begun, self._parsed = server, response_id, begun, parsed
        self.running = server.response_store.running.add(begun.tenant, response_id, keeps_events=parsed.chat.stream)
        prompt, new_reader = encoded
        self._formatter = ResponsesFormatter(
            server,
            parsed,
            len(prompt.token_ids),
            new_reader(),
            None,
            EventFraming(self.running.add),
            response_id=response_id,
            created=begun.created,
        )
        self._formatter.queue()
        chat, kept = replace(parsed.chat, stream=True), KeptUpdates(earlier, self._keep)
        self._answer = Generation(server, chat, [prompt], self._formatter, self._formatter.style, kept=kept)
        self._file: BinaryIO | None = None

    def start(self, file: BinaryIO | None) -> None:
        """``file``: gets the updates of the answer."""
        self._file = file
        state = {TENANT: self._begun.tenant, REQUEST_ID: self._begun.client_id}
        scope = {"type": "http", "path": "/v1/responses", "headers": self._begun.headers, "state": state}
        self.running.task = asyncio.create_task(self._answer(scope, _never, _send_nothing))
        self.running.task.add_done_callback(self._ended)

    def _keep(self, update: Update) -> None:
        if self._file is not None:
            append(self._file, msgspec.msgpack.encode(update))

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._file is not None:
            self._file.close()
        if task.cancelled() and not self.running.is_cancelled:
            return  # this process ends
        if task.cancelled():
            self._formatter.cancelled()
        elif (error := task.exception()) is not None:
            assert isinstance(error, Exception)
            self._formatter.failed(as_api_error(error))
        store, response_id = self._server.response_store, self._response_id
        own = self._server.responses_of({"state": {TENANT: self._begun.tenant}})
        body, events = self.running.ending
        store_response(own, self._parsed, response_id, body, self._formatter.output, events=events)
        store.files.end(response_id)
        self.running.publish()
        store.running.remove(response_id)


def _first_event(request: Request) -> int | None:
    """Return the number of the first event to send, or None for a response without events."""
    query = request.query_params
    if query.get("stream", "false").lower() in ("false", "0", ""):
        return None
    after = query.get("starting_after", "-1")
    if re.fullmatch("-1|[0-9]{1,9}", after) is None:
        text = f"starting_after must be the sequence_number of an event, from 0 (got {printable(after)})"
        raise InvalidRequest(text, "starting_after")
    return int(after) + 1


def _as_json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _as_events(events: AsyncIterator[bytes]) -> Response:
    headers = {name.decode(): value.decode() for name, value in HEADERS}
    return StreamingResponse(events, headers=headers, media_type="text/event-stream")


async def _joined(events: Sequence[bytes]) -> AsyncIterator[bytes]:
    yield b"".join([*events, SSE.end or b""])


async def _never() -> Message:
    """Receive nothing: no client can disconnect."""
    return await asyncio.Future()


async def _send_nothing(message: Message) -> None:
    pass
