"""Blocks of a program that are kept while its tool runs: when, for how long, and what they may not do."""

import logging
import random
from typing import Any

import pytest
from scheduler_driver import Driver, make_config, make_layout

from quire.protocol.errors import ConfigError
from quire.protocol.wire.front_end_messages import CallsTool, Statistics
from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.scheduler_proc.features.programs.demand import LEAST, Demand
from quire.scheduler_proc.features.programs.pins import Pins
from quire.scheduler_proc.features.programs.tools import MIN_PAUSES, ToolPauses
from quire.scheduler_proc.requests.events import Clock
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.lines import StepDecision, StepSnapshot

CONTINUUM = {"scheduling_policy": "continuum", "max_num_batched_tokens": 64}
TURN = list(range(100, 132))
"""A prompt of 8 blocks."""


class Agents(Driver):
    """An engine with programs, and a clock."""

    def __init__(self, num_blocks: int = 33, **settings: Any) -> None:
        super().__init__(num_blocks, **{**CONTINUUM, **settings})
        self.worker.step_seconds = lambda tokens, drafts: 1.0 + tokens / 8
        self.now = 0.0
        self.num_turns = 0
        self.before: dict[str, int] = {}

    def at(self, now: float) -> None:
        self.now = now
        self.consume(Clock(now))

    def turn(self, job: str, prompt: list[int], tool: str = "", *, run: bool = True, **extra: Any) -> str:
        """Add a turn; run it to its end, and say which tool its answer calls."""
        self.num_turns += 1
        name = f"{job}-{self.num_turns}"
        self.add(name, prompt, job_id=job, **{"max_tokens": 2, **extra})
        if run:
            self.run()
            if tool:
                self.consume(CallsTool(name, tool))
        return name

    def learn(self, tool: str, seconds: float, turns: int = MIN_PAUSES) -> None:
        """Run turns of a program between which this tool runs."""
        for _ in range(turns):
            self.turn(f"learns {tool}", [7, 8, 9], tool)
            self.at(self.now + seconds)
        self.turn(f"learns {tool}", [7, 8, 9], is_last_step=True)
        self.before = self.pins().pins_ended

    def flood(self, prompts: int) -> None:
        """Compute other prompts of 8 blocks and an answer."""
        for number in range(prompts):
            self.add(f"other {number}", [number, *range(500, 531)], max_tokens=2)
        self.run()

    def hit(self, name: str) -> int:
        return self.answers[name].num_cached_tokens

    def pins(self) -> Statistics:
        return self.control("statistics")

    def ended(self, reason: str) -> int:
        """Return how many pins have ended for this reason since the agents have learned."""
        return self.pins().pins_ended[reason] - self.before.get(reason, 0)


def test_the_next_turn_finds_the_blocks_that_others_would_have_evicted() -> None:
    for policy, expected in (("continuum", 32), ("fcfs", 0)):
        agents = Agents(scheduling_policy=policy, max_num_seqs=2)
        agents.learn("grep", 5.0)
        agents.turn("job", TURN, "grep")
        agents.flood(4)
        assert agents.hit(agents.turn("job", [*TURN, 1, 2, 3])) == expected, policy


def test_pins_give_way_to_requests_that_need_their_blocks() -> None:
    agents = Agents()
    agents.learn("grep", 5.0)
    agents.turn("job", TURN, "grep")
    assert (agents.pins().num_pins, agents.pins().num_pinned_blocks) == (1, 8)
    agents.add("large", list(range(100)), max_tokens=28)
    agents.run()
    agents.at(agents.now + 1.0)
    assert agents.answers["large"].ended and agents.ended("pressure") == 1


def test_the_pin_of_the_program_that_began_last_gives_way_first() -> None:
    agents = Agents()
    agents.learn("grep", 5.0)
    for number in range(3):
        agents.turn(f"job {number}", [number, *TURN], "grep")
    agents.add("other", list(range(60)), max_tokens=2)
    agents.run()
    hits = [agents.hit(agents.turn(f"job {number}", [number, *TURN, 5])) for number in range(3)]
    assert hits[0] == hits[1] == 32 and hits[2] < 32


def test_a_pin_ends_at_its_deadline_and_not_before() -> None:
    agents = Agents()
    agents.learn("grep", 5.0)
    agents.turn("job", TURN, "grep")
    agents.at(agents.now + 4.9)
    assert agents.pins().num_pins == 1
    until = agents.pins().pin_seconds["grep"]
    assert 5.0 <= until <= 7.0
    agents.at(agents.now + until - 4.9)
    assert agents.pins().num_pins == 0 and agents.ended("deadline") == 1


def test_the_time_depends_on_the_tool_which_is_known_after_the_turn() -> None:
    agents = Agents()
    agents.learn("grep", 0.2)
    agents.learn("build", 40.0)
    for tool, seconds in (("grep", 0.3), ("build", 40.0)):
        agents.turn(f"uses {tool}", TURN, tool)
        assert agents.pins().pin_seconds[tool] == pytest.approx(seconds, rel=0.4)
    agents.at(agents.now + 2.0)
    assert agents.pins().num_pins == 1, "only the slower tool's is left"


def test_names_of_tools_and_their_number_are_bounded() -> None:
    agents = Agents()
    for number in range(80):
        agents.turn("job", [1, 2, 3], f"{number} {'x' * 1000}")
    assert len(agents.pins().pin_seconds) == 64 and max(map(len, agents.pins().pin_seconds)) == 64


def test_blocks_are_kept_until_a_turn_that_waits_is_admitted() -> None:
    agents = Agents(max_num_seqs=1)
    agents.learn("grep", 5.0)
    agents.turn("job", TURN, "grep")
    agents.add("other", list(range(50)), max_tokens=20)
    agents.step(2)
    waiting = agents.turn("job", [*TURN, 4], run=False)
    agents.at(agents.now + 1000.0)
    assert agents.pins().num_pins == 1 and agents.ended("deadline") == 0
    agents.run()
    assert agents.hit(waiting) == 32
    assert agents.ended("return") >= 1


def test_a_waiting_turn_that_is_aborted_ends_the_pin() -> None:
    agents = Agents(max_num_seqs=1)
    agents.learn("grep", 5.0)
    agents.turn("job", TURN, "grep")
    agents.add("other", list(range(50)), max_tokens=20)
    agents.step(2)
    agents.abort(agents.turn("job", [*TURN, 4], run=False))
    assert agents.pins().num_pins == 0 and agents.ended("dropped") == 1


@pytest.mark.parametrize(("prompt", "extra"), [(TURN, {"job_id": "job", "is_last_step": True}), ([1, 2], {})], ids=str)
def test_a_last_step_and_a_request_without_a_program_keep_nothing(prompt: list[int], extra: dict[str, Any]) -> None:
    agents = Agents()
    agents.learn("grep", 5.0)
    agents.add("x", prompt, max_tokens=1, **extra)
    agents.run()
    assert agents.pins().num_pinned_blocks == 0


def test_an_aborted_turn_keeps_nothing() -> None:
    agents = Agents()
    agents.learn("grep", 5.0)
    name = agents.turn("job", TURN, run=False, max_tokens=30)
    agents.step(3)
    agents.abort(name)
    agents.run()
    assert agents.pins().num_pins == 0


def test_another_program_with_the_same_job_id_of_another_tenant_does_not_end_a_pin() -> None:
    agents = Agents()
    agents.learn("grep", 5.0)
    agents.turn("job", TURN, "grep")
    agents.turn("job", [3, 4, 5], tenant=2)
    assert agents.pins().num_pins == 2


def test_new_workers_and_a_reset_end_all_pins() -> None:
    for lose in (Agents.restart_worker, lambda agents: agents.control("reset_prefix_cache")):
        agents = Agents()
        agents.learn("grep", 5.0)
        agents.turn("job", TURN, "grep")
        lose(agents)
        agents.at(agents.now + 0.1)
        assert agents.pins().num_pins == 0 and agents.ended("pressure") >= 1
        assert agents.hit(agents.turn("job", [*TURN, 4])) == 0


def test_a_victim_is_a_request_of_a_program_without_a_pin() -> None:
    agents = Agents(40, watermark=0.0)
    agents.learn("grep", 5.0)
    agents.turn("oldest", list(range(12)), run=False, max_tokens=40)
    agents.turn("pinned", [50, 51], run=False, max_tokens=40)
    agents.turn("other", list(range(60, 80)), run=False, max_tokens=40)
    agents.step(2)
    choose = agents.scheduler.planner.preemption.victim
    assert choose()[0].request_id.startswith("pinned"), "it has the fewest tokens to lose"
    first = agents.turn("pinned", [40, 41, 42, 43, 44], run=False, max_tokens=1)
    while agents.answers[first].ended is None:
        agents.step()
    assert agents.pins().num_pins == 1
    assert choose()[0].request_id.startswith("other")


def _shape(diff: SchedulerOutput) -> Any:
    """Return a step without block ids."""
    new = [(row.request_id, row.num_tokens, row.num_computed_tokens, row.num_blocks) for row in diff.new_requests]
    return diff.step, new, diff.removed, diff.parked, diff.unparked, diff.counts


def _under_pressure(seed: int) -> Agents:
    """Run random programs whose prompts share nothing in a pool that is too small for them."""
    rng = random.Random(seed)
    # A preempted request would find its own blocks, or not; so none is preempted.
    settings = {"async_scheduling": rng.random() < 0.5, "reserve_full_sequence": True}
    agents = Agents(rng.choice((20, 26, 33)), **settings)
    for number in range(40):
        prompt = [number, *(rng.randrange(900) for _ in range(rng.randrange(1, 40)))]
        job = f"job {rng.randrange(6)}"
        name = agents.turn(job, prompt, run=False, max_tokens=rng.randrange(1, 24))
        agents.step(rng.randrange(8))
        if rng.random() < 0.5:
            agents.consume(CallsTool(name, rng.choice(("grep", "build"))))
        agents.at(agents.now + rng.choice((0.05, 1.0, 8.0)))
    agents.finish()
    return agents


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 30))])
def test_pins_delay_no_allocation(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hits, each step has the same rows, positions and numbers of blocks as without pins."""
    pinned = _under_pressure(seed)
    ended = pinned.pins().pins_ended
    assert sum(ended.values()) > 10 and ended["pressure"] > 0
    monkeypatch.setattr(Pins, "turn_ends", lambda self, request, reason: 0)
    plain = _under_pressure(seed)
    assert not sum(plain.pins().pins_ended.values())
    assert [_shape(diff) for diff in pinned.diffs] == [_shape(diff) for diff in plain.diffs]


def _conversations(seed: int, **settings: Any) -> Agents:
    """Run random programs that continue their conversations."""
    rng = random.Random(seed)
    agents = Agents(26, async_scheduling=True, **settings)
    histories: dict[str, list[int]] = {}
    for _ in range(40):
        job = f"job {rng.randrange(5)}"
        history = histories.setdefault(job, [rng.randrange(900) for _ in range(4)])
        history += [rng.randrange(900) for _ in range(rng.randrange(1, 8))]
        del history[: -60 if len(history) > 60 else 0]
        name = agents.turn(job, history.copy(), run=False, max_tokens=rng.randrange(1, 6))
        agents.step(rng.randrange(6))
        if rng.random() < 0.7:
            agents.consume(CallsTool(name, rng.choice(("grep", "build"))))
        agents.at(agents.now + rng.choice((0.05, 1.0, 8.0)))
        if rng.random() < 0.05:
            agents.restart_worker()
    return agents


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 20))])
def test_a_recorded_run_replays_exactly(seed: int) -> None:
    agents = _conversations(seed)
    agents.finish()
    assert sum(agents.pins().pins_ended.values()) > 5
    assert agents.replay_lines() is None
    snapshots = [line for line in agents.lines() if isinstance(line, StepSnapshot)]
    held = [line for line in snapshots if line.num_pinned]
    assert held and all(len(line.pinned_blocks) == len(line.pinned_job_ids) == line.num_pinned for line in snapshots)
    assert all(job.startswith("job ") for line in held for job in line.pinned_job_ids)
    reasons = [reason for line in agents.lines() if isinstance(line, StepDecision) for reason in line.reasons]
    assert {reason.reason for reason in reasons if reason.what == "pin"} == {"none", "grep", "build"}
    assert {reason.reason for reason in reasons if reason.what == "unpin"} <= agents.pins().pins_ended.keys()


def test_an_estimator_that_fails_is_counted_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: ToolPauses, tool: str, benefit: float, cost: float) -> None:
        raise ValueError("no such distribution")

    monkeypatch.setattr(ToolPauses, "choose", fail)
    agents = Agents()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            agents.turn("job", TURN)
    assert agents.pins().num_pin_failures == 3 and agents.pins().num_pins == 0
    assert len([each for each in caplog.records if "cannot choose how long to keep blocks" in each.message]) == 1


def test_an_estimator_that_cannot_be_made_is_an_error_at_the_start() -> None:
    config = make_config(scheduling_policy="continuum", enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="continuum needs --enable-prefix-caching"):
        Scheduler(config, make_layout(config), 33)


def test_the_demand_follows_evictions_and_has_a_floor() -> None:
    demand = Demand()
    assert demand.share == 1.0
    for second in range(1, 200):
        demand.clock(float(second), 10 * second, 0.05)
    assert demand.share == pytest.approx(0.5, abs=0.01)
    demand.clock(10_000.0, 2000, 0.05)
    assert demand.share == pytest.approx(LEAST)


def test_the_demand_does_not_depend_on_the_number_of_clock_events() -> None:
    rng, often, rarely = random.Random(5), Demand(), Demand()
    now, evicted = 0.0, 0
    for _ in range(200):
        for _ in range(rng.randrange(1, 300)):
            now += 0.05
            often.clock(now, evicted, 0.01)
        rarely.clock(now, evicted, 0.01)
        assert often.share == rarely.share
        evicted += rng.randrange(1000)
