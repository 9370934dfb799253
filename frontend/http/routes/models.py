"""GET /v1/models: the model under its served names, and its adapters."""

from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.adapters.names import NamedAdapter
from quire.frontend.http.schema.errors import ApiError, shorten
from quire.frontend.http.serving.body import json_response
from quire.frontend.http.serving.server import Server


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """``root``, ``parent``: an adapter has the name of its folder, and the model that it belongs to.

    ``tasks``: what the model can do, as of ``Capabilities``.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "quire"
    max_model_len: int
    tasks: list[str]
    root: str | UnsetType = UNSET
    parent: str | UnsetType | None = UNSET


class ModelList(msgspec.Struct, frozen=True):
    object: str
    data: list[ModelCard]


async def list_models(server: Server, request: Request) -> Response:
    return json_response(ModelList("list", await _cards(server)))


async def show_model(server: Server, request: Request) -> Response:
    name = request.path_params["name"]
    card = next((each for each in await _cards(server) if each.id.rstrip("/") == name), None)
    if card is None:
        raise ApiError(404, f"the model {shorten(name)} does not exist", "model", "model_not_found")
    return json_response(card)


async def _cards(server: Server) -> list[ModelCard]:
    settings, context = server.settings, server.engine.max_model_len
    served, created, tasks = settings.served_model_names, settings.created, settings.capabilities.tasks
    if settings.adapters is None:
        return [ModelCard(id=name, created=created, max_model_len=context, tasks=tasks) for name in served]
    cards = [
        ModelCard(id=name, created=created, max_model_len=context, tasks=tasks, root=name, parent=None)
        for name in served
    ]
    adapters = [each for each in await settings.adapters.listed() if each.name not in served]
    return cards + [adapter_card(server, each) for each in adapters]


def adapter_card(server: Server, adapter: NamedAdapter) -> ModelCard:
    return ModelCard(
        id=adapter.name,
        created=adapter.created or server.settings.created,
        max_model_len=server.engine.max_model_len,
        tasks=server.capabilities.tasks,
        root=Path(adapter.path).name,
        parent=server.settings.served_model_names[0],
    )
