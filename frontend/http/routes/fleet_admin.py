"""The administrator's routes for the engines of the server: their list, and orders to the fleet."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.routes.admin import TIMEOUT_S, query_parameters, share
from quire.frontend.http.schema.errors import ApiError, shorten
from quire.frontend.http.serving.body import json_response
from quire.frontend.http.serving.row import Row
from quire.frontend.http.serving.server import FleetLink, Server
from quire.protocol.errors import EngineError, InvalidRequest
from quire.protocol.process.fleet_orders import ALL, ORDERS, OrderRefused, check_order
from quire.protocol.routing import EnginePlace
from quire.protocol.wire.front_end_messages import Statistics


async def list_engines(server: Server, request: Request) -> Response:
    await query_parameters(request)
    return json_response(await _list(_link(server)), 200)


def give_order(order: str) -> Callable[[Server, Request], Awaitable[Response]]:
    """Return the handler that sends this order to the fleet, and answers at once with the list of engines."""

    async def handle(server: Server, request: Request) -> Response:
        parameters = await query_parameters(request, *(() if order == "add" else ("engine",)))
        link = _link(server)
        engine = _number(parameters.get("engine"), is_needed=order not in ("add", "restart"))
        entries = await _list(link)
        try:
            check_order(order, engine, [_as_usable(link, place, engine) for place in link.places()])
        except OrderRefused as error:
            raise ApiError(409, str(error), None, "order_refused") from None
        link.order(order, engine)
        return json_response(entries, 202)

    return handle


ROUTES = (
    Row("GET", "/admin/engines", list_engines),
    *(Row("POST", f"/admin/engines/{order}", give_order(order), query=("engine",)) for order in ORDERS),
)


def _link(server: Server) -> FleetLink:
    if server.settings.fleet is None:
        text = "the server has one engine, which cannot be changed: start it with --data-parallel-size 2 or more"
        raise ApiError(409, text, None, "one_engine")
    return server.settings.fleet


def _number(text: str | None, *, is_needed: bool) -> int:
    if text is None and is_needed:
        raise InvalidRequest("engine is missing: the query must have one, such as ?engine=0", "engine")
    if text is None:
        return ALL
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidRequest(f"engine must be the number of an engine (got {shorten(text)})", "engine")
    return int(text)


async def _list(link: FleetLink) -> dict[str, Any]:
    try:
        statistics = await asyncio.wait_for(link.statistics(), TIMEOUT_S)
    except (EngineError, TimeoutError):
        statistics = {}
    return {"engines": [_entry(link, place, statistics.get(place.engine)) for place in link.places()]}


def _as_usable(link: FleetLink, place: EnginePlace, ordered: int) -> EnginePlace:
    """Return the place; for an order to another engine, one that replaces its workers does not count as serving."""
    if place.engine == ordered or place.state != "serving" or link.is_usable(place.engine):
        return place
    return msgspec.structs.replace(place, state="starting")


def _entry(link: FleetLink, place: EnginePlace, found: Statistics | None) -> dict[str, Any]:
    """Return an engine's state, which is recovering while a serving one replaces its workers, its number of starts, and
    what it has answered: None if it has not."""
    state = "recovering" if place.state == "serving" and not link.is_usable(place.engine) else place.state
    entry = {"engine": place.engine, "state": state, "starts": place.num_starts, "detail": place.detail or None}
    if found is None:
        return entry | dict.fromkeys(("kv_blocks", "kv_use", "running", "waiting"))
    used = share(found.num_usable_blocks - found.num_free_blocks, found.num_usable_blocks)
    figures = {"kv_blocks": found.num_usable_blocks, "kv_use": used}
    return {**entry, **figures, "running": found.num_running, "waiting": found.num_waiting}
