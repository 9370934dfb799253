"""GET /v1/models: the model under its served names, and its adapters."""

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.adapters.names import NamedAdapter
from quire.frontend.http.schema.errors import ApiError, shorten
from quire.frontend.http.serving.body import json_response
from quire.frontend.http.serving.row import Row
from quire.frontend.http.serving.server import Server

Card = dict[str, Any]


async def list_models(server: Server, request: Request) -> Response:
    return json_response({"object": "list", "data": await cards(server)})


async def show_model(server: Server, request: Request) -> Response:
    return json_response(await find_card(server, request.path_params["name"]))


ROUTES = (Row("GET", "/v1/models", list_models), Row("GET", "/v1/models/{name:path}", show_model))


async def find_card(server: Server, name: str) -> Card:
    """Return the card of a served name or an adapter. Raises ApiError 404 if there is none."""
    card = next((each for each in await cards(server) if each["id"].rstrip("/") == name), None)
    if card is None:
        raise ApiError(404, f"the model {shorten(name)} does not exist", "model", "model_not_found")
    return card


async def cards(server: Server) -> list[Card]:
    """Return the cards of all served names and adapters."""
    served, adapters = server.settings.served_model_names, server.settings.adapters
    if adapters is None:
        return [_card(server, name) for name in served]
    cards = [_card(server, name) | {"root": name, "parent": None} for name in served]
    return cards + [adapter_card(server, each) for each in await adapters.listed() if each.name not in served]


def _card(server: Server, name: str, created: int = 0) -> Card:
    return {
        "id": name,
        "object": "model",
        "created": created or server.settings.created,
        "owned_by": "quire",
        "max_model_len": server.engine.max_model_len,
        "tasks": server.capabilities.tasks,
        "implementation": server.settings.implementation,
        "input_modalities": ["text", "image"] if server.parser.reads_images else ["text"],
    }


def adapter_card(server: Server, adapter: NamedAdapter) -> Card:
    """Return the card of an adapter, with the name of its folder, and the model that it belongs to."""
    parent = server.settings.served_model_names[0]
    return _card(server, adapter.name, adapter.created) | {"root": Path(adapter.path).name, "parent": parent}
