"""Garbage is collected only when the loop calls for it."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from scheduler_driver import Driver

from quire.scheduler_proc.process.garbage_collection import IDLE_SECONDS, YOUNG_EVERY, Collector

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
    collector, alive = Collector(Clock()), Cycle()
    left = weakref.ref(alive)
    send_until_collection(collector, collected)
    del alive
    for _ in range(20):
        send_until_collection(collector, collected)
    collector.after_step()
    assert set(collected) == {0} and left() is not None
    collector.idle()
    assert collected[-1] == 2 and left() is None


def test_the_scheduler_makes_no_reference_cycles(collected: list[int]) -> None:
    """A busy engine, which is never idle, would keep them."""
    driver = Driver(num_blocks=12, async_scheduling=True)
    gc.collect()
    for index in range(30):
        driver.add(f"r{index}", list(range(index % 7 + 1)), max_tokens=9, priority=index % 3)
        driver.step()
    driver.abort("r29")
    driver.finish()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        found = [o for o in gc.garbage if type(o).__module__.startswith("quire.scheduler_proc")]
        assert not found and driver.scheduler.statistics().num_preemptions
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_idle_collections_need_steps_and_are_rate_limited(collected: list[int]) -> None:
    clock = Clock()
    collector = Collector(clock)
    collector.idle()
    assert collected == []
    collector.after_step()
    collector.idle()
    assert collected == [2]
    clock.now = 2 * IDLE_SECONDS
    collector.idle()
    assert collected == [2]
    collector.after_step()
    collector.idle()
    collector.after_step()
    clock.now += IDLE_SECONDS / 2
    collector.idle()
    assert collected == [2, 2]
    clock.now += IDLE_SECONDS / 2
    collector.idle()
    assert collected == [2, 2, 2]
