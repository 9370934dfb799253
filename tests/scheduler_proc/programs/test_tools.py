"""Pauses of tools: for how long blocks are kept, and what is remembered."""

import random
from bisect import bisect_left

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.scheduler_proc.features.programs.tools import (
    DEFAULT_S,
    EDGES,
    MAX_PAUSES,
    MAX_TOOLS,
    MIN_PAUSES,
    NUM_ENDLESS,
    ToolPauses,
)

CHEAP = 1e-6


def learned(**pauses: list[float]) -> ToolPauses:
    tools = ToolPauses()
    for tool, seconds in pauses.items():
        for each in seconds:
            tools.ended(tool, each, was_late=False)
    return tools


def gain(pauses: list[float], until: float, benefit: float, cost: float) -> float:
    """Return what keeping blocks for ``until`` seconds would have gained.

    A pause counts as the middle of its interval, and half of it as those of the neighbours; two more never end.
    """
    total = -NUM_ENDLESS * cost * until
    for pause in pauses:
        own = bisect_left(EDGES, pause)
        for at in (max(own - 1, 0), own, own, own + 1):
            middle = (EDGES[at] + (EDGES[at - 1] if at else 0.0)) / 2.0
            total += (benefit - cost * middle if EDGES[at] <= until else -cost * until) / 4.0
    return total


def test_a_default_while_too_little_is_known() -> None:
    tools = learned(grep=[9.0] * (MIN_PAUSES - 1))
    assert tools.choose("grep", 1.0, 0.1) == (DEFAULT_S, 0.0, 0)
    assert tools.choose("grep", 0.1, 0.1).seconds == 0.0, "a hit saves less than the default costs"


@pytest.mark.parametrize(("cost", "expected"), [(CHEAP, 300.0), (0.1, 1.0), (2.0, 0.0)])
def test_the_time_covers_the_pauses_that_are_worth_it(cost: float, expected: float) -> None:
    chosen = learned(build=[1.0] * 12 + [300.0] * 4).choose("build", 1.0, cost)
    assert expected <= chosen.seconds <= expected * 1.42, "the neighbour of its interval"
    assert chosen.num_pauses == 16 and chosen.probability * 18 == pytest.approx({300.0: 16, 1.0: 12, 0.0: 0}[expected])


@given(
    pauses=st.lists(st.floats(0.0, 3000.0), min_size=MIN_PAUSES, max_size=60),
    benefit=st.floats(0.01, 100.0),
    cost=st.floats(1e-4, 2.0),
)
@settings(max_examples=50)
def test_no_other_time_would_have_gained_more(pauses: list[float], benefit: float, cost: float) -> None:
    chosen = learned(tool=pauses).choose("tool", benefit, cost).seconds
    best = max(gain(pauses, edge, benefit, cost) for edge in (0.0, *EDGES))
    assert gain(pauses, chosen, benefit, cost) >= best - 1e-6 * (1.0 + abs(best))


def test_a_tool_has_a_distribution_of_its_own_once_it_has_enough_pauses() -> None:
    tools = learned(fast=[0.5] * 20, slow=[60.0] * 3)
    assert tools.choose("slow", 1.0, 0.1).seconds < 0.7, "the pauses of all tools count"
    for _ in range(MIN_PAUSES):
        tools.ended("slow", 60.0, was_late=False)
    assert tools.choose("slow", 1.0, 0.01).seconds >= 60.0
    assert tools.choose("never seen", 1.0, 0.005).num_pauses == 31


def test_pauses_that_never_end_count_until_they_do() -> None:
    tools = learned(ask=[5.0] * 10)
    for _ in range(30):
        tools.late("ask")
    assert tools.choose("ask", 1.0, 0.06).seconds == 0.0
    for _ in range(30):
        tools.ended("ask", 5.0, was_late=True)
    assert tools.choose("ask", 1.0, 0.06) == pytest.approx((6.4, 0.95, 40), rel=0.01)


def test_a_tool_that_became_slower_is_learned_again() -> None:
    tools = learned(build=[1.0] * MAX_PAUSES, test=[1.0])
    for _ in range(2 * MAX_PAUSES):
        tools.ended("build", 30.0, was_late=False)
    assert tools.choose("build", 1.0, 0.001).seconds >= 30.0


def test_memory_is_bounded() -> None:
    tools, rng = ToolPauses(), random.Random(3)
    for number in range(3000):
        tools.ended(f"tool {number}", rng.expovariate(0.1), was_late=rng.random() < 0.2)
        tools.late("every")
    assert len(tools._tools) == MAX_TOOLS and tools._all.total <= MAX_PAUSES
