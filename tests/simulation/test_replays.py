"""What simulated schedulers recorded, replayed by schedulers with a defect: each must decide otherwise, or must not."""

from collections.abc import Sequence
from functools import cache

import pytest
from log_replay import replay
from sim_replays import recorded
from sim_run import play
from sim_scenario import scenario_of
from sim_world import World

from quire.scheduler_proc.core.feature import Calls, Feature

ORDERED = ("admitted", "after_running", "arrived", "begin_plan", "ending", "new_epoch", "prepare", "spare")
"""Hooks whose order ``Scheduler.make_features`` argues."""


def _reverse(monkeypatch: pytest.MonkeyPatch, hooks: Sequence[str]) -> None:
    subscribe = Calls.subscribe

    def reversed_subscribe(self: Calls, features: Sequence[Feature]) -> None:
        subscribe(self, features)
        for hook in hooks:
            setattr(self, hook, tuple(reversed(getattr(self, hook))))

    monkeypatch.setattr(Calls, "subscribe", reversed_subscribe)


@cache
def world_of(seed: int) -> World:
    """Return an engine after its end."""
    worlds: list[World] = []
    assert not play(scenario_of(seed), worlds.append).failure
    return worlds[0]


@pytest.mark.parametrize("seed", [14, pytest.param(21, marks=pytest.mark.full)])
def test_order_does_not_matter_for_other_hooks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds with adapters, and with programs."""
    world = world_of(seed)
    last = world.schedulers[-1]
    hooks = vars(last.scheduler.core.calls).keys() - {"handlers", *ORDERED}
    assert "obstacle" in hooks and len(hooks) > 20
    _reverse(monkeypatch, sorted(hooks))
    header, records = recorded(last) or pytest.fail("it recorded nothing")
    assert replay(header, records) is None
