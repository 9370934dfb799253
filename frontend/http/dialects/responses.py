"""/v1/responses: OpenAI's API for conversations of items, and what requests refer to of stored responses."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.dialects.responses_body import Lookup, ResponsesRequest, parse_responses
from quire.frontend.http.dialects.responses_events import SSE, EventFraming, ResponsesFormatter, Store
from quire.frontend.http.routes.conversation import AnswerReader, encode_conversation
from quire.frontend.http.routes.generate import Generation
from quire.frontend.http.schema.errors import ApiError, shorten
from quire.frontend.http.serving.body import json_response, parse_body, read_body
from quire.frontend.http.serving.gate import IGNORED_FIELDS
from quire.frontend.http.serving.peers import Peers
from quire.frontend.http.serving.server import Server
from quire.frontend.http.stored.response_store import OwnResponses
from quire.frontend.http.stored.stored_response import StoredResponse
from quire.frontend.sessions.open_session import OpenSession, Piece
from quire.frontend.text.prompts import Prompt
from quire.protocol.errors import InvalidRequest

STORED_PATH = "/peers/stored/"
"""Path of a stored response for the other front ends; clients cannot reach it."""
MAX_FETCHED = 64
"""Responses of other front ends to which one request may refer; the body is parsed once more for each."""


async def generation(
    server: Server,
    parsed: ResponsesRequest,
    num_body_bytes: int,
    store: Store | None,
    transport: EventFraming = SSE,
    so_far: OpenSession | None = None,
    session: OpenSession | None = None,
) -> Generation:
    """Return the ASGI application that answers a request.

    Args:
        store: stores the response, if that is wanted.
        so_far: what the conversation may begin with, whose tokens the prompt then begins with.
        session: gets the tokens of the prompt and the answer.
    """
    prompt, new_reader = await encode_request(server, parsed, num_body_bytes, so_far)
    formatter = ResponsesFormatter(server, parsed, len(prompt.token_ids), new_reader(), store, transport)
    piece = None
    if session is not None:
        piece = Piece("", session, prompt.token_ids.tolist(), server.engine.max_model_len, items=prompt.items)
    return Generation(server, parsed.chat, [prompt], formatter, formatter.style, piece=piece)


async def count_input_tokens(server: Server, request: Request) -> Response:
    parsed, body = await read_request(server, request)
    request.scope["state"][IGNORED_FIELDS] = parsed.chat.ignored
    await server.check_model(parsed.chat.model)
    prompt, _ = await encode_request(server, parsed, len(body))
    return json_response({"input_tokens": len(prompt.token_ids), "object": "response.input_tokens"})


async def list_input_items(server: Server, request: Request) -> Response:
    """Return all input items of a response, the newest first unless ``order`` is asc."""
    stored = find_stored(server.responses_of(request.scope), request.path_params["id"])
    items = [_with_id(item, i) for i, item in enumerate(stored.input)]
    if request.query_params.get("order", "desc") != "asc":
        items.reverse()
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": "", "last_id": ""}
    return json_response({"object": "list", "data": items, "has_more": False, **ends})


async def read_request(server: Server, request: Request) -> tuple[ResponsesRequest, bytes]:
    """Return the request, and its body."""
    body = await read_body(request)
    parse = partial(parse_responses, server.parser)
    return await read_with_stored(server, server.responses_of(request.scope), body, parse), body


async def read_with_stored(
    server: Server,
    own: OwnResponses,
    body: bytes,
    parse: Callable[[dict[str, Any], Lookup], ResponsesRequest],
) -> ResponsesRequest:
    """Return the request in a body. What it refers to may be stored by another front end, which is asked for it.

    Raises:
        ApiError, InvalidRequest: as ``parse``, ``parse_body`` and ``Peers.fetch``.
    """
    stored = StoredItems(own)
    lookup = Lookup(stored.response, stored.item)
    while True:
        try:
            return await server.texts.run(len(body), lambda: parse_body(body, lambda raw: parse(raw, lookup)))
        except NotStored as missing:
            if not await stored.fetch(server.peers, missing.id):
                raise


async def encode_request(
    server: Server, parsed: ResponsesRequest, num_body_bytes: int, so_far: OpenSession | None = None
) -> tuple[Prompt, Callable[[], AnswerReader]]:
    size = num_body_bytes + sum(map(len, parsed.before))
    try:
        return await encode_conversation(server, parsed.chat, size, so_far=so_far)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, "input" if error.param == "messages" else error.param, error.code) from None


class StoredItems:
    """What one request refers to: the responses of this front end, and those fetched from others."""

    def __init__(self, own: OwnResponses) -> None:
        self._own = own
        self._fetched: dict[str, StoredResponse] = {}

    def response(self, response_id: str) -> StoredResponse:
        found = self._fetched.get(response_id) or self._own.get(response_id)
        if found is None:
            raise NotStored(not_stored(self._own, response_id, "previous_response_id"), response_id)
        return found

    def item(self, item_id: str, where: str) -> bytes:
        fetched = (each for each in self._fetched.values() if item_id in each.output_ids)
        found = next(fetched, None) or self._own.with_item(item_id)
        if found is None:
            error = ApiError(404, f"item {shorten(item_id)} not found: send the item itself", where, "not_found")
            raise NotStored(error, item_id)
        return found.item(item_id)

    async def fetch(self, peers: Peers, missing_id: str) -> bool:
        """Fetch a response, or the one with an item, from the front end that its id names; return whether it has it."""
        if len(self._fetched) >= MAX_FETCHED:
            return False
        found = await peers.fetch(STORED_PATH + missing_id, missing_id, self._own)
        if found is not None:
            self._fetched[missing_id] = msgspec.msgpack.decode(found, type=StoredResponse)
        return found is not None


class NotStored(ApiError):
    """This front end does not have a response, or an item. ``error``: what the client gets if no other one has it."""

    def __init__(self, error: ApiError, missing_id: str) -> None:
        super().__init__(error.status, error.message, error.param, error.code)
        self.id = missing_id


async def show_stored(server: Server, request: Request) -> Response:
    """Return the response with an id, or with an item of this id, to another front end."""
    own, missing_id = server.responses_of(request.scope), request.path_params["id"]
    found = own.get(missing_id) or own.with_item(missing_id)
    if found is None:
        return Response(msgspec.msgpack.encode(None), 404)
    return Response(msgspec.msgpack.encode(msgspec.structs.replace(found, images=())))


def find_stored(own: OwnResponses, response_id: str) -> StoredResponse:
    """Return a response that has ended, or raise ApiError 404."""
    found = own.get(response_id)
    if found is None:
        raise not_stored(own, response_id, None)
    return found


def not_stored(own: OwnResponses, response_id: str, param: str | None) -> ApiError:
    if own.running(response_id) is not None or own.begun(response_id) is not None:
        text = f"response {shorten(response_id)} has not ended: wait for its end, or cancel it"
        return ApiError(409, text, param, "response_not_ended")
    hint = "it may have been dropped: send the whole conversation as input"
    if not own.is_enabled:
        hint = "this server stores no responses: send the whole conversation as input"
    text = f"response {shorten(response_id)} not found; {hint}"
    return ApiError(404, text, param, "previous_response_not_found" if param else "not_found")


def store_response(
    own: OwnResponses,
    parsed: ResponsesRequest,
    response_id: str,
    body: bytes,
    output: Sequence[dict[str, Any]],
    *,
    only_for: object | None = None,
    events: Sequence[bytes] | None = None,
) -> None:
    """Store a response that has ended. ``only_for``, ``events``: as in ``StoredResponse``."""
    items = tuple(msgspec.json.encode(item) for item in output)
    ids = () if only_for is not None else tuple(item["id"] for item in output)
    conversation = (*parsed.before, *parsed.input, *items)
    sizes = len(parsed.before), len(parsed.input)
    images = tuple(parsed.chat.options.images.stored)
    kept = None if events is None else tuple(events)
    response = StoredResponse(body, conversation, *sizes, ids, only_for, parsed.chain, images, kept)
    own.add(response_id, response)


def _with_id(item: bytes, index: int) -> dict[str, Any]:
    """Return an input item with the fields that clients expect of each."""
    fields: dict[str, Any] = msgspec.json.decode(item)
    kind = fields.get("type", "message")
    if kind == "message" and isinstance(fields.get("content"), str):
        fields["content"] = [{"type": "input_text", "text": fields["content"]}]
    return {"id": f"item_{index}", "type": kind, **fields}
