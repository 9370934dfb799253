"""Programs that are admitted together: which, in which order their turns run, and when they make room for others."""

import random
from typing import Any

import pytest
from scheduler_driver import Driver

from quire.protocol.wire.front_end_messages import EndReason, ProgramCounts
from quire.scheduler_proc.features.programs.limit import (
    FIRST_PATIENCE_S,
    MAX_IDLE_S,
    PATIENCE_S,
    PATIENCE_WAITS,
    WAIT_SHARE,
)
from quire.scheduler_proc.features.programs.program_state import IS_OVERDUE, PROGRAM
from quire.scheduler_proc.requests.events import Clock
from quire.scheduler_proc.requests.reasons import WaitReason

BLOCKS = 32
"""Usable blocks of 4 tokens: room for the contexts of two programs of 36 tokens, not for those of three."""


class Agents(Driver):
    """An engine that admits programs, with a clock. ``max_others``: as after many recomputed tokens, if it is 1."""

    def __init__(self, *, max_others: int = 1, **settings: Any) -> None:
        super().__init__(BLOCKS + 1, **{"scheduling_policy": "program", "watermark": 0.0, **settings})
        if (limit := self.scheduler.programs.limit) is not None:
            limit.max_others = max_others
        self.contexts: dict[str, list[int]] = {}
        self.num_turns = 0
        self.now = 0.0

    def at(self, now: float) -> None:
        self.now = now
        self.consume(Clock(now))

    def turn(self, job: str, length: int = 36, *, run: bool = True, **extra: Any) -> str:
        """Add a turn of a job, whose prompt extends that of the turn before to ``length`` tokens."""
        self.num_turns += 1
        name = f"{job} {self.num_turns}"
        context = self.contexts.setdefault(job, [])
        rng = random.Random(f"{job} {len(context)}")
        context += [rng.randrange(1000) for _ in range(max(length - len(context), 1))]
        self.add(name, list(context), job_id=job, **{"max_tokens": 2, **extra})
        if run:
            self.run()
        return name

    def hit(self, name: str) -> int:
        return self.answers[name].num_cached_tokens

    @property
    def counts(self) -> ProgramCounts:
        counts = self.control("statistics").programs
        assert counts is not None
        return counts

    def order(self, *names: str) -> list[str]:
        """Run to the end; return these requests in the order of their endings."""
        ended: list[str] = []
        for _ in range(2000):
            ended += [name for name in names if self.answers[name].reason is not None and name not in ended]
            if self.scheduler.is_idle:
                return ended
            self.step()
        raise AssertionError("requests never end")


@pytest.mark.parametrize(("policy", "is_whole"), [("program", True), ("fcfs", False)])
def test_admitted_programs_find_their_contexts_again(policy: str, *, is_whole: bool) -> None:
    agents = Agents(scheduling_policy=policy)
    for job in ("first", "second", "third", "fourth"):
        agents.turn(job)
    assert (agents.hit(agents.turn("first", 40)) == 36) == is_whole


def test_programs_are_admitted_while_their_contexts_fit() -> None:
    agents = Agents()
    for job, expected in (("first", 1), ("second", 2), ("third", 2)):
        agents.turn(job)
        assert agents.counts.num_admitted == expected
    agents.turn("fourth", run=False)
    assert (agents.counts.num_admitted, agents.counts.num_waiting) == (2, 1)
    agents.run()


def test_turns_of_admitted_programs_come_first_then_first_turns_then_others() -> None:
    agents = Agents(max_num_seqs=1)
    for job in ("first", "second", "third"):
        agents.turn(job)
    running = agents.turn("second", 40, run=False, max_tokens=20)
    agents.step()
    waiting = [agents.turn("third", 40, run=False), agents.turn("new", 8, run=False)]
    waiting += [agents.turn("first", 40, run=False)]
    assert agents.order(running, *waiting) == [running, waiting[2], waiting[1], waiting[0]]


def test_a_first_turn_that_has_waited_for_long_comes_first() -> None:
    agents = Agents(max_num_seqs=1)
    agents.turn("first")
    running = agents.turn("first", 40, run=False, max_tokens=20)
    agents.step()
    new = agents.turn("new", 100, run=False)
    agents.at(FIRST_PATIENCE_S - 1)
    admitted = agents.turn("first", 44, run=False)
    agents.at(FIRST_PATIENCE_S)
    assert agents.order(running, admitted, new) == [running, new, admitted]


def test_requests_of_no_program_and_preempted_ones_do_not_wait_for_ever_beside_an_admitted_program() -> None:
    agents = Agents(max_num_seqs=1)
    agents.turn("first", 8)
    preempted = agents.turn("new", 60, run=False, max_tokens=8)
    agents.step(2)
    agents.hold(preempted)
    agents.turn("first", 10, run=False)
    agents.step(2)
    agents.release(preempted)
    agents.add("short", [1, 2], max_tokens=2)
    assert PROGRAM.of(agents.request("short")) is None
    while agents.now < FIRST_PATIENCE_S + 160:
        agents.at(agents.now + 60.0)
        while len([name for _, name in agents.scheduler.table.requests if name.startswith("first")]) < 3:
            agents.turn("first", 1, run=False)
            del agents.contexts["first"][8:]
        agents.step(5)
    assert agents.answers["short"].reason is agents.answers[preempted].reason is EndReason.LENGTH
    agents.run()
    agents.scheduler.check()


@pytest.mark.parametrize("wait", [0.0, 100.0])
def test_later_turns_come_first_after_a_multiple_of_the_mean_wait(wait: float) -> None:
    agents = Agents(max_num_seqs=1)
    for job in ("first", "second", "third"):
        agents.turn(job)
    limit = agents.scheduler.programs.limit
    assert limit is not None and limit.wait == 0.0
    limit.wait = wait
    running = agents.turn("first", run=False, max_tokens=20)
    agents.step()
    limit.wait = wait
    late = agents.turn("third", 40, run=False)
    agents.at(PATIENCE_S + PATIENCE_WAITS * wait - 1.0)
    assert not IS_OVERDUE.of(agents.request(late))
    agents.at(agents.now + 1.0)
    assert IS_OVERDUE.of(agents.request(late))
    others = [agents.turn("second", run=False) for _ in range(3)]
    assert agents.order(running, late, *others) == [running, late, *others]
    waits = [agents.now, 0.0, 0.0, 0.0]
    for each in waits:
        wait += WAIT_SHARE * (each - wait)
    assert limit.wait == pytest.approx(wait)


def test_a_program_that_pauses_for_long_makes_room_only_if_another_one_waits() -> None:
    agents = Agents()
    for job in ("first", "second"):
        agents.turn(job)
    agents.at(2 * MAX_IDLE_S)
    assert agents.counts.num_admitted == 2
    agents.turn("second", 40)
    agents.turn("third", run=False)
    agents.at(agents.now + 2.0)
    assert agents.counts.num_released["idle"] == 1
    agents.run()
    assert agents.counts.num_admitted == 2
    assert agents.hit(agents.turn("third", 40)) == 36


def test_the_youngest_program_is_released_when_contexts_outgrow_the_pool() -> None:
    agents = Agents()
    agents.turn("first")
    agents.turn("second")
    agents.turn("first", 90)
    assert agents.counts.num_released["grown"] == 1
    agents.turn("third", 20)
    assert agents.hit(agents.turn("first", 92)) >= 88


def test_the_last_step_of_a_job_releases_its_program() -> None:
    agents = Agents()
    agents.turn("first")
    agents.turn("first", is_last_step=True)
    assert agents.counts.num_admitted == 0
    assert agents.counts.num_released["ended"] == 1


def test_max_programs_admits_a_number_of_any_size() -> None:
    agents = Agents(max_programs=3)
    for job in ("first", "second", "third", "fourth"):
        agents.turn(job)
    assert agents.counts.num_admitted == 3


def test_one_request_of_other_programs_runs_at_a_time_beside_contexts_that_fill_the_pool() -> None:
    agents = Agents()
    for job in ("first", "second"):
        agents.turn(job)
    names = [agents.turn(job, run=False, max_tokens=20) for job in ("third", "fourth")]
    agents.step(2)
    states = [agents.request(name).status.name for name in names]
    assert states == ["RUNNING", "WAITING"]
    assert agents.request(names[1]).wait_reason is WaitReason.PROGRAM_LIMIT
    agents.finish()
    assert all(agents.answers[name].reason is EndReason.LENGTH for name in names)


def test_no_running_request_is_preempted_for_another_tenant_while_pinned_blocks_suffice() -> None:
    agents = Agents(num_tenants=2, fair_admission=True)
    for job in ("first", "second"):
        agents.turn(job)
    running = [agents.turn("first", 40, run=False, max_tokens=40)]
    agents.step(2)
    running.append(agents.turn("third", 30, run=False, max_tokens=40))
    agents.step(3)
    agents.add("other tenant", [7] * 34, max_tokens=2, tenant=1)
    agents.step()
    states = {agents.request(name).status.name for name in (*running, "other tenant")}
    assert states == {"RUNNING"}
    agents.finish()


@pytest.mark.full
def test_the_number_of_requests_beside_the_pins_follows_the_recomputed_tokens() -> None:
    """Contexts that are lost turn after turn lower it to one, and steps that recompute none let it grow again."""
    agents = Agents(max_others=8)
    limit = agents.scheduler.programs.limit
    assert limit is not None
    for number in range(500):
        agents.turn(f"job {number % 10}", 36 + number // 100)
    assert limit.max_others == 1 and limit.recomputed > 0.1
    for number in range(25):
        agents.turn(f"single {number}", 8, max_tokens=100)
    assert limit.max_others > 1 and limit.recomputed < 0.05


def test_single_requests_are_served_as_without_programs() -> None:
    """Requests that do not return fill the pool with pins, which keep none of them waiting."""
    orders = []
    for policy in ("fcfs", "program"):
        agents = Agents(max_others=8, scheduling_policy=policy)
        names = []
        for number in range(40):
            names.append(agents.turn(f"job {number}", 9 + number % 7, run=False, max_tokens=5 + number % 11))
            agents.step(number % 3)
        orders.append(agents.order(*names))
        assert agents.diffs[-1].step < 200
    assert agents.counts.num_admitted > 0
    assert orders[0] == orders[1]


def test_running_requests_of_other_programs_are_preempted_first() -> None:
    agents = Agents()
    agents.turn("first")
    agents.turn("second")
    other = agents.turn("third", 60, run=False, max_tokens=40)
    agents.step()
    admitted = agents.turn("first", 40, run=False, max_tokens=60)
    agents.finish()
    decisions = agents.scheduler.decisions.preemptions
    assert agents.answers[admitted].reason is agents.answers[other].reason is EndReason.LENGTH
    assert decisions["last_program"] >= 1


def test_a_flood_of_new_programs_does_not_stop_an_old_one() -> None:
    """Liveness: with more programs than fit, each of them ends all of its turns."""
    agents = Agents(max_num_seqs=3, async_scheduling=True)
    jobs = [f"job {number}" for number in range(9)]
    for number in range(4):
        for job in jobs:
            agents.turn(job, 30 + 8 * number, run=False)
            agents.at(agents.now + 7.0)
            agents.step(3)
    agents.finish()
    assert all(answer.reason is EndReason.LENGTH for answer in agents.answers.values())


def test_the_least_recently_seen_program_without_a_request_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.scheduler_proc.features.programs.programs.MAX_PROGRAMS", 2)
    agents = Agents()
    running = agents.turn("first", run=False, max_tokens=4)
    agents.step()
    agents.turn("second", 12, run=False)
    agents.turn("third", 12, run=False)
    assert (agents.counts.num_known, agents.counts.num_admitted) == (3, 3), "all of them have requests"
    agents.run()
    assert agents.answers[running].reason is EndReason.LENGTH
    agents.turn("second", 16)
    agents.turn("fourth", 12)
    assert agents.counts.num_released["forgotten"] == agents.counts.num_known == 2
    assert [job for _, job in agents.scheduler.programs.known] == ["second", "fourth"]
    assert set(agents.scheduler.kv.pins) == {2, 5}, "the contents of forgotten programs are not pinned"
    agents.scheduler.check()
