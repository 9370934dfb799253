"""Hypothesis searches for sequences of events that break the scheduler.

After every step ``check()`` and a worker model that records all contents verify the invariants: blocks and holders (I1,
I2), no slot written twice or freed early (I3, I4), content behind hashes (I5: each hit is read), the worker's state
(I6), streams (I7), one ending (I9), budgets (I11), nothing left behind (I13), order (I14). ``scheduler_long_run.py``
runs the same actions without hypothesis, for any duration.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scheduler_driver import Driver
from scheduler_load import Load, adapter_settings, random_settings
from scheduler_long_run import long_run

pytestmark = pytest.mark.full

SEEDS = st.integers(0, 2**32 - 1)
GOVERNING = ("pause", "resume", "resume", "reset_prefix_cache", "change_budget")


class SchedulerMachine(RuleBasedStateMachine):
    """Each rule is one event; ``advance`` executes steps. Teardown finishes all requests and checks every output."""

    load: Load

    @initialize(seed=SEEDS, adapters=st.booleans())
    def begin(self, seed: int, adapters: bool) -> None:
        rng = random.Random(seed)
        self.load = Load(rng, Driver(**random_settings(rng), **(adapter_settings(rng) if adapters else {})))
        self.load.driver.worker.draft_rng = random.Random(seed)
        for _ in range(6):
            self.load.arrive()

    @rule(seed=SEEDS, count=st.integers(1, 8))
    def arrive(self, seed: int, count: int) -> None:
        for index in range(count):
            self.event(seed + index, "arrive")

    @precondition(lambda self: self.load.driver.scheduler.table.requests)
    @rule(seed=SEEDS)
    def fork(self, seed: int) -> None:
        self.event(seed, "fork")

    @rule(seed=SEEDS, count=st.integers(10, 60))
    def advance(self, seed: int, count: int) -> None:
        self.load.rng = random.Random(seed)
        for _ in range(count):
            self.load.advance()

    @rule(count=st.integers(2, 30))
    def step(self, count: int) -> None:
        self.load.driver.step(count)

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
        self.event(seed, name)

    @rule(seed=SEEDS, name=st.sampled_from(GOVERNING))
    def govern(self, seed: int, name: str) -> None:
        self.event(seed, name)

    @precondition(lambda self: self.load.driver.config.enable_lora)
    @rule(seed=SEEDS, name=st.sampled_from(("reload_adapter", "unload_adapter", "kill_worker")))
    def change_adapters(self, seed: int, name: str) -> None:
        self.load.adapter_rng = random.Random(seed)
        self.event(seed, name)

    @rule(
        seed=SEEDS, name=st.sampled_from(("damaged_result", "damaged_result", "damaged_result", "begin_worker_epoch"))
    )
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


class LongSchedulerMachine(SchedulerMachine):
    """A copy for the longer settings below."""


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=120, stateful_step_count=80, deadline=None)
TestLongSchedulerMachine = pytest.mark.slow(LongSchedulerMachine.TestCase)
TestLongSchedulerMachine.settings = settings(max_examples=600, stateful_step_count=80, deadline=None)


def test_random_events_reach_all_cases() -> None:
    """Runs without preemptions, hits, drafts or failures would prove nothing. A fixed seed makes the counts stable."""
    totals = long_run(seed=0, steps=4000)
    assert totals["found"] == ""
    least = {
        "requests": 1000,
        "preemptions": 50,
        "epochs": 100,
        "damaged": 20,
        "accepted_drafts": 20,
        "hit_tokens": 200,
    }
    assert {name: totals[name] for name in least if totals[name] < least[name]} == {}
