"""Hypothesis looks for the events, in an order that nobody thought of, that break the scheduler.

After every step ``check()`` and the worker that remembers hold it to the invariants of docs and protocol: blocks and
holders (I1, I2), no slot written twice or given away early (I3, I4), content behind hashes (I5: each hit is read), the
worker's mirror (I6), streams (I7), one ending (I9), budgets (I11), nothing left behind (I13), order (I14). The same
actions without hypothesis, for as long as one likes: ``long_run.py``.
"""

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scheduler_driver import Driver
from scheduler_load import Load, random_settings

SEEDS = st.integers(0, 2**32 - 1)
TOTALS = {"steps": 0, "requests": 0, "preemptions": 0, "epochs": 0, "damaged": 0, "accepted": 0, "hits": 0, "held": 0}


class SchedulerMachine(RuleBasedStateMachine):
    """Each rule is one event; ``advance`` lets time pass. Teardown drains, and looks at every answer."""

    load: Load

    @initialize(seed=SEEDS)
    def begin(self, seed: int) -> None:
        rng = random.Random(seed)
        self.load = Load(rng, Driver(**random_settings(rng)))
        self.load.driver.worker.draft_rng = random.Random(seed)
        for _ in range(6):
            self.load.arrive()

    @rule(seed=SEEDS, count=st.integers(1, 8))
    def arrive(self, seed: int, count: int) -> None:
        for index in range(count):
            self.event(seed + index, "arrive")

    @rule(seed=SEEDS, count=st.integers(10, 60))
    def advance(self, seed: int, count: int) -> None:
        self.load.rng = random.Random(seed)
        for _ in range(count):
            self.load.advance()

    @rule(count=st.integers(2, 30))
    def step(self, count: int) -> None:
        """In order, as it mostly is."""
        for _ in range(count):
            self.load.driver.step()

    @precondition(lambda self: self.load.driver.scheduler.table.requests)
    @rule(seed=SEEDS, name=st.sampled_from(("abort", "stop", "leave", "fail")))
    def end_some(self, seed: int, name: str) -> None:
        self.event(seed, name)

    @precondition(lambda self: self.load.driver.scheduler.table.num_waiting)
    @rule(seed=SEEDS)
    def hold(self, seed: int) -> None:
        self.event(seed, "hold")

    @precondition(lambda self: self.load.held)
    @rule(seed=SEEDS, name=st.sampled_from(("release", "release", "refuse")))
    def release(self, seed: int, name: str) -> None:
        TOTALS["held"] += 1
        self.event(seed, name)

    @rule(seed=SEEDS, name=st.sampled_from(("pause", "resume", "resume", "reset_prefix_cache", "change_budget")))
    def govern(self, seed: int, name: str) -> None:
        self.event(seed, name)

    @rule(seed=SEEDS, name=st.sampled_from(("damaged_result", "damaged_result", "damaged_result", "begin_epoch")))
    def fail(self, seed: int, name: str) -> None:
        self.event(seed, name)

    def event(self, seed: int, name: str) -> None:
        self.load.rng = random.Random(seed)
        getattr(self.load, name)()
        for _ in range(self.load.rng.randrange(12)):
            self.load.advance()

    def teardown(self) -> None:
        if not hasattr(self, "load"):
            return
        self.load.drain()
        self.load.check_answers()
        statistics = self.load.driver.scheduler.statistics()
        reached: dict[str, Any] = {
            "steps": statistics.num_steps,
            "requests": len(self.load.asked),
            "preemptions": statistics.num_preemptions,
            "epochs": self.load.num_epochs,
            "damaged": self.load.num_damaged,
            "accepted": statistics.num_accepted_tokens,
            "hits": statistics.prefix_cache_hit_tokens,
        }
        for name, value in reached.items():
            TOTALS[name] += value


class LongSchedulerMachine(SchedulerMachine):
    """The same for longer."""


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=120, stateful_step_count=80, deadline=None)
TestLongSchedulerMachine = pytest.mark.slow(LongSchedulerMachine.TestCase)
TestLongSchedulerMachine.settings = settings(max_examples=600, stateful_step_count=80, deadline=None)


def test_the_machine_went_far_enough() -> None:
    """Runs that never preempt, share, hold or fail would prove nothing."""
    print(TOTALS)
    # Far below what a run has had: what is drawn differs from run to run.
    least = {
        "steps": 1500,
        "requests": 400,
        "preemptions": 15,
        "epochs": 15,
        "damaged": 2,
        "accepted": 20,
        "hits": 150,
        "held": 1,
    }
    assert {name: TOTALS[name] for name in least if TOTALS[name] < least[name]} == {}
