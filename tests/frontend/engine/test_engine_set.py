"""Streams of a server with several engines: where they go, and that none loses a token when engines or routers die."""

import pytest
from engine_world import Answer, World, length
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tiers import examples

from quire.frontend.engine.session import ENGINE_FAULT
from quire.protocol.errors import EngineError, InvalidRequest
from quire.protocol.wire.front_end_messages import EndReason, EngineState
from quire.protocol.wire.link_messages import Refused


def serving(num_engines: int = 3, *, router: bool = True) -> World:
    """Return a world in which all engines serve."""
    world = World(num_engines)
    world.announce()
    if router:
        world.new_router()
    world.round()
    assert world.set.state == "ready"
    return world


def place(world: World, name: str, engine: int, parent: str = "") -> Answer:
    """Add a request that the router puts on this engine, and compute its first token."""
    answer = world.add(name, parent)
    world.to_router()
    if world.asked:
        world.answer(0, engine)
    step(world, engine)
    return answer


def step(world: World, engine: int) -> None:
    world.to_engine(engine)
    scheduler = world.schedulers[engine]
    scheduler.step(list(scheduler.requests))
    world.to_front(engine)


def names_on(world: World, engine: int) -> set[str]:
    world.to_engine(engine)
    return set(world.schedulers[engine].requests)


def assert_complete(world: World, *names: str) -> None:
    world.finish()
    for name in names:
        answer = world.answers[name]
        assert (len(answer.tokens), answer.ended) == (length(name), EndReason.LENGTH), name


def test_the_router_chooses_the_engine() -> None:
    world = serving()
    place(world, "a", 2)
    assert [names_on(world, engine) for engine in range(3)] == [set(), set(), {"a"}]
    assert_complete(world, "a")


def test_requests_wait_until_an_engine_serves() -> None:
    world = World(2)
    world.add("a")
    assert world.set.state == "loading"
    world.announce()
    assert_complete(world, "a")
    for engine in range(2):
        world.kill(engine)
    assert world.set.state == "recovering"
    world.add("b")
    assert_complete(world, "b")


@pytest.mark.parametrize("how", ["kill", "kill_scheduler"])
def test_streams_of_a_dead_engine_continue_elsewhere_with_their_tokens(how: str) -> None:
    world = serving()
    answer = place(world, "a", 0)
    step(world, 0)
    assert len(answer.tokens) == 2
    getattr(world, how)(0)
    world.to_router()
    assert world.asked[0].excluded == [0] and world.asked[0].num_tokens == 5
    world.answer(0, 1)
    assert names_on(world, 1) == {"a"} and len(answer.tokens) == 2
    assert answer.stream.engines == "0 load, 1 load"
    assert_complete(world, "a")


def test_a_request_that_kills_three_schedulers_ends() -> None:
    world = serving(4, router=False)
    answer = world.add("a")
    for _ in range(3):
        engine = next(engine for engine in range(4) if engine in world.linked and names_on(world, engine))
        world.kill(engine)
    assert (answer.ended, answer.detail) == (EndReason.ERROR, ENGINE_FAULT)
    world.finish()


def test_without_workers_an_engine_keeps_only_what_may_be_the_cause() -> None:
    world = serving(2)
    place(world, "a", 0)
    world.add("silent")
    world.to_router()
    world.answer(0, 0)
    assert names_on(world, 0) == {"a", "silent"}
    for engine, other in ((0, 1), (1, 0)):
        world.set_state(engine, "recovering")
        world.to_front(engine)
        assert [bool(each.detail) for each in world.set.engines.described()] == [engine == 0, engine == 1]
        world.to_router()
        while world.asked:
            world.answer(0, other)
        world.to_engine(engine)
        world.to_front(engine)
        if engine == 0:
            assert names_on(world, 1) == {"a", "silent"}
            world.schedulers[1].step(["a"])
            world.to_front(1)
            world.set_state(0, "ready")
            world.to_front(0)
    assert (names_on(world, 0), names_on(world, 1)) == ({"a"}, {"silent"})
    assert_complete(world, "a", "silent")


def test_what_an_engine_still_sends_about_a_stream_that_has_left_is_dropped() -> None:
    world = serving(2)
    answer = place(world, "a", 0)
    world.schedulers[0].step(["a"])  # on its way when the stream leaves
    world.set_state(0, "recovering")
    world.schedulers[0].outbox.rotate(1)  # the state overtakes the token
    world.to_front(0, 1)
    world.to_router()
    world.answer(0, 1)
    world.to_front(0)
    assert len(answer.tokens) == 1
    step(world, 1)
    assert len(answer.tokens) == 2
    assert_complete(world, "a")


def test_a_stream_does_not_return_to_an_engine_where_its_request_has_not_ended() -> None:
    world = serving(2)
    place(world, "a", 0)
    world.set_state(0, "recovering")
    world.to_front(0)
    world.to_router()
    world.answer(0, 1)
    world.set_state(0, "ready")
    world.to_front(0)
    world.kill(1)
    world.set.tick()
    assert world.set.num_in_flight == 1 and not world.asked
    assert_complete(world, "a")


def test_a_full_queue_is_a_refusal_only_if_all_are_full() -> None:
    world = serving(3)
    for scheduler in world.schedulers.values():
        scheduler.queue_limit = 0
    world.schedulers[2].queue_limit = 1
    place(world, "a", 0)
    world.to_router()
    assert world.asked[0].excluded == [0]
    world.answer(0, 1)
    world.to_engine(1)
    world.to_front(1)
    world.to_router()
    assert world.asked[0].excluded == [0, 1]
    world.answer(0, 2)
    assert names_on(world, 2) == {"a"}
    refused = world.add("b")
    for _ in range(3):
        world.round()
    assert refused.refused == "queue_full"
    assert_complete(world, "a")


def test_forks_go_where_their_parent_is() -> None:
    world = serving()
    world.add("a")
    world.add("b", parent="a")
    world.to_router()
    assert len(world.asked) == 1, "the fork waits for its parent"
    world.answer(0, 1)
    assert names_on(world, 1) == {"a", "b"}
    world.add("c", parent="a")
    assert names_on(world, 1) == {"a", "b", "c"}
    world.kill(1)
    world.to_router()
    assert len(world.asked) == 3
    assert_complete(world, "a", "b", "c")


def test_a_fork_of_a_request_that_was_aborted_before_it_got_an_engine_goes_alone() -> None:
    world = serving()
    world.add("a")
    world.add("b", parent="a")
    world.leave("a")
    assert_complete(world, "b")


def test_without_an_answer_of_the_router_the_front_end_chooses() -> None:
    world = serving(2)
    world.add("a")
    world.now += 0.99
    world.set.tick()
    assert not names_on(world, 0)
    world.now += 0.02
    world.set.tick()
    world.add("b")
    assert (names_on(world, 0), names_on(world, 1)) == ({"a"}, {"b"}), "while it is silent, nothing waits for it"
    world.to_router()
    assert not world.asked and world.on_engine == {1: 0, 2: 1}, "it learns of the choices"
    assert_complete(world, "a", "b")


def test_another_router_learns_what_is_in_flight() -> None:
    world = serving(2)
    place(world, "a", 0)
    world.set.tick()
    world.add("asked")
    world.new_router()
    assert world.set.num_in_flight == 2 and names_on(world, 1) == {"asked"}, "chosen while there is no router"
    world.to_router()
    assert world.on_engine == {1: 0, 2: 1}
    assert_complete(world, "a", "asked")


def test_a_router_that_refuses_is_done_without() -> None:
    world = serving(2)
    world.add("a")
    world.router_inbox.clear()
    world.set.take_from_router(Refused("another version", final=True))
    assert names_on(world, 0) == {"a"}
    world.set.beat()
    assert not world.router_inbox, "it would refuse a message without a Hello, and the next Hello"
    assert_complete(world, "a")


def test_a_draining_engine_gets_nothing_new_and_loses_its_streams_at_the_deadline() -> None:
    world = serving(2)
    place(world, "a", 0)
    world.change(0, state="draining")
    world.add("b")
    world.to_router()
    assert world.asked[0].excluded == [0]
    world.answer(0, 1)
    world.now += 9.9
    world.set.tick()
    assert names_on(world, 0) == {"a"} and not world.drained
    world.now += 0.2
    world.set.tick()
    world.to_router()
    world.answer(0, 1)
    assert names_on(world, 0) == set() and names_on(world, 1) == {"a", "b"}
    world.set.tick()
    world.set.tick()
    assert world.drained == [0], "reported once"
    world.change(0, state="drained")
    assert_complete(world, "a", "b")


def test_an_engine_that_gives_up_is_left_until_it_is_another_one() -> None:
    world = serving(2)
    place(world, "a", 0)
    world.set.take(0, EngineState("failed", "the workers died five times"))
    world.announce()
    assert 0 not in world.linked
    world.to_router()
    world.answer(0, 1)
    assert names_on(world, 1) == {"a"}
    world.kill(0)
    world.start(0)
    assert 0 in world.linked
    assert_complete(world, "a")


def test_an_engine_that_starts_while_the_others_are_paused_is_paused() -> None:
    world = serving(2)
    for engine in range(2):
        session = world.set.engines[engine].session
        assert session is not None
        session.set_pause("pause_new")
        step(world, engine)
    assert world.set.engines.pause == "pause_new"
    world.kill(1)
    world.start(1)
    step(world, 1)
    step(world, 1)
    assert world.schedulers[1].pause == "pause_new"


def test_a_failed_fleet_ends_every_stream() -> None:
    world = serving(2)
    streams = [place(world, "a", 0).stream, world.add("b").stream]
    for answer in world.answers.values():
        answer.left = True
    world.set.fail("no engine can be started")
    for stream in streams:
        with pytest.raises(EngineError, match="no engine"):
            stream.take()
    with pytest.raises(EngineError, match="no engine"):
        world.add("c")


def test_request_ids_are_unique() -> None:
    world = serving(2)
    place(world, "a", 0)
    with pytest.raises(InvalidRequest, match="in use"):
        world.add("a")
    assert_complete(world, "a")
    world.add("a")
    assert_complete(world, "a")


NAMES = st.integers(0, 10**6)


class Machine(RuleBasedStateMachine):
    """Engines and routers die, lose workers, drain and answer late. At the end every answer is complete."""

    @initialize(num_engines=st.integers(1, 4))
    def begin(self, num_engines: int) -> None:
        self.world = World(num_engines, drain_timeout=0.5)
        self.world.announce()
        self.world.new_router()
        self.count = 0
        for _ in range(2):
            self.world.round()
        for seed in range(6):
            self.add(seed, forked=False)
        self.world.to_router()
        while self.world.asked:
            self.world.answer(0, len(self.world.asked) % num_engines)

    def pick(self, found: list[int], seed: int) -> int | None:
        return sorted(found)[seed % len(found)] if found else None

    def running(self) -> list[str]:
        return [name for name, each in self.world.answers.items() if not (each.ended or each.left or each.refused)]

    @rule(seed=NAMES, forked=st.booleans())
    def add(self, seed: int, forked: bool) -> None:
        self.count += 1
        running = self.running()
        parent = running[seed % len(running)] if forked and running else ""
        self.world.add(f"{'' if not parent else parent[0]}r{self.count}", parent)

    @precondition(lambda self: self.running())
    @rule(seed=NAMES, stop=st.booleans())
    def leave(self, seed: int, stop: bool) -> None:
        names = self.running()
        self.world.leave(names[seed % len(names)], stop=stop)

    @rule(seed=NAMES, most=st.integers(1, 6))
    def deliver_to_engine(self, seed: int, most: int) -> None:
        if (engine := self.pick(list(self.world.linked), seed)) is not None:
            self.world.to_engine(engine, most)

    @rule(seed=NAMES, most=st.integers(1, 6))
    def deliver_to_front(self, seed: int, most: int) -> None:
        if (engine := self.pick(list(self.world.linked), seed)) is not None:
            self.world.to_front(engine, most)

    @rule(seed=NAMES, part=st.integers(1, 3))
    def step(self, seed: int, part: int) -> None:
        if (engine := self.pick(list(self.world.schedulers), seed)) is not None:
            scheduler = self.world.schedulers[engine]
            scheduler.step(list(scheduler.requests)[::part])

    @rule()
    def everything(self) -> None:
        self.world.round()

    @rule(seed=NAMES, process=st.sampled_from(("engine", "scheduler", "workers", "link")))
    def kill(self, seed: int, process: str) -> None:
        world = self.world
        if (engine := self.pick(list(world.linked), seed)) is None:
            return
        if process == "engine":
            world.kill(engine)
        elif process == "scheduler":
            world.kill_scheduler(engine)
        elif process == "workers":
            world.set_state(engine, "recovering")
        else:
            world.break_link(engine)

    @rule(seed=NAMES)
    def recover(self, seed: int) -> None:
        """An engine gets new workers before it has read that streams have left it."""
        world = self.world
        if (engine := self.pick(list(world.linked), seed)) is not None:
            for state in ("recovering", "ready"):
                world.set_state(engine, state)
                world.to_front(engine)

    @rule(seed=NAMES)
    def repair(self, seed: int) -> None:
        world = self.world
        for engine in range(len(world.places)):
            if engine not in world.schedulers:
                world.start(engine)
            elif world.schedulers[engine].state != "ready" and seed % 2:
                world.set_state(engine, "ready")

    @rule(seed=NAMES, state=st.sampled_from(("draining", "serving")))
    def order(self, seed: int, state: str) -> None:
        if (engine := self.pick(list(self.world.schedulers), seed)) is not None:
            self.world.change(engine, state=state)

    @rule(seed=NAMES, limit=st.integers(0, 3))
    def limit_queue(self, seed: int, limit: int) -> None:
        if (engine := self.pick(list(self.world.schedulers), seed)) is not None:
            self.world.schedulers[engine].queue_limit = limit

    @rule(engine=st.integers(-1, 4), index=NAMES)
    def route(self, engine: int, index: int) -> None:
        self.world.to_router()
        if self.world.asked:
            self.world.answer(index % len(self.world.asked), engine)

    @rule()
    def kill_router(self) -> None:
        self.world.new_router()

    @rule(seconds=st.sampled_from((0.05, 0.3, 1.2)))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.set.tick()
        self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.finish()
        for name, answer in self.world.answers.items():
            if answer.left or answer.refused:
                continue
            if answer.detail == ENGINE_FAULT:
                assert self.world.deaths >= 3
            else:
                assert (len(answer.tokens), answer.ended) == (length(name), EndReason.LENGTH), name


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)


@pytest.mark.full
class TestLongMachine(Machine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(
        max_examples=examples(150), stateful_step_count=50, deadline=None, phases=[Phase.reuse, Phase.generate]
    )


def test_new_requests_do_not_count_as_progress_of_engines_that_hang() -> None:
    world = serving(2)
    for at in range(60):
        world.now += 1.0
        world.add(f"r{at}")
        world.to_router()
        world.answer(0, at % 2)
        world.set.tick()
    assert world.set.seconds_without_progress == 58.0  # since both engines have one


def test_a_refused_request_returns_to_an_engine_that_is_the_last_one_left() -> None:
    world = serving(2)
    world.schedulers[0].queue_limit = 0
    stream = world.add("a")
    world.to_router()
    world.answer(0, 0)
    world.to_engine(0)
    world.to_front(0)  # refused: the router is asked for the other one
    world.schedulers[0].queue_limit = 1000
    world.kill(1)
    world.asked.clear()
    world.places.pop(1)
    world.announce()
    for _ in range(100):
        world.now += 0.05
        world.set.tick()
        world.to_router()
        while world.asked:
            world.answer(0, 0)
        world.to_engine(0)
        world.schedulers[0].step(list(world.schedulers[0].requests))
        world.to_front(0)
    world.read()
    assert stream.tokens
