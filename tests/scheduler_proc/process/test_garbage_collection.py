"""Garbage is collected only when the loop calls for it."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from scheduler_driver import Driver

from quire.scheduler_proc.process.garbage_collection import YOUNG_EVERY, Collector
from quire.scheduler_proc.requests import events

pytestmark = pytest.mark.full


class Cycle:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def collected() -> Iterator[list[int]]:
    """Yield the generations of the collections so far, and restore the garbage collector."""
    generations: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "stop":
            generations.append(info["generation"])

    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    gc.callbacks.append(note)
    try:
        yield generations
    finally:
        gc.callbacks.remove(note)
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()


def make_cycle() -> "weakref.ref[Cycle]":
    return weakref.ref(Cycle())


def test_automatic_collection_is_disabled_after_start(collected: list[int]) -> None:
    gc.enable()
    collector = Collector(Clock())
    collector.start()
    assert not gc.isenabled() and gc.get_freeze_count() > 0
    del collected[:]
    left = make_cycle()
    many = [[i] for i in range(200_000)]
    assert collected == [] and left() is not None and len(many) == 200_000
    collector.stop()
    assert gc.isenabled() and gc.get_freeze_count() == 0


def send_until_collection(collector: Collector, collected: list[int]) -> None:
    """Send messages until the youngest generation is collected."""
    before = len(collected)
    for _ in range(YOUNG_EVERY):
        assert len(collected) == before
        collector.after_message()


def test_young_objects_are_collected_every_few_messages(collected: list[int]) -> None:
    collector, left = Collector(Clock()), make_cycle()
    send_until_collection(collector, collected)
    assert collected == [0] and left() is None
    collector.after_step()
    assert collected == [0], "no further message arrived"


def test_older_objects_are_collected_when_idle(collected: list[int]) -> None:
    clock, alive = Clock(), Cycle()
    collector = Collector(clock)
    left = weakref.ref(alive)
    send_until_collection(collector, collected)
    del alive
    for _ in range(20):
        send_until_collection(collector, collected)
    collector.after_step()
    assert set(collected) == {0} and left() is not None
    clock.now = 1.0
    collector.turn()
    assert collected[-1] == 2 and left() is None


@pytest.mark.parametrize("policy", ["fcfs", "priority", "program", "continuum"])
@pytest.mark.parametrize("num_tenants", [0, 3])
def test_the_scheduler_makes_no_reference_cycles(collected: list[int], policy: str, num_tenants: int) -> None:
    """A busy engine, which is never idle, would keep them."""
    driver = Driver(12, async_scheduling=True, scheduling_policy=policy, num_tenants=num_tenants, num_host_pages=9)
    for _ in range(2):  # the first lets finalizers of earlier tests' objects run
        gc.collect()
    for index in range(60):
        driver.consume(events.Clock(now=float(index)))
        turn = {"job_id": f"j{index % 5}", "hint": "tool" * (index % 3 == 0), "is_last_step": index % 4 == 3}
        prompt = list(range(index % 7 * (index % 3) + 1))
        driver.add(f"r{index}", prompt, max_tokens=9, priority=index % 3, tenant=index % (num_tenants + 1), **turn)
        if index % 9 == 5:
            driver.control("reset_prefix_cache" if num_tenants else "statistics")
        driver.step()
    driver.abort("r59")
    driver.finish()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        found = [o for o in gc.garbage if type(o).__module__.startswith("quire.scheduler_proc")]
        assert not found and driver.scheduler.statistics().num_preemptions
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_maintenance_needs_a_second_without_a_step_and_collections_need_steps(collected: list[int]) -> None:
    """Turns without a step come often: workers send heartbeats."""
    clock, maintained = Clock(), []
    collector = Collector(clock, lambda: maintained.append(clock.now))

    def turns(seconds: float, *, with_steps: bool) -> None:
        for _ in range(int(seconds * 4)):
            clock.now += 0.25
            if with_steps:
                collector.after_step()
            collector.turn()

    turns(60, with_steps=True)
    assert maintained == [] and 2 not in collected
    turns(3, with_steps=False)
    assert maintained == [61, 62, 63] and collected.count(2) == 1
    turns(1, with_steps=True)
    turns(1, with_steps=False)
    assert maintained[3:] == [65] and collected.count(2) == 1, "less than FULL_EVERY_SECONDS since the last"
    turns(60, with_steps=False)
    assert len(maintained) == 64 and collected.count(2) == 2, "no step since the last"
