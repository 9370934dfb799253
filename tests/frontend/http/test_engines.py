"""The administrator's routes for engines: their list, orders to the fleet, and orders that are refused."""

from typing import Any

import pytest
from fake_engine import FakeEngine

from quire.frontend.http.app import make_app
from quire.frontend.http.serving.server import FleetLink, ServerSettings
from quire.frontend.text.text_in import TextIn
from quire.protocol.routing import EnginePlace
from quire.protocol.wire.front_end_messages import Statistics

ADMIN = {"authorization": "Bearer admin"}
PLACES = [
    EnginePlace(0, "/fleet/engine-0.1", 1, "serving", 16, 1),
    EnginePlace(1, "/fleet/engine-1.3", 2, "serving", 16, 3),
    EnginePlace(4, "", 1, "failed", 16, 2, "no memory"),
]


class Orders(list[tuple[str, int]]):
    """The orders that were sent, the places, and the engine that replaces its workers."""

    places = PLACES
    recovering: int | None = None

    async def statistics(self) -> dict[int, Statistics]:
        return {0: Statistics(1, num_usable_blocks=10, num_free_blocks=4, num_running=3, num_waiting=1)}


@pytest.fixture
def orders() -> Orders:
    return Orders()


@pytest.fixture
def several(client: Any, engine: FakeEngine, text_in: TextIn, orders: Orders) -> Any:
    """A client of a server with three engines."""
    link = FleetLink(
        lambda: orders.places,
        lambda number: number != orders.recovering,
        orders.statistics,
        lambda order, number: orders.append((order, number)),
    )
    settings = ServerSettings(text_in=text_in, served_model_names=("tiny",), admin_api_keys=("admin",), fleet=link)
    return type(client)(make_app(engine, settings))


def test_list(several: Any) -> None:
    found = several.request("GET", "/admin/engines", headers=ADMIN)
    first, second, third = found.json()["engines"]
    assert found.status_code == 200
    assert first == {
        "engine": 0,
        "state": "serving",
        "starts": 1,
        "detail": None,
        "kv_blocks": 10,
        "kv_use": 0.6,
        "running": 3,
        "waiting": 1,
    }
    assert (second["starts"], second["kv_use"]) == (3, None)
    assert (third["state"], third["detail"]) == ("failed", "no memory")


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("add", ("add", -1)),
        ("drain?engine=1", ("drain", 1)),
        ("resume?engine=0", ("resume", 0)),
        ("remove?engine=4", ("remove", 4)),
        ("restart?engine=1", ("restart", 1)),
        ("restart", ("restart", -1)),
    ],
)
def test_an_order_is_sent_to_the_fleet(several: Any, orders: Orders, path: str, sent: tuple[str, int]) -> None:
    answer = several.request("POST", f"/admin/engines/{path}", headers=ADMIN)
    assert answer.status_code == 202 and len(answer.json()["engines"]) == 3
    assert orders == [sent]


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("drain", 400, "engine is missing"),
        ("drain?engine=one", 400, "must be the number of an engine (got 'one')"),
        ("drain?engine=-1", 400, "must be the number of an engine"),
        ("drain?engine=2", 404, "engine must be one of 0, 1, 4 (got 2)"),
        ("drain?engine=1&force=1", 400, "unknown or repeated parameter 'force'"),
        ("add?engine=1", 400, "no parameters"),
        ("resume?engine=4", 409, "engine 4 is failed: resume needs an engine that is serving or drained"),
        ("stop?engine=1", 404, "not found"),
    ],
)
def test_a_bad_order_has_no_effect(several: Any, orders: Orders, path: str, status: int, text: str) -> None:
    refused = several.request("POST", f"/admin/engines/{path}", headers=ADMIN)
    assert refused.status_code == status and text in refused.json()["error"]["message"]
    assert orders == []


@pytest.mark.parametrize("path", ["drain?engine=0", "remove?engine=0", "restart?engine=0"])
def test_the_last_serving_engine_stays(several: Any, orders: Orders, path: str) -> None:
    orders.places = [PLACES[0], PLACES[2]]
    refused = several.request("POST", f"/admin/engines/{path}", headers=ADMIN)
    assert refused.status_code == 409 and "no other engine is serving" in refused.json()["error"]["message"]
    assert orders == []


def test_one_engine_alone_has_no_orders(client: Any, engine: FakeEngine, text_in: TextIn) -> None:
    settings = ServerSettings(text_in=text_in, served_model_names=("tiny",), admin_api_keys=("admin",))
    alone = type(client)(make_app(engine, settings))
    for method, path in (("GET", "/admin/engines"), ("POST", "/admin/engines/drain?engine=0")):
        refused = alone.request(method, path, headers=ADMIN)
        assert refused.status_code == 409 and "--data-parallel-size" in refused.json()["error"]["message"]


def test_an_engine_that_replaces_its_workers_does_not_serve(several: Any, orders: Orders) -> None:
    orders.recovering = 1
    states = [each["state"] for each in several.request("GET", "/admin/engines", headers=ADMIN).json()["engines"]]
    assert states == ["serving", "recovering", "failed"]
    refused = several.request("POST", "/admin/engines/drain?engine=0", headers=ADMIN)
    assert refused.status_code == 409 and "no other engine is serving" in refused.json()["error"]["message"]
    assert several.request("POST", "/admin/engines/drain?engine=1", headers=ADMIN).status_code == 202
