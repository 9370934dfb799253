"""Garbage is collected when the loop says so, and at no other time."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from quire.scheduler_proc.collect import IDLE_SECONDS, MIDDLE_EVERY, YOUNG_EVERY, Collector


class Knot:
    """Refers to itself: only a collection frees it."""

    def __init__(self) -> None:
        self.me = self


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def collected() -> Iterator[list[int]]:
    """Generations of the collections so far. The process' collector is as before afterwards."""
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


def knot() -> "weakref.ref[Knot]":
    return weakref.ref(Knot())


def test_after_the_start_nothing_is_collected_by_itself(collected: list[int]) -> None:
    gc.enable()
    collector = Collector(Clock())
    collector.start()
    assert not gc.isenabled() and gc.get_freeze_count() > 0
    del collected[:]
    left = knot()
    many = [[i] for i in range(200_000)]
    assert collected == [] and left() is not None and len(many) == 200_000
    collector.stop()
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_steps_find_what_is_young(collected: list[int]) -> None:
    collector, left = Collector(Clock()), knot()
    for _ in range(YOUNG_EVERY - 1):
        collector.after_step()
    assert collected == [] and left() is not None
    collector.after_step()
    assert collected == [0] and left() is None


def test_many_steps_find_what_is_older_but_never_walk_everything(collected: list[int]) -> None:
    collector, alive = Collector(Clock()), Knot()
    left = weakref.ref(alive)
    for step in range(MIDDLE_EVERY):
        if step == YOUNG_EVERY:
            del alive  # it has outlived a collection
        collector.after_step()
        assert (left() is None) == (step == MIDDLE_EVERY - 1)
    assert collected == [0] * (MIDDLE_EVERY // YOUNG_EVERY - 1) + [1]


def test_idle_time_finds_the_oldest(collected: list[int]) -> None:
    clock, alive = Clock(), Knot()
    left = weakref.ref(alive)
    collector = Collector(clock)
    for _ in range(MIDDLE_EVERY):
        collector.after_step()
    del alive
    del collected[:]
    collector.idle()
    assert collected == [2] and left() is None


def test_idle_time_is_used_only_after_steps_and_not_too_often(collected: list[int]) -> None:
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
