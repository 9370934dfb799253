"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's fields: adapters by name, at runtime."""

import asyncio
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.frontend.adapters.served_adapters import ServedAdapters
from quire.frontend.http.routes.admin import TIMEOUT_S
from quire.frontend.http.routes.models import adapter_card
from quire.frontend.http.schema.errors import ApiError, shorten
from quire.frontend.http.schema.reading import read
from quire.frontend.http.serving.body import json_response, read_json
from quire.frontend.http.serving.row import Row
from quire.frontend.http.serving.server import Server
from quire.frontend.http.serving.sse import run_until_disconnect
from quire.protocol.errors import InvalidRequest
from quire.protocol.wire.adapter_messages import AdapterRef, UnloadAdapter
from quire.protocol.wire.front_end_messages import AddRequest

PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""They need an administrator's key; their names are vLLM's."""
POLL_S = 0.05
"""Time between two questions whether requests of an adapter are left."""


class LoadBody(msgspec.Struct, frozen=True, kw_only=True):
    """``load_inplace``: the name may stand for another adapter until now."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str | None = None
    """Ignored."""


class UnloadBody(msgspec.Struct, frozen=True, kw_only=True):
    """``force``: abort the requests of the adapter. ``wait``: wait for their ends; otherwise they are a 409."""

    lora_name: str
    force: bool = False
    wait: bool = True
    lora_int_id: int | None = None
    """Ignored."""


async def load_adapter(server: Server, request: Request) -> Response:
    """Give a name to the adapter in a folder of this machine. Workers load it when a request names it."""
    body, _ = await read_json(request, server.texts, lambda raw: read(LoadBody, raw))
    if body.lora_name in server.settings.served_model_names:
        text = f"{shorten(body.lora_name)} is a name of the served model: choose another one"
        raise InvalidRequest(text, "lora_name")
    loaded = await _adapters(server).load(body.lora_name, body.lora_path, replace=body.load_inplace)
    return json_response(adapter_card(server, loaded))


async def unload_adapter(server: Server, request: Request) -> ASGIApp:
    """Drop an adapter's name, and its weights if it has no other name in use, once its requests have ended."""
    body, _ = await read_json(request, server.texts, lambda raw: read(UnloadBody, raw))
    name = body.lora_name
    if name in server.settings.served_model_names:
        raise InvalidRequest(f"{shorten(name)} is the served model and not an adapter", "lora_name")
    adapter = await _adapters(server).find(name, "lora_name")
    if not body.wait and not body.force and not await _unloaded(server, adapter, force=False):
        text = f"requests of the adapter {shorten(name)} are in flight: wait for them, or send force true"
        raise ApiError(409, text, "lora_name", "adapter_in_use")

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_disconnect(receive, _unload(server, adapter, body.force, scope, receive, send))

    return respond


ROUTES = (Row("POST", PATHS[0], load_adapter, LoadBody), Row("POST", PATHS[1], unload_adapter, UnloadBody))


async def _unload(server: Server, adapter: AdapterRef, force: bool, scope: Scope, receive: Receive, send: Send) -> None:
    await _adapters(server).forget(adapter.name)  # first, so that no new request has it
    while not await _unloaded(server, adapter, force=force):
        await asyncio.sleep(POLL_S)
    await json_response({"id": adapter.name, "object": "model", "deleted": True})(scope, receive, send)


async def _unloaded(server: Server, adapter: AdapterRef, *, force: bool) -> bool:
    """Return whether no request of the adapter is left; False also if the scheduler does not answer now.

    Raises:
        EngineError: the engine has failed.
    """

    def uses_name(request: AddRequest) -> bool:
        return request.adapter is not None and request.adapter.name == adapter.name

    question = partial(UnloadAdapter, adapter.name, adapter.digest, force)
    try:
        return (await asyncio.wait_for(server.engine.ask(question, uses_name), TIMEOUT_S)).done
    except TimeoutError:  # it has died: the next one will have the requests
        return False


def _adapters(server: Server) -> ServedAdapters:
    assert server.settings.adapters is not None  # without them the routes do not exist
    return server.settings.adapters
