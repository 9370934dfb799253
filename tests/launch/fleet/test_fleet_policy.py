"""Fleet policy: which processes are started, killed and notified; with fake processes and a fake clock."""

import random

import pytest
from fake_fleet import DRAIN_S, FakeFleet, FakeProcess

from quire.launch.fleet.fleet_engines import BACKOFF_S, DRAIN_GRACE_S, FIRST_STARTS, PLACE_S, STABLE_S, STOP_S
from quire.launch.supervision.supervision_policy import MAX_DEATHS, SILENT_S, START_S
from quire.protocol.config import RankPlace
from quire.protocol.errors import ConfigError, EngineError
from quire.protocol.process.child import EX_CONFIG, Command
from quire.protocol.process.fleet_orders import ALL
from quire.protocol.routing import EnginePlace


@pytest.fixture
def fleet() -> FakeFleet:
    """Two engines and a front end, ready for longer than is unstable."""
    fleet = FakeFleet()
    fleet.become_ready()
    fleet.pass_time(STABLE_S + 1)
    return fleet


class SlowPlaces:
    """Places that must be prepared."""

    def __init__(self, *, are_ready: bool) -> None:
        self.are_ready = are_ready
        self.given_back: list[int] = []

    def take(self, engine: int) -> list[RankPlace] | None:
        return [RankPlace()] if self.are_ready else None

    def give_back(self, engine: int) -> None:
        self.given_back.append(engine)


class TestStart:
    def test_processes_and_their_first_commands(self) -> None:
        fleet = FakeFleet(num_engines=2, num_front_ends=2)
        assert [process.role for process in fleet.started] == ["engine"] * 2 + ["router"] + ["frontend"] * 2
        assert fleet.engine(1).ranks == [RankPlace(device=2), RankPlace(device=3)]
        assert not fleet.policy.is_ready
        fleet.become_ready()
        assert fleet.policy.is_ready
        assert fleet.alive("router")[0].places == [
            EnginePlace(0, "/fleet/engine-0.1", 1, "serving", 16, 1),
            EnginePlace(1, "/fleet/engine-1.1", 1, "serving", 16, 1),
        ]
        fleet.check()

    def test_an_engine_that_cannot_start_does_not_end_the_server(self) -> None:
        fleet = FakeFleet()
        fleet.die(fleet.engine(1), "no GPU 1", EX_CONFIG)
        assert fleet.states == {0: "starting", 1: "failed"} and not fleet.policy.is_ready
        fleet.become_ready()
        assert fleet.policy.is_ready and fleet.policy.engines.places()[1].detail == "no GPU 1"
        fleet.pass_time(14)
        assert fleet.starts[1] == 1
        fleet.pass_time(2)
        assert fleet.states[1] == "starting"

    @pytest.mark.parametrize(("status", "kind"), [(EX_CONFIG, ConfigError), (1, EngineError)])
    def test_if_no_engine_could_start_its_reason_is_the_error(self, status: int, kind: type[Exception]) -> None:
        fleet = FakeFleet()
        fleet.die(fleet.engine(0), "no such tensor", status)
        assert fleet.policy.fatal_error is None
        fleet.die(fleet.engine(1), "no such tensor", status)
        assert type(fleet.policy.fatal_error) is kind and str(fleet.policy.fatal_error) == "no such tensor"

    def test_a_first_start_that_is_killed_is_repeated(self) -> None:
        fleet = FakeFleet(num_engines=1)
        for _ in range(FIRST_STARTS - 1):
            fleet.die(fleet.engine(0))
            assert fleet.policy.fatal_error is None
            fleet.pass_time(1)
        fleet.die(fleet.engine(0))
        assert isinstance(fleet.policy.fatal_error, EngineError)

    def test_a_place_that_is_missing_is_a_failed_start(self) -> None:
        class NoPlaces:
            def take(self, engine: int) -> list[RankPlace] | str:
                return [RankPlace()] if engine == 0 else "1 device, and 2 are needed"

            def give_back(self, engine: int) -> None:
                pass

        fleet = FakeFleet(places=NoPlaces())
        fleet.become_ready()
        assert fleet.policy.is_ready and fleet.states == {0: "serving", 1: "failed"}
        assert fleet.policy.engines.places()[1].detail == "1 device, and 2 are needed"

    def test_a_place_that_is_being_prepared_is_waited_for(self) -> None:
        places = SlowPlaces(are_ready=False)
        fleet = FakeFleet(num_engines=1, places=places)
        assert fleet.policy.engines.places()[0].detail == "its place is being prepared"
        fleet.pass_time(100)
        assert fleet.states == {0: "failed"} and fleet.policy.fatal_error is None and fleet.starts[0] == 0
        places.are_ready = True
        fleet.pass_time(PLACE_S)
        fleet.become_ready()
        assert fleet.policy.is_ready and fleet.states == {0: "serving"}
        fleet.order("add")
        assert fleet.states == {0: "serving", 1: "starting"}

    def test_an_engine_without_a_place_gives_it_back_when_it_is_removed(self) -> None:
        places = SlowPlaces(are_ready=True)
        fleet = FakeFleet(num_engines=1, places=places)
        fleet.become_ready()
        places.are_ready = False
        fleet.order("add")
        fleet.order("remove", 1)
        assert fleet.states == {0: "serving"} and places.given_back == [1]

    def test_processes_that_cannot_be_started_now_are_started_later(self, fleet: FakeFleet) -> None:
        fleet.refuses = "engine"
        fleet.die(fleet.engine(1))
        assert fleet.states[1] == "failed" and fleet.policy.engines.places()[1].detail == "too many processes"
        fleet.refuses = None
        fleet.pass_time(BACKOFF_S[2])
        assert fleet.states[1] == "starting"

    def test_a_front_end_that_cannot_be_started_now_is_started_later(self, fleet: FakeFleet) -> None:
        fleet.refuses = "frontend"
        fleet.die(fleet.alive("frontend")[0])
        assert fleet.policy.fatal_error is None and not fleet.alive("frontend")
        fleet.refuses = None
        fleet.pass_time(BACKOFF_S[2])
        fleet.check()
        assert len(fleet.alive("frontend")) == 1


class TestDeaths:
    def test_an_engine_is_restarted_in_a_new_directory(self, fleet: FakeFleet) -> None:
        fleet.report(fleet.engine(1), "incarnation", incarnation=2)
        fleet.die(fleet.engine(1))
        assert fleet.ended == [(1, 1)] and fleet.states == {0: "serving", 1: "starting"}
        place = fleet.policy.engines.places()[1]
        assert (place.directory, place.incarnation, place.num_starts) == ("/fleet/engine-1.2", 1, 2)
        assert fleet.policy.restarts.engine == 1
        fleet.check()

    def test_delays_grow_with_failures_in_a_row(self, fleet: FakeFleet) -> None:
        for delay in (*BACKOFF_S, BACKOFF_S[-1]):
            before = fleet.starts[0]
            fleet.die(fleet.engine(0))
            if delay:
                fleet.pass_time(delay - 0.01)
                assert fleet.starts[0] == before
                fleet.pass_time(0.02)
            assert fleet.starts[0] == before + 1
            fleet.become_ready("engine")
        fleet.pass_time(STABLE_S)
        fleet.die(fleet.engine(0))
        assert fleet.states[0] == "starting"

    def test_an_engine_serves_again_when_its_next_scheduler_is_ready(self, fleet: FakeFleet) -> None:
        fleet.report(fleet.engine(0), "incarnation", incarnation=2)
        assert fleet.states[0] == "starting" and fleet.alive("frontend")[0].places[0].incarnation == 2
        fleet.order("restart", ALL)
        assert fleet.states == {0: "starting", 1: "serving"}
        fleet.report(fleet.engine(0), "ready", detail={"block_size": 16.0})
        fleet.tick()
        assert fleet.states == {0: "draining", 1: "serving"} and fleet.starts[0] == 1

    def test_new_workers_change_no_state(self, fleet: FakeFleet) -> None:
        places = fleet.policy.engines.places()
        fleet.report(fleet.engine(0), "ready", detail={"block_size": 16.0})
        assert fleet.policy.engines.places() == places
        fleet.report(fleet.engine(0), "ready", text="an L4", detail={"block_size": 16.0})
        assert [place.device for place in fleet.policy.engines.places()] == ["an L4", ""]

    @pytest.mark.parametrize("started", [True, False])
    def test_a_silent_process_is_killed(self, started: bool) -> None:
        fleet = FakeFleet()
        if started:
            fleet.become_ready()
        silent = (fleet.engine(0), fleet.alive("router")[0], fleet.alive("frontend")[0])
        fleet.pass_time(SILENT_S - 1 if started else START_S - 1, silent=silent)
        assert all(process.alive for process in silent)
        fleet.pass_time(2, silent=silent)
        assert not any(process.alive for process in silent)
        fleet.pass_time(1)
        assert [len(fleet.alive(role)) for role in ("engine", "router", "frontend")] == [2, 1, 1]
        fleet.check()

    def test_a_router_is_replaced_by_the_next_incarnation(self, fleet: FakeFleet) -> None:
        fleet.die(fleet.alive("router")[0])
        (router,) = fleet.alive("router")
        assert router.number == 2 and fleet.alive("frontend")[0].router == 2
        assert router.places == fleet.policy.engines.places() and fleet.policy.restarts.router == 1

    def test_a_router_that_cannot_run_ends_nothing(self) -> None:
        fleet = FakeFleet()
        for _ in range(20):
            if router := fleet.alive("router"):
                fleet.die(router[0], "no router", EX_CONFIG)
            fleet.pass_time(10)
        fleet.become_ready("engine", "frontend")
        assert fleet.policy.fatal_error is None and fleet.policy.is_ready

    def test_schedulers_and_router_are_notified_of_a_front_ends_death(self, fleet: FakeFleet) -> None:
        (front_end,) = fleet.alive("frontend")
        fleet.die(front_end)
        notice = Command("front_end_exited", pid=front_end.pid)
        assert all(notice in process.commands for process in fleet.alive("engine") + fleet.alive("router"))
        assert len(fleet.alive("frontend")) == 1
        fleet.check()

    def test_front_ends_that_cannot_run_end_the_server(self, fleet: FakeFleet) -> None:
        for _ in range(MAX_DEATHS):
            fleet.die(fleet.alive("frontend")[0])
            fleet.pass_time(20)
        assert isinstance(fleet.policy.fatal_error, EngineError)
        fleet = FakeFleet()
        fleet.die(fleet.alive("frontend")[0], "no such certificate", EX_CONFIG)
        assert isinstance(fleet.policy.fatal_error, ConfigError)


class TestOrders:
    def test_an_engine_is_drained_when_all_front_ends_report_it(self) -> None:
        fleet = FakeFleet(num_front_ends=2)
        fleet.become_ready()
        fleet.order("drain", 1)
        first, second = fleet.alive("frontend")
        assert first.places[1].state == "draining"
        fleet.report(first, "drained", engine=1)
        assert fleet.states[1] == "draining"
        fleet.report(second, "drained", engine=1)
        assert fleet.states[1] == "drained" and not fleet.engine(1).count("stop")
        fleet.order("resume", 1)
        assert fleet.states[1] == "serving"

    def test_a_front_end_that_dies_has_no_requests_left(self, fleet: FakeFleet) -> None:
        fleet.order("drain", 1)
        fleet.die(fleet.alive("frontend")[0])
        assert fleet.states[1] == "drained"

    def test_a_front_end_that_reports_nothing_only_delays(self, fleet: FakeFleet) -> None:
        fleet.order("drain", 0)
        fleet.pass_time(DRAIN_S + DRAIN_GRACE_S - 0.5)
        assert fleet.states[0] == "draining"
        fleet.pass_time(1)
        assert fleet.states[0] == "drained"

    def test_an_engine_is_removed_and_its_number_is_used_again(self, fleet: FakeFleet) -> None:
        fleet.order("remove", 0)
        fleet.report(fleet.alive("frontend")[0], "drained", engine=0)
        assert fleet.states == {0: "stopped", 1: "serving"}
        fleet.obey()
        assert fleet.states == {1: "serving"} and fleet.policy.restarts.engine == 0
        fleet.order("add")
        assert fleet.policy.engines.places()[0].directory == "/fleet/engine-0.2"
        fleet.become_ready()
        assert fleet.states == {0: "serving", 1: "serving"}
        fleet.check()

    def test_an_engine_that_does_not_end_is_killed(self, fleet: FakeFleet) -> None:
        fleet.order("restart", 0)
        process = fleet.engine(0)
        for front_end in fleet.alive("frontend"):
            fleet.report(front_end, "drained", engine=0)
        fleet.pass_time(STOP_S + 1)
        assert not process.alive and fleet.states[0] == "starting"

    def test_a_drained_engine_that_dies_stays_drained(self, fleet: FakeFleet) -> None:
        fleet.order("drain", 0)
        fleet.obey()
        fleet.die(fleet.engine(0))
        fleet.become_ready()
        assert fleet.states == {0: "drained", 1: "serving"}

    def test_a_rolling_restart_takes_one_at_a_time(self) -> None:
        fleet = FakeFleet(num_engines=3)
        fleet.become_ready()
        fleet.order("restart", ALL)
        for number in range(3):
            assert fleet.states == {n: "draining" if n == number else "serving" for n in range(3)}
            fleet.obey()
            fleet.obey()
            assert fleet.states[number] == "starting"
            fleet.pass_time(5)
            assert sum(state == "serving" for state in fleet.states.values()) == 2
            fleet.become_ready()
        assert fleet.starts == {0: 2, 1: 2, 2: 2} and set(fleet.states.values()) == {"serving"}

    def test_a_rolling_restart_waits_for_a_place(self) -> None:
        places = SlowPlaces(are_ready=True)
        fleet = FakeFleet(num_engines=3, places=places)
        fleet.become_ready()
        fleet.order("restart", ALL)
        places.are_ready = False
        fleet.obey()
        fleet.pass_time(60)
        assert fleet.states == {0: "failed", 1: "serving", 2: "serving"}
        places.are_ready = True
        fleet.pass_time(PLACE_S)
        assert fleet.states == {0: "starting", 1: "serving", 2: "serving"}
        fleet.become_ready()
        assert fleet.states == {0: "serving", 1: "draining", 2: "serving"}

    def test_a_rolling_restart_waits_for_an_engine_that_fails(self, fleet: FakeFleet) -> None:
        fleet.order("restart", ALL)
        fleet.obey()
        fleet.obey()
        fleet.die(fleet.engine(0), "no memory")
        fleet.pass_time(1)
        assert fleet.states == {0: "starting", 1: "serving"}
        fleet.become_ready()
        assert fleet.states == {0: "serving", 1: "draining"}

    @pytest.mark.parametrize("order", ["drain", "remove", "restart"])
    def test_the_last_serving_engine_stays(self, fleet: FakeFleet, order: str) -> None:
        fleet.die(fleet.engine(1))
        fleet.order(order, 0)
        assert fleet.states == {0: "serving", 1: "starting"}

    def test_a_failed_engine_can_be_removed_or_started_at_once(self) -> None:
        fleet = FakeFleet(num_engines=3)
        fleet.become_ready()
        for number in (1, 2):
            fleet.die(fleet.engine(number), "no memory", EX_CONFIG)
        fleet.order("restart", 1)
        fleet.order("remove", 2)
        assert fleet.states == {0: "serving", 1: "starting"}

    def test_orders_end_with_the_server(self, fleet: FakeFleet) -> None:
        fleet.policy.drain()
        fleet.order("restart", ALL)
        assert set(fleet.states.values()) == {"serving"}
        (front_end,) = fleet.alive("frontend")
        assert front_end.count("drain") == 1
        fleet.die(front_end)
        fleet.die(fleet.engine(0))
        assert not fleet.alive("frontend") and fleet.states[0] == "starting"


def test_next_event_is_never_late(fleet: FakeFleet) -> None:
    fleet.die(fleet.engine(0))
    fleet.die(fleet.engine(0))
    wait = fleet.policy.next_event(fleet.now)
    assert wait == BACKOFF_S[1]
    fleet.pass_time(wait)
    assert fleet.states[0] == "starting"


def _step(fleet: FakeFleet, chance: random.Random) -> None:
    """Let something happen: a death, a report, an order, or the passing of time."""
    alive = [process for process in fleet.started if process.alive]
    match chance.randrange(9):
        case 0 | 1:
            process = chance.choice(alive or fleet.started)
            if process.alive and (process.role != "frontend" or chance.random() < 0.2):
                fleet.die(process, chance.choice(("", "", "no memory")), chance.choice((1, EX_CONFIG)))
        case 2:
            order = chance.choice(("add", "drain", "resume", "remove", "restart"))
            if fleet.alive("frontend"):
                fleet.order(order, chance.randrange(-1, 5))
        case 3 | 4:
            fleet.obey()
        case 5 | 6:
            fleet.become_ready()
        case 7:
            fleet.refuses = chance.choice((None, None, "engine", "router", "frontend"))
        case _:
            silent: tuple[FakeProcess, ...] = tuple(p for p in alive if chance.random() < 0.05)
            fleet.pass_time(chance.choice((0.1, 1.0, 12.0)), silent=silent)


@pytest.mark.parametrize("seed", [*range(15), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(15, 90))])
def test_random_deaths_and_orders(seed: int) -> None:
    chance = random.Random(seed)
    fleet = FakeFleet(num_engines=chance.randrange(1, 5), num_front_ends=chance.randrange(1, 3))
    fleet.become_ready()
    for _ in range(80):
        had_serving = "serving" in fleet.states.values()
        orders = sum(process.count("stop") for process in fleet.started)
        _step(fleet, chance)
        if fleet.policy.fatal_error is not None:
            return  # front ends that died too often
        fleet.check()
        if sum(process.count("stop") for process in fleet.started) > orders and had_serving:
            assert fleet.alive("engine")
    fleet.refuses = None
    for _ in range(12):  # without more faults, all that is not drained serves again, and no order is left
        fleet.pass_time(31)
        fleet.become_ready()
        fleet.obey()
    assert set(fleet.states.values()) <= {"serving", "drained"} and "serving" in fleet.states.values()
    assert fleet.policy.is_ready
