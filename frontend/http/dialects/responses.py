"""/v1/responses: OpenAI's API for conversations of items, and for responses that are stored or run by themselves."""

import re
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp

from quire.frontend.http.dialects.responses_background import begin
from quire.frontend.http.dialects.responses_body import BESIDES_BODY, ResponsesBody, ResponsesRequest, parse_responses
from quire.frontend.http.dialects.responses_compact import compact
from quire.frontend.http.dialects.responses_events import SSE, ResponsesFormatter, encode_request
from quire.frontend.http.dialects.responses_socket import open_socket
from quire.frontend.http.routes.generate import Generation
from quire.frontend.http.schema.errors import ApiError
from quire.frontend.http.serving.body import json_response, read_json
from quire.frontend.http.serving.gate import IGNORED_FIELDS
from quire.frontend.http.serving.row import Row
from quire.frontend.http.serving.server import Server
from quire.frontend.http.serving.sse import HEADERS
from quire.frontend.http.stored.running_responses import RunningResponse
from quire.frontend.http.stored.stored_response import BegunResponse
from quire.protocol.errors import InvalidRequest, printable


class _ResponseId(StringConvertor):
    """Ids of responses in paths, apart from the other routes below /v1/responses."""

    regex = "resp_[^/]+"


register_url_convertor("response", _ResponseId())


async def responses(server: Server, request: Request) -> ASGIApp:
    """Create one response (POST), or open a web socket for several (GET)."""
    if request.method != "POST":
        return open_socket(server, request)
    server.require_generation(request.scope["path"])
    parsed, body = await _read(server, request)
    if parsed.body.background:
        running = await begin(server, request, parsed, body)
        return _as_events(running.follow(0)) if parsed.chat.stream else json_response(msgspec.Raw(running.body))
    own = server.responses_of(request.scope)
    store = partial(parsed.store_in, own) if parsed.is_stored and own.store.is_enabled else None
    prompt, new_reader = await encode_request(server, parsed, len(body))
    formatter = ResponsesFormatter(server, parsed, prompt, new_reader(), store=store)
    return Generation(server, parsed.chat, [prompt], formatter, formatter.style)


async def count_input_tokens(server: Server, request: Request) -> Response:
    parsed, body = await _read(server, request)
    request.scope["state"][IGNORED_FIELDS] = parsed.chat.ignored
    await server.check_model(parsed.chat.model)
    prompt, _ = await encode_request(server, parsed, len(body))
    return json_response({"input_tokens": len(prompt.token_ids), "object": "response.input_tokens"})


async def list_input_items(server: Server, request: Request) -> Response:
    """Return all input items of a response, the newest first unless ``order`` is asc."""
    stored = server.responses_of(request.scope).ended(request.path_params["id"])
    items = [_with_id(item, i) for i, item in enumerate(stored.input)]
    if request.query_params.get("order", "desc") != "asc":
        items.reverse()
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": "", "last_id": ""}
    return json_response({"object": "list", "data": items, "has_more": False, **ends})


async def stored_response(server: Server, request: Request) -> Response:
    """Return a response as it is now, or its events; or delete it."""
    own, response_id = server.responses_of(request.scope), request.path_params["id"]
    found = own.find(response_id)
    if request.method == "DELETE":
        if isinstance(found, RunningResponse):
            await found.cancel()
        own.ended(response_id)
        own.delete(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})
    found = found or own.ended(response_id)
    first = _first_event(request)
    if first is None:
        return json_response(msgspec.Raw(found.body))
    if isinstance(found, BegunResponse):
        raise _waits()
    if found.events is None:
        text = "the events of this response are not kept: create it with background and stream, or get it without"
        raise ApiError(400, text, "stream", "unsupported")
    return _as_events(found.follow(first) if isinstance(found, RunningResponse) else _joined(found.events[first:]))


async def cancel_response(server: Server, request: Request) -> Response:
    """Cancel a response that runs in the background, and return it. One that has ended stays as it is."""
    own, response_id = server.responses_of(request.scope), request.path_params["id"]
    found = own.find(response_id) or own.ended(response_id)
    if isinstance(found, BegunResponse):
        raise _waits()
    if isinstance(found, RunningResponse):
        await found.cancel()
    elif not msgspec.json.decode(found.body)["background"]:
        raise ApiError(400, "only a response created with background can be cancelled", "id", "unsupported_value")
    return json_response(msgspec.Raw(found.body))


ROUTES = (
    Row("GET POST", "/v1/responses", responses, ResponsesBody, BESIDES_BODY),
    Row("POST", "/v1/responses/input_tokens", count_input_tokens, ResponsesBody, BESIDES_BODY),
    Row("POST", "/v1/responses/compact", compact, ResponsesBody, BESIDES_BODY),
    Row("GET DELETE", "/v1/responses/{id:response}", stored_response, query=("stream", "starting_after")),
    Row("GET", "/v1/responses/{id:response}/input_items", list_input_items, query=("order",)),
    Row("POST", "/v1/responses/{id:response}/cancel", cancel_response),
)


async def _read(server: Server, request: Request) -> tuple[ResponsesRequest, bytes]:
    """Return the request, and its body."""
    own = server.responses_of(request.scope)
    return await read_json(request, server.texts, lambda raw: parse_responses(server.parser, raw, own))


def _with_id(item: bytes, index: int) -> dict[str, Any]:
    """Return an input item with the fields that clients expect of each."""
    fields: dict[str, Any] = msgspec.json.decode(item)
    kind = fields.get("type", "message")
    if kind == "message" and isinstance(fields.get("content"), str):
        fields["content"] = [{"type": "input_text", "text": fields["content"]}]
    return {"id": f"item_{index}", "type": kind, **fields}


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


def _waits() -> ApiError:
    return ApiError(503, "the response waits for a front end to continue it", "id", "engine_unavailable")


def _as_events(events: AsyncIterator[bytes]) -> Response:
    headers = {name.decode(): value.decode() for name, value in HEADERS}
    return StreamingResponse(events, headers=headers, media_type="text/event-stream")


async def _joined(events: Sequence[bytes]) -> AsyncIterator[bytes]:
    yield b"".join([*events, SSE.end or b""])
