"""``quire engines``: its table and JSON, orders that it waits for, and one-line errors."""

import json
from collections.abc import Iterator

import pytest
from front_end import FrontEnd

from quire.frontend.http.serving.server import FleetLink
from quire.launch import cli
from quire.launch.fleet.engine_orders import STALLED_S, ListedEngine, is_done, table, wait
from quire.protocol.errors import EngineError
from quire.protocol.process.fleet_orders import ALL
from quire.protocol.routing import EnginePlace
from quire.protocol.wire.front_end_messages import Statistics


class FakeFleet:
    """Carries out each order at once."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.places = [EnginePlace(n, f"/fleet/engine-{n}.1", 1, "serving", 16, 1) for n in range(2)]
        self.orders: list[tuple[str, int]] = []

    async def statistics(self) -> dict[int, Statistics]:
        return {0: Statistics(1, num_usable_blocks=8, num_free_blocks=6, num_running=2)}

    def order(self, order: str, engine: int) -> None:
        self.orders.append((order, engine))
        states = {"drain": "drained", "resume": "serving"}
        self.places = [
            EnginePlace(p.engine, p.directory, 1, states.get(order, "serving"), 16, p.num_starts + (order == "restart"))  # type: ignore[arg-type]
            if engine in (ALL, p.engine)
            else p
            for p in self.places
            if not (order == "remove" and p.engine == engine)
        ]
        if order == "add":
            self.places.append(EnginePlace(2, "/fleet/engine-2.1", 1, "serving", 16, 1))


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FrontEnd, FakeFleet]]:
    fleet = FakeFleet()
    link = FleetLink(
        lambda: fleet.places, lambda engine: True, fleet.statistics, lambda order, engine: fleet.order(order, engine)
    )
    made = FrontEnd(settings={"admin_api_keys": ("admin",), "fleet": link})
    yield made, fleet
    made.close()


@pytest.fixture
def server(served: tuple[FrontEnd, FakeFleet], monkeypatch: pytest.MonkeyPatch) -> FrontEnd:
    monkeypatch.setenv("QUIRE_ADMIN_API_KEY", "admin")
    return served[0]


@pytest.fixture
def fleet(served: tuple[FrontEnd, FakeFleet]) -> FakeFleet:
    """The fleet of the server, as at its start."""
    served[1].reset()
    return served[1]


def run(server: FrontEnd, *words: str) -> None:
    cli.main(["engines", "--url", f"http://127.0.0.1:{server.port}", *words])


def engine(number: int, state: str = "serving", starts: int = 1, detail: str | None = None) -> ListedEngine:
    return ListedEngine(number, state, starts, detail, None, None, None, None)


def test_table(server: FrontEnd, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]) -> None:
    run(server)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["engine", "state", "KV", "use", "running", "waiting", "starts"],
        ["0", "serving", "25%", "2", "0", "1"],
        ["1", "serving", "-", "-", "-", "1"],
    ]
    assert table([engine(3, "failed", 2, "no memory")]).endswith("failed  -       -        -        2       no memory")


@pytest.mark.parametrize(
    ("words", "sent", "shown"),
    [
        (["drain", "1"], ("drain", 1), ["engine 1: drained (start 1)"]),
        (["restart", "0"], ("restart", 0), ["engine 0: serving (start 2)"]),
        (["restart"], ("restart", ALL), ["engine 0: serving (start 2)", "engine 1: serving (start 2)"]),
        (["remove", "0"], ("remove", 0), ["engine 0: removed"]),
        (["add"], ("add", ALL), ["engine 2: serving (start 1)"]),
        (["resume", "1"], ("resume", 1), []),
        (["drain", "1", "--no-wait"], ("drain", 1), []),
    ],
)
def test_orders_are_waited_for(
    server: FrontEnd,
    fleet: FakeFleet,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sent: tuple[str, int],
    shown: list[str],
) -> None:
    run(server, *words)
    assert fleet.orders == [sent] and capsys.readouterr().err.splitlines() == shown


def test_json(server: FrontEnd, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]) -> None:
    run(server, "--json")
    assert [each["engine"] for each in json.loads(capsys.readouterr().out)["engines"]] == [0, 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["drain"], "drain needs the number of an engine"),
        (["add", "1"], "add takes no number of an engine (got 1)"),
        (["drain", "5"], "engine must be one of 0, 1 (got 5)"),
        (["--admin-api-key", "other"], "it is not an administrator's key of this server"),
        (["--url", "localhost"], "--url must start with http://"),
        (["--url", "http://127.0.0.1:1"], "cannot reach the server"),
    ],
)
def test_errors_are_one_line(
    server: FrontEnd, fleet: FakeFleet, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(server, *words)
    error = capsys.readouterr().err
    assert ended.value.code and message in error and error.count("\n") == 1, error


def test_a_refused_order_is_an_error(server: FrontEnd, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.places = fleet.places[:1]
    with pytest.raises(SystemExit) as ended:
        run(server, "restart")
    assert ended.value.code == 1 and "a rolling restart needs at least 2 engines" in capsys.readouterr().err


def test_a_server_without_keys_or_with_one_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("QUIRE_ADMIN_API_KEY", raising=False)
    for settings, words, message in (
        ({}, [], "--admin-api-key is missing"),
        ({}, ["--admin-api-key", "k"], "has no administrator's key"),
        ({"admin_api_keys": ("k",)}, ["--admin-api-key", "k"], "the server has one engine"),
    ):
        made = FrontEnd(settings=settings)
        with pytest.raises(SystemExit):
            run(made, *words)
        assert message in capsys.readouterr().err
        made.close()


@pytest.mark.parametrize(
    ("order", "number", "engines", "done"),
    [
        ("restart", 0, [engine(0, "draining"), engine(1)], False),
        ("restart", 0, [engine(0, "starting", 2), engine(1)], False),
        ("restart", ALL, [engine(0, "serving", 2), engine(1)], False),
        ("restart", ALL, [engine(0, "serving", 2), engine(1, "serving", 2)], True),
        ("restart", ALL, [engine(1, "serving", 2)], True),
        ("add", ALL, [engine(0), engine(1), engine(2, "starting")], False),
        ("remove", 1, [engine(0), engine(1, "stopped")], False),
        ("drain", 1, [engine(0), engine(1, "draining")], False),
        ("resume", 1, [engine(0), engine(1, "drained")], False),
    ],
)
def test_when_an_order_is_done(order: str, number: int, engines: list[ListedEngine], done: bool) -> None:
    assert is_done(order, number, [engine(0), engine(1)], engines) is done


def test_an_engine_that_does_not_start_is_an_error() -> None:
    before = [engine(0), engine(1)]
    for order, number, engines in (
        ("add", ALL, [*before, engine(2, "failed", 1, "no GPU 2")]),
        ("restart", 0, [engine(0, "failed", 2, "no GPU 2"), engine(1)]),
    ):
        with pytest.raises(EngineError, match="did not start: no GPU 2"):
            is_done(order, number, before, engines)


def test_waiting_ends_when_nothing_changes() -> None:
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(EngineError, match="nothing has changed"):
        wait(lambda: [engine(0), engine(1)], "drain", 1, [engine(0), engine(1)], lambda: now[0], pause)
    assert STALLED_S <= now[0] <= STALLED_S + 1
