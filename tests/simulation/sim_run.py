"""Runs of scenarios: what one came to, a smaller one that fails in the same way, and what many came to."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sim_scenario import Scenario, scenario_of, without
from sim_world import World


@dataclass
class Outcome:
    """``failure``: what was violated; empty: nothing. ``faults``: how often each kind befell the engine."""

    failure: str
    faults: Counter[str]
    num_requests: int
    num_tokens: int
    num_steps: int
    num_given_up: int


@dataclass
class Total:
    """Over many seeds. ``failures``: by seed."""

    num_seeds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    num_requests: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_given_up: int = 0
    failures: dict[int, str] = field(default_factory=dict)

    @property
    def num_faults(self) -> int:
        return self.faults.total()

    def add(self, seed: int, outcome: Outcome) -> None:
        self.num_seeds += 1
        self.faults += outcome.faults
        self.num_requests += outcome.num_requests
        self.num_tokens += outcome.num_tokens
        self.num_steps += outcome.num_steps
        self.num_given_up += outcome.num_given_up
        if outcome.failure:
            self.failures[seed] = outcome.failure

    def join(self, part: "Total") -> None:
        """Other seeds' total."""
        self.num_seeds += part.num_seeds
        self.faults += part.faults
        self.num_requests += part.num_requests
        self.num_tokens += part.num_tokens
        self.num_steps += part.num_steps
        self.num_given_up += part.num_given_up
        self.failures.update(part.failures)


def play(scenario: Scenario, prepare: Callable[[World], None] = lambda world: None) -> Outcome:
    """``prepare`` may change the world before it begins."""
    world = World(scenario)
    prepare(world)
    failure = ""
    try:
        world.run()
    except Exception as error:  # whatever it is: a defect of the engine, or of the simulation
        failure = f"{type(error).__name__}: {error}"
    given_up = world.faults.counts.pop("engine gave up", 0)
    return Outcome(failure, world.faults.counts, world.num_requests, world.num_tokens, world.num_steps, given_up)


def play_seeds(seeds: Iterable[int], prepare: Callable[[World], None] = lambda world: None) -> Total:
    total = Total()
    for seed in seeds:
        total.add(seed, play(scenario_of(seed), prepare))
    return total


def shrink(scenario: Scenario) -> Scenario:
    """With as few requests and faults as fail in the same way: halves are left out, then quarters, and so on."""
    wanted = _kind(play(scenario).failure)
    assert wanted, "it does not fail"
    before = None
    while scenario != before:
        before = scenario
        for field_name in ("faults", "asks"):
            scenario = _shrink(scenario, field_name, wanted)
    return scenario


def _shrink(scenario: Scenario, field_name: str, wanted: str) -> Scenario:
    size = max(1, len(getattr(scenario, field_name)) // 2)
    while size:
        first = 0
        while first < len(getattr(scenario, field_name)):
            smaller = without(scenario, field_name, range(first, first + size))
            if _kind(play(smaller).failure) == wanted:
                scenario = smaller
            else:
                first += size
        size //= 2
    return scenario


def _kind(failure: str) -> str:
    """Without names and numbers."""
    return re.sub(r"\d+", "#", failure)[:60]
