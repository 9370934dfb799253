"""Responses that run in the background: begun by one request, read by others, and continued by the next front end."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import BinaryIO

import msgspec
from starlette.requests import Request
from starlette.types import Message

from quire.frontend.engine.kept_updates import KeptUpdates
from quire.frontend.engine.update import Update
from quire.frontend.http.dialects.responses_body import ResponsesRequest, parse_responses
from quire.frontend.http.dialects.responses_events import EventFraming, ResponsesFormatter, encode_request
from quire.frontend.http.routes.conversation import AnswerReader
from quire.frontend.http.routes.generate import Generation
from quire.frontend.http.routes.sessions import counted
from quire.frontend.http.schema.errors import ApiError, ClientDisconnected, as_api_error
from quire.frontend.http.serving.body import parse_body
from quire.frontend.http.serving.gate import IGNORED_FIELDS, REQUEST_ID, TENANT
from quire.frontend.http.serving.key_queues import WaitingSequences
from quire.frontend.http.serving.server import Server
from quire.frontend.http.stored.response_files import append
from quire.frontend.http.stored.running_responses import RunningResponse
from quire.frontend.http.stored.stored_response import BegunResponse, StoredResponse
from quire.frontend.text.prompts import Prompt
from quire.protocol.errors import InvalidRequest

MAX_DEATHS = 3
"""Front ends that may die while a response runs; then it has failed, because it may be the cause."""
SECRETS = (b"authorization", b"x-api-key", b"cookie")


async def begin(server: Server, request: Request, parsed: ResponsesRequest, body: bytes) -> RunningResponse:
    """Begin a response.

    Raises:
        InvalidRequest: it is refused, also (rate_limit_exceeded) for the number of those that run or wait.
        ApiError: 503, there is no room for its file.
    """
    state, store = request.scope["state"], server.response_store
    if not store.is_enabled:
        text = "background is not supported: this server stores no responses (--max-stored-response-bytes 0)"
        raise InvalidRequest(text, "background", "unsupported")
    encoded = await encode_request(server, parsed, len(body))
    with counted(server):
        store.running.require_room(state[TENANT], len(body))
        waiting = server.key_queues.enter(state[TENANT], 1)
    state[IGNORED_FIELDS] = parsed.chat.ignored
    headers = [each for each in request.scope["headers"] if each[0] not in SECRETS]
    begun = BegunResponse(state[TENANT], state[REQUEST_ID], headers, body, int(time.time()))
    try:
        return _start(server, server.new_id("resp_"), begun, parsed, encoded, waiting)
    except OSError:
        waiting.remove(0)
        raise ApiError(503, "no room for a response in the background: retry later", None, "out_of_memory") from None


async def continue_responses(server: Server) -> None:
    """Continue what the predecessor of this front end has begun. What cannot be continued has failed."""
    store = server.response_store
    for path, begun, parts in store.files.own(BegunResponse):
        response_id, own = path.stem, server.responses_of({"state": {TENANT: begun.tenant}})
        if response_id in store.running:  # this front end has begun it
            continue
        if store.get(begun.tenant, response_id) is not None:  # it has ended just before its front end
            path.unlink()
            continue
        append(file := path.open("ab", buffering=0), b"")  # each front end that continues it leaves this mark
        try:
            if parts.count(b"") + 1 >= MAX_DEATHS:
                raise ApiError(500, f"{MAX_DEATHS} front ends have died while it ran", None, "engine_fault")
            size, parse = len(begun.request), partial(parse_responses, server.parser, stored=own)
            parsed = await server.texts.run(size, partial(parse_body, begun.request, parse))
            encoded = await encode_request(server, parsed, size)
            earlier = [msgspec.msgpack.decode(part, type=Update) for part in parts if part]
            waiting = server.key_queues.enter(begun.tenant, 1, is_limited=False)
            _start(server, response_id, begun, parsed, encoded, waiting, earlier, file)
        except Exception as error:
            file.close()
            refused = as_api_error(error)
            ended = {"status": "failed", "error": {"code": refused.code or "server_error", "message": refused.message}}
            shown = msgspec.json.encode(msgspec.json.decode(begun.body) | ended)
            store.add(response_id, StoredResponse(begun.tenant, shown, (), 0, 0))
            path.unlink()


def _start(
    server: Server,
    response_id: str,
    begun: BegunResponse,
    parsed: ResponsesRequest,
    encoded: tuple[Prompt, Callable[[], AnswerReader]],
    waiting: WaitingSequences,
    earlier: Sequence[Update] = (),
    file: BinaryIO | None = None,
) -> RunningResponse:
    """Start to compute a response, which is stored when it has ended.

    Args:
        encoded: as ``encode_request`` returns it.
        waiting: its place in the queue of its key.
        earlier: the updates that other front ends have had.
        file: has those, and gets all further ones; None: a new one.

    Raises:
        OSError: there is no room for a file.
    """
    store, (prompt, new_reader) = server.response_store, encoded
    size, keeps_events = len(begun.request), parsed.chat.stream
    running = RunningResponse(begun.tenant, size, store.running, keeps_events=keeps_events)
    given = server, parsed, prompt, new_reader(), EventFraming(running.add)
    formatter = ResponsesFormatter(*given, response_id=response_id, created=begun.created)
    formatter.begin("queued")
    updates = file or store.files.begin(response_id, msgspec.structs.replace(begun, body=running.body))
    kept = KeptUpdates(earlier, lambda update: append(updates, msgspec.msgpack.encode(update)))
    chat = replace(parsed.chat, stream=True)
    answer = Generation(server, chat, [prompt], formatter, formatter.style, kept=kept, waiting=waiting)
    state = {TENANT: begun.tenant, REQUEST_ID: begun.client_id}
    scope = {"type": "http", "path": "/v1/responses", "headers": begun.headers, "state": state}

    async def cancelled() -> Message:
        await running.cancelled.wait()
        return {"type": "http.disconnect"}

    async def compute() -> None:
        try:
            with waiting:
                await answer(scope, cancelled, _send_nothing)
        except ClientDisconnected:
            formatter.cancelled()
        except Exception as error:
            formatter.failed(as_api_error(error))
        body, last = running.ending
        events = None if running.events is None else (*running.events, last)
        parsed.store_in(server.responses_of(scope), response_id, body, formatter.output, events)
        store.files.delete(response_id, BegunResponse)
        running.publish()
        store.running.remove(response_id)

    store.running[response_id] = running
    running.task = asyncio.create_task(compute())
    running.task.add_done_callback(lambda task: updates.close())
    return running


async def _send_nothing(message: Message) -> None:
    pass
