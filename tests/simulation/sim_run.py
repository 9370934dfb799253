"""Runs scenarios: the result of one, a smaller one with the same failure, and the total of many."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sim_scenario import Scenario, scenario_of, without
from sim_sessions import with_sessions
from sim_world import World

COUNTS = (
    "num_requests",
    "num_tokens",
    "num_steps",
    "num_given_up",
    "num_forks",
    "num_copies",
    "num_orphans",
    "num_pieces",
)


@dataclass
class Outcome:
    """What one run did.

    Attributes:
        failure: the violation, or empty.
        faults: number of faults by kind.
        num_forks: requests that got the blocks of their parent.
        num_copies: blocks that were copied for them.
        num_orphans: children whose parent had ended when they arrived.
        num_pieces: pieces that became a part of their session, with the answers of fresh requests.
        cells: those of ``sim_cells.CELLS`` that happened.
    """

    failure: str
    faults: Counter[str]
    num_requests: int
    num_tokens: int
    num_steps: int
    num_given_up: int
    num_forks: int
    num_copies: int
    num_orphans: int
    num_pieces: int
    cells: set[str]


@dataclass
class Total:
    """Sums over many seeds. ``failures``: by seed."""

    num_seeds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    num_requests: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_given_up: int = 0
    num_forks: int = 0
    num_copies: int = 0
    num_orphans: int = 0
    num_pieces: int = 0
    cells: set[str] = field(default_factory=set)
    failures: dict[int, str] = field(default_factory=dict)

    @property
    def num_faults(self) -> int:
        return self.faults.total()

    def add(self, seed: int, outcome: Outcome) -> None:
        self.num_seeds += 1
        self.faults += outcome.faults
        self._add(outcome)
        if outcome.failure:
            self.failures[seed] = outcome.failure

    def join(self, part: "Total") -> None:
        """Add the total of other seeds."""
        self.num_seeds += part.num_seeds
        self.faults += part.faults
        self._add(part)
        self.failures.update(part.failures)

    def _add(self, part: "Total | Outcome") -> None:
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(part, name))
        self.cells |= part.cells


def play(scenario: Scenario, prepare: Callable[[World], None] = lambda world: None) -> Outcome:
    """Run one scenario; ``prepare`` may change the world before the start."""
    world = World(scenario)
    prepare(world)
    failure = ""
    try:
        world.run()
    except Exception as error:  # any exception is a defect of the engine or of the simulation
        failure = f"{type(error).__name__}: {error}"
    given_up = world.faults.counts.pop("engine gave up", 0)
    counts = {name: getattr(world, name) for name in COUNTS if name != "num_given_up"}
    return Outcome(failure, world.faults.counts, num_given_up=given_up, cells=world.cells, **counts)


def play_seeds(
    seeds: Iterable[int],
    prepare: Callable[[World], None] = lambda world: None,
    draw: Callable[[int], Scenario] = scenario_of,
) -> Total:
    total = Total()
    for seed in seeds:
        total.add(seed, play(draw(seed), prepare))
    return total


def sessions_of(seed: int) -> Scenario:
    """Return the scenario of a seed with sessions."""
    return with_sessions(scenario_of(seed))


def shrink(scenario: Scenario) -> Scenario:
    """Reduce a scenario to few requests and faults with the same kind of failure, by leaving out halves, then quarters,
    and so on.
    """
    wanted = _kind(play(scenario).failure)
    assert wanted, "the scenario does not fail"
    before = None
    while scenario != before:
        before = scenario
        for field_name in ("faults", "requests"):
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
    """Return the failure without names and numbers."""
    return re.sub(r"\d+", "#", failure)[:60]
