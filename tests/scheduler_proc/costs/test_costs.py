"""Learned costs: they are never negative, grow with the work, approach the truth, and survive what is not true."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.scheduler_proc.costs.choice import MESSAGES_S, LoadChoice, Prefix, WorkAhead, choose
from quire.scheduler_proc.costs.costs import PROBE_INTERVAL, Costs, CostState, Prefill
from quire.scheduler_proc.costs.fit import MEMORY, Fit

SECONDS = st.one_of(
    st.floats(1e-6, 1e3), st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf, 1e300, 5e-324, 1e-7, 3600.0])
)
STEPS = st.lists(st.tuples(st.integers(0, 10**5), st.integers(1, 8192), st.integers(0, 512), SECONDS), max_size=60)
LOADS = st.lists(st.tuples(st.integers(1, 10**4), SECONDS), max_size=60)


def costs_of(steps: list[tuple[int, int, int, float]], loads: list[tuple[int, float]]) -> Costs:
    costs = Costs()
    for start, tokens, rows, seconds in steps:
        costs.step_took(Prefill.between(start, start + tokens), rows, seconds)
    for pages, seconds in loads:
        costs.load_took("host", pages, seconds)
    return costs


@given(STEPS, LOADS, st.integers(1, 10**5), st.integers(0, 10**5), st.integers(1, 8192))
def test_costs_are_finite_not_negative_and_grow(
    steps: list[tuple[int, int, int, float]], loads: list[tuple[int, float]], tokens: int, more: int, step_tokens: int
) -> None:
    costs = costs_of(steps, loads)
    less = costs.prefill_seconds(Prefill.between(0, tokens), step_tokens, 3)
    assert 0.0 <= less <= costs.prefill_seconds(Prefill.between(0, tokens + more), step_tokens, 3) < math.inf
    assert less <= costs.prefill_seconds(Prefill.between(0, tokens), step_tokens, 4)
    if costs.knows({"host": 1}):
        assert 0.0 <= costs.load_seconds({"host": tokens}) <= costs.load_seconds({"host": tokens + more}) < math.inf
    again = Costs(costs.state)
    assert again.state == costs.state
    again.step_took(Prefill.between(5, 400), 2, 0.25)
    costs.step_took(Prefill.between(5, 400), 2, 0.25)
    assert again.state == costs.state, "a restored state learns the same"


@pytest.mark.parametrize("seed", range(4))
def test_costs_approach_the_truth(seed: int) -> None:
    """From a start that is wrong, with noise and outliers; then the truth changes."""
    rng, costs = random.Random(seed), costs_of([(0, 2048, 0, 7.0)] * 3, [(100, 1e-4)] * 3)

    def truth(prefill: Prefill, steps: int, rows: int) -> float:
        return factor * (steps * (0.004 + 1e-5 * rows) + 2e-5 * prefill.tokens + 2e-10 * prefill.work)

    for factor in (1.0, 40.0, 0.2):
        page = 3e-5 * factor
        for _ in range(4 * int(MEMORY)):
            noise = rng.lognormvariate(0.0, 0.1) * (30.0 if rng.random() < 0.03 else 1.0)
            prefill = Prefill.between(start := rng.randrange(40_000), start + rng.choice([2048, rng.randint(1, 2048)]))
            rows = rng.randrange(64)
            costs.step_took(prefill, rows, truth(prefill, 1, rows) * noise)
            pages = rng.randint(1, 400)
            costs.load_took("host", pages, (50 * page + pages * page) * noise)
        for end in (2048, 30_000, 120_000):
            prefill, steps = Prefill.between(0, end), -(-end // 2048)
            assert costs.prefill_seconds(prefill, 2048, 16) == pytest.approx(truth(prefill, steps, 16), rel=0.25)
        assert costs.load_seconds({"host": 2000}) == pytest.approx(2050 * page, rel=0.25)


def test_a_single_outlier_counts_at_most_twice() -> None:
    fit = Fit(2)
    for _ in range(20):
        fit.observe((10.0, 1.0), 1.0)
    fit.observe((10.0, 1.0), 1000.0)
    assert fit.predict((10.0, 1.0)) < 1.1


@pytest.mark.parametrize(
    "state",
    [
        CostState(prefill=[1.0]),
        CostState(prefill=[math.nan] * 26),
        CostState(prefill=[-1.0] * 26),
        CostState(loads={"host": [1.0]}),
    ],
)
def test_an_invalid_state_is_refused(state: CostState) -> None:
    with pytest.raises(ValueError, match="invalid learned cost"):
        Costs(state)


@pytest.mark.parametrize("factor", [1e-3, 0.1, 10.0, 1e4])
def test_the_costs_of_another_load_hold_until_an_observation_contradicts_them(factor: float) -> None:
    """After a start one load or step suffices; what was learned in this engine takes several."""
    stale = costs_of([(0, 512, 0, 0.512 * factor)] * 64, [(64, 0.064 * factor)] * 64)
    stale.num_avoided = 20
    aged = Costs(stale.state)
    aged.age()
    assert aged.num_avoided == 0 and aged.load_seconds({"host": 64}) == stale.load_seconds({"host": 64})
    for costs, is_found in ((aged, True), (stale, False)):
        costs.load_took("host", 64, 0.064)
        costs.step_took(Prefill.between(0, 512), 0, 0.512)
        found = costs.load_seconds({"host": 64}), costs.prefill_seconds(Prefill.between(0, 512), 512, 0)
        assert (found == pytest.approx((0.064, 0.512), rel=0.5)) == is_found


# ---- the choice

KNOWN = costs_of([(0, 512, 0, 0.512)], [(64, 0.064)])
"""1 ms per token and per page."""
IDLE = WorkAhead(Prefill(), 512, 0, 0.0)


def prefix(tokens: int, *, block_size: int = 16, pages: int | None = None) -> Prefix:
    count = tokens // 16 if pages is None else pages
    return Prefix(0, tokens, tokens + 1, {"host": list(range(count))}, block_size)


@given(
    STEPS,
    LOADS,
    st.integers(1, 4000),
    st.integers(1, 500),
    st.sampled_from([0, 16]),
    st.integers(0, 10**6),
    st.floats(0.0, 10.0),
)
def test_a_choice_is_the_least_of_what_it_knows(
    steps: list[tuple[int, int, int, float]],
    loads: list[tuple[int, float]],
    blocks: int,
    more: int,
    block_size: int,
    ahead: int,
    load_seconds: float,
) -> None:
    costs = costs_of(steps, loads)
    found = Prefix(32, 32 + 16 * blocks, 32 + 16 * blocks + more, {"host": range(2, 2 + blocks)}, block_size)
    choice = choose(costs, found, WorkAhead(Prefill.between(0, ahead), 2048, 8, load_seconds))
    if not costs.knows({"host": blocks}):
        assert choice == LoadChoice("load")
        return
    assert choice.load_seconds >= 0.0 and choice.compute_seconds >= 0.0
    if choice.kind == "split":
        assert block_size and found.hit_tokens < choice.front < found.found_tokens and choice.front % 16 == 0
    else:
        assert (choice.kind == "load") == (choice.load_seconds + MESSAGES_S <= choice.compute_seconds)
        assert choice.front == 0


def test_a_queue_of_prefills_favours_loads_and_a_queue_of_loads_computing() -> None:
    found = prefix(16 * 40, block_size=0, pages=600)  # 640 ms to compute, 600 ms to load
    assert choose(KNOWN, found, IDLE).kind == "load"
    assert choose(KNOWN, found, IDLE._replace(load_seconds=0.1)).kind == "compute"
    behind = IDLE._replace(load_seconds=0.1, prefill=Prefill(1000))
    assert choose(KNOWN, found, behind).kind == "load", "the load ends before its turn"


def test_a_tier_that_is_avoided_is_probed() -> None:
    costs = Costs()
    assert [costs.avoids_load() for _ in range(2 * PROBE_INTERVAL)].count(True) == 2
    assert costs.state.num_avoided == 2 * PROBE_INTERVAL
    costs = Costs(KNOWN.state)  # of which little is known: sooner at first
    assert [n for n in range(1, 70) if costs.avoids_load()] == [1, 2, 4, 8, 16, 32, 64]


def test_pages_of_several_tiers_add_up() -> None:
    costs = Costs(KNOWN.state)
    costs.load_took("disk", 64, 6.4)
    both = Prefix(0, 1600, 1601, {"host": range(90), "disk": range(90, 100)}, 0)
    assert choose(costs, both, IDLE).load_seconds == pytest.approx(1.09, rel=0.01)
    assert choose(costs, both, IDLE).kind == "load"
    unknown = Prefix(0, 1600, 1601, {"tape": range(100)}, 0)
    assert choose(costs, unknown, IDLE) == LoadChoice("load")
