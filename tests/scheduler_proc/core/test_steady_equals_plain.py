"""Steady decode changes no decision and no output: runs with and without it are compared on the same events."""

import random
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_replay import replay
from scheduler_driver import Driver, change
from scheduler_load import Asked, Load, adapter_settings, program_settings, random_settings
from tiers import thinned

from quire.bench.measure.shapes import find_shape
from quire.protocol.model.kv_layout import KVLayout, kv_layout
from quire.scheduler_proc.core.decode_blocks import SteadyBlockAllocator
from quire.scheduler_proc.core.steady_decode import SteadyDecode
from quire.scheduler_proc.core.step import NewBlocks
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.trace.event_log import RecordKind

SEEDS = range(18)
STEPS_PER_RUN = 100
COUNTED = (
    *("steps", "steady", "preemptions", "epochs", "several"),
    *("accepted", "rejected", "steady_with_drafts", "parked", "hits", "dropped"),
)
TOTALS = dict.fromkeys(COUNTED, 0)


@pytest.fixture(autouse=True)
def probes_are_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the probe intervals, because outputs are short here."""
    monkeypatch.setattr("quire.scheduler_proc.features.drafts.draft_state.PROBE_INTERVAL", 6)
    monkeypatch.setattr("quire.scheduler_proc.features.drafts.drafting.MAX_PROBE_INTERVAL", 12)


def plain_driver(**settings: Any) -> Driver:
    """Return an engine without steady decode, which checks waiting requests again in each step.

    With tenants it remembers refusals as well: what prefills get depends on which request was refused.
    """
    driver = Driver(steady_decode=False, **settings)
    planner = driver.scheduler.planner
    if settings.get("num_tenants", 1) < 2:
        planner.admission_obstacle = planner.admit  # type: ignore[method-assign]
    return driver


def both_ways(seed: int, *, is_replayed: bool = False, **settings: Any) -> Load:
    """Run both engines to the end; ``Load`` compares each diff and all messages to clients."""
    rng = random.Random(seed)
    settings = random_settings(rng, hybrid=seed % 3 == 0, drafts=seed % 4 > 0) | settings
    load = Load(rng, Driver(**settings), plain_driver(**settings))
    load.fixed_budget, load.num_tenants = is_replayed, settings.get("num_tenants", 1)
    while len(load.driver.diffs) < STEPS_PER_RUN:
        load.random_event()
    load.drain()
    load.check_answers()
    assert load.drivers[0].answers == load.drivers[1].answers
    assert statistics_of(load.drivers[0]) == statistics_of(load.drivers[1])
    return load


def statistics_of(driver: Driver) -> object:
    return driver.scheduler.statistics()


def and_slow(default: range, more: range) -> list[object]:
    """Return the default seeds, and more seeds for slow runs."""
    return [*default, *(pytest.param(seed, marks=pytest.mark.slow) for seed in more)]


@pytest.mark.parametrize("seed", thinned(and_slow(SEEDS, range(18, 60)), keep=4))
def test_every_decision_and_output_is_the_same(seed: int) -> None:
    load = both_ways(seed)
    steady, plain = load.drivers
    assert plain.num_steady == 0
    TOTALS["steps"] += len(steady.diffs)
    TOTALS["steady"] += steady.num_steady
    TOTALS["preemptions"] += steady.scheduler.statistics().num_preemptions
    TOTALS["epochs"] += load.num_epochs
    statistics = steady.scheduler.statistics()
    TOTALS["accepted"] += statistics.num_accepted_tokens
    TOTALS["rejected"] += statistics.num_draft_tokens - statistics.num_accepted_tokens
    TOTALS["hits"] += statistics.prefix_cache_hit_tokens
    TOTALS["dropped"] += statistics.dropped_tokens
    TOTALS["parked"] += sum(len(diff.parked) for diff in steady.diffs)
    TOTALS["steady_with_drafts"] += steady.num_steady * (statistics.num_draft_tokens > 0)
    TOTALS["several"] += sum(len(d.new_requests) > 1 for d in steady.diffs)


FEATURES: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "adapters": adapter_settings,
    "programs": program_settings,
    "programs of tenants": lambda rng: program_settings(rng) | {"num_tenants": 2},
}


PROGRAMS = thinned(product(range(11), ["programs", "programs of tenants"]), keep=0)  # 15 s each, most of it checks


@pytest.mark.parametrize(("seed", "feature"), [*thinned(product(range(11), ["adapters"]), keep=2), *PROGRAMS])
def test_features_change_neither_decisions_nor_replays(seed: int, feature: str) -> None:
    load = both_ways(seed, is_replayed=True, **FEATURES[feature](random.Random(seed)))
    steady = load.driver
    assert steady.replay_lines() is None
    assert replay(steady.header, list(steady.log)) is None


@pytest.mark.full
def test_runs_reached_all_cases() -> None:
    """The random runs covered all cases. Skipped if not all seeds ran."""
    if TOTALS["steps"] < len(SEEDS) * STEPS_PER_RUN:
        pytest.skip("not all seeds ran")
    assert TOTALS["steady"] > TOTALS["steps"] / 3, "too few requests were in steady decode"
    assert TOTALS["hits"] > 400 and TOTALS["dropped"] > 40 and TOTALS["parked"] >= 4 and TOTALS["rejected"] > 80
    assert TOTALS["accepted"] > 30 and TOTALS["steady_with_drafts"] > 10
    assert TOTALS["preemptions"] > 25 and TOTALS["epochs"] > 10 and TOTALS["several"] > 10


@pytest.mark.parametrize("seed", thinned(and_slow(range(103, 106), range(106, 120)), keep=1))
def test_long_outputs_in_steady_decode_are_the_same(seed: int) -> None:
    """Long stretches of steady decode: new blocks, calendar entries and a growing table, with no other events."""
    rng = random.Random(seed)
    settings: dict[str, Any] = {
        "num_blocks": rng.choice((40, 120, 400)),
        "max_model_len": 128,
        "max_num_seqs": rng.choice((8, 100)),
        "max_num_batched_tokens": 128,
        "block_size": rng.choice((1, 4, 16)),
        "async_scheduling": rng.random() < 0.8,
        "scheduling_policy": rng.choice(("fcfs", "priority")),
    }
    if settings["max_num_seqs"] == 8:
        settings |= {"num_speculative_tokens": rng.choice((0, 1, 4)), "adaptive": True}
    drivers = [Driver(**settings), plain_driver(**settings)]
    load = Load(rng, *drivers)
    for index in range(rng.choice((6, 70))):
        for driver in drivers:
            driver.add(f"x{index}", [index, 7], max_tokens=5 + 31 * index % 100, priority=index % 3, client=index % 2)
    for _ in range(500):
        load.advance()
    for driver in drivers:
        driver.finish()
    assert drivers[0].answers == drivers[1].answers
    if settings["num_blocks"] == 400 and not settings.get("num_speculative_tokens"):  # no steady decode with drafts
        assert drivers[0].num_steady > 2 * len(drivers[0].diffs)


def layout_like(shape: str, window: int, block_size: int, shared: int = 0) -> KVLayout:
    """Return the layout of a shape with another window; the last ``shared`` layers read earlier layers' caches."""
    model = find_shape(shape)
    owners = [layer % 6 if layer >= model.num_layers - shared else layer for layer in range(model.num_layers)]
    windows = [each and window for each in model.windows]
    return kv_layout(change(model, windows=windows, cache_sources=owners), block_size, "bfloat16")


LAYOUTS = {
    "full": ("llama-3.1-8b", 0),
    "one window": ("mistral-7b", 0),
    "two groups": ("gpt-oss-20b", 0),
    "seven groups": ("gemma-3-1b", 0),
    "shared KV": ("gemma-3-1b", 8),
}
"""Shapes, and the number of layers that share another's cache."""


def test_layouts_have_these_groups() -> None:
    groups = {name: layout_like(shape, 9, 4, shared).groups for name, (shape, shared) in LAYOUTS.items()}
    assert {name: len(found) for name, found in groups.items()} == {
        "full": 1,
        "one window": 1,
        "two groups": 2,
        "seven groups": 7,
        "shared KV": 6,
    }


def tables_of(driver: Driver) -> dict[tuple[int, str], list[list[int]]]:
    """Return the block ids of each request; 0 where its windows have freed the block."""
    kv = driver.scheduler.kv
    return {
        key: [ids.tolist() for ids in kv.block_ids(request)] for key, request in driver.scheduler.table.requests.items()
    }


@pytest.mark.full
@settings(max_examples=8)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    window=st.integers(1, 40),
    block_size=st.sampled_from((1, 2, 4, 8)),
    rows_of_blocks=st.integers(3, 12),
    caching=st.sampled_from((True, True, False)),
    drafts=st.sampled_from((0, 0, 3)),
    num_tenants=st.sampled_from((1, 1, 3)),
    seed=st.integers(0, 10_000),
)
def test_every_layout_decides_the_same(
    layout: str,
    window: int,
    block_size: int,
    rows_of_blocks: int,
    caching: bool,
    drafts: int,
    num_tenants: int,
    seed: int,
) -> None:
    """The messages to the workers are equal byte for byte, in runs with long outputs and any other event.

    ``rows_of_blocks``: size of the pool, in requests of 60 tokens: with few of them, requests are preempted.
    """
    shape, num_shared = LAYOUTS[layout]
    groups = layout_like(shape, window, block_size, num_shared)
    made: dict[str, Any] = {
        "layout": groups,
        "num_blocks": 1 + rows_of_blocks * len(groups.groups) * (60 // block_size + 1),
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": block_size,
        "enable_prefix_caching": caching,
        "num_speculative_tokens": drafts,
        "num_tenants": num_tenants,
    }
    run_long_outputs(seed, made)


def run_long_outputs(seed: int, made: dict[str, Any], num_requests: int = 10) -> None:
    """Run both engines with long outputs and any other event; compare tables, answers and messages to the workers."""
    steady, plain = Driver(**made), Driver(steady_decode=False, **made)
    load = Load(random.Random(seed), steady, plain)
    load.num_tenants = made["num_tenants"]
    for index in range(num_requests):
        prompt, max_tokens = [index, 7] * (index + 1), 5 + 31 * index % 100
        load.asked[f"x{index}"] = Asked(0, prompt, max_tokens, frozenset(), [])
        for driver in load.drivers:
            driver.add(f"x{index}", prompt, max_tokens=max_tokens, tenant=index % load.num_tenants)
    for _ in range(12):
        load.random_event()
        for _ in range(20):
            load.advance()
            assert tables_of(steady) == tables_of(plain)
    load.drain()
    assert steady.answers == plain.answers
    produced = [[r.frames for r in driver.log if r.kind == RecordKind.PRODUCED] for driver in load.drivers]
    assert produced[0] == produced[1]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_leaves_steady_decode_for_a_block(
    layout: str, caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, num_shared = LAYOUTS[layout]
    groups = layout_like(shape, 12, 4, num_shared)
    driver = Driver(
        layout=groups, num_blocks=1200, block_size=4, max_model_len=128, max_num_seqs=8, enable_prefix_caching=caching
    )
    joined, alone = Counter[str](), Counter[str]()
    join, one_by_one = SteadyDecode.join, SteadyBlockAllocator._allocate_one_by_one

    def count_joins(self: SteadyDecode, request: Request, *rest: int) -> None:
        joined[request.request_id] += 1
        join(self, request, *rest)

    def count_alone(self: SteadyBlockAllocator, requests: list[Request]) -> NewBlocks:
        alone.update(request.request_id for request in requests)
        return one_by_one(self, requests)

    monkeypatch.setattr(SteadyDecode, "join", count_joins)
    monkeypatch.setattr(SteadyBlockAllocator, "_allocate_one_by_one", count_alone)
    names = [f"x{index}" for index in range(6)]
    for index, name in enumerate(names):
        driver.add(name, [index] * (9 + 4 * index), max_tokens=80, ignore_eos=True)
    driver.finish()
    assert joined == dict.fromkeys(names, 1)
    if caching or layout == "full":  # after its prefill a request may free several blocks, with others due behind it
        assert max(alone.values(), default=0) <= 2


@pytest.mark.full
@pytest.mark.parametrize("layout", ["full", "two groups"])
@pytest.mark.parametrize("seed", thinned(and_slow(range(4), range(4, 20)), keep=1))
def test_tenants_lose_the_same_contents(seed: int, layout: str) -> None:
    """The pool is full of the contents of three tenants, so that each new block is taken from one of them.

    Steady decode takes the blocks of many requests at once. Each of them changes which tenant has the most.
    """
    rng = random.Random(seed)
    block_size, num_seqs = rng.choice((1, 2, 4)), rng.choice((8, 24))
    groups = layout_like(LAYOUTS[layout][0], rng.randrange(4, 20), block_size)
    made: dict[str, Any] = {
        "layout": groups,
        "num_blocks": 1 + rng.randrange(5, 12) * len(groups.groups) * (60 // block_size + 1),
        "max_model_len": 128,
        "max_num_seqs": num_seqs,
        "block_size": block_size,
        "async_scheduling": rng.random() < 0.8,
        "num_tenants": 3,
    }
    run_long_outputs(seed, made, num_requests=24)


def test_groups_that_disagree_are_found() -> None:
    driver = Driver(layout=layout_like("gemma-3-1b", 6, 4), num_blocks=200, block_size=4)
    driver.add("x", [1] * 9, max_tokens=20, ignore_eos=True)
    for _ in range(6):
        driver.step()
    check = driver.scheduler.planner.decode_blocks.check
    check()
    managers = driver.scheduler.kv.coordinator.managers
    for counts, name in ((managers[2].num_cached_block, "cached"), (managers[2].num_skipped_blocks, "skipped")):
        before = dict(counts)
        counts[0] = counts.get(0, 0) + 1
        with pytest.raises(AssertionError, match=f"{name} entries differ between KV groups"):
            check()
        counts.clear()
        counts.update(before)
    kept = next(block for block in managers[2].req_to_blocks[0] if block.block_hash)
    kept.block_hash, key = None, kept.block_hash
    with pytest.raises(AssertionError, match="contents differ between KV groups"):
        check()
    kept.block_hash = key
    managers[2].req_to_blocks[0].pop()
    with pytest.raises(AssertionError, match="blocks differ between KV groups"):
        check()


def test_waiting_request_is_not_checked_in_each_step() -> None:
    driver = Driver(max_num_seqs=1, block_size=16)
    calls: list[int] = []
    admit = driver.scheduler.planner.admit
    driver.scheduler.planner.admit = lambda *args: (calls.append(1), admit(*args))[1]  # type: ignore[method-assign]
    driver.add("a", [1], max_tokens=60)
    driver.add("b", [2], max_tokens=1)
    driver.finish()
    assert 2 <= len(calls) < 20


@pytest.mark.full
@pytest.mark.parametrize("seed", and_slow(range(200, 204), range(204, 220)))
def test_event_log_with_steady_decode_replays_with_and_without_tokens(seed: int) -> None:
    rng = random.Random(seed)
    driver = Driver(**random_settings(rng, drafts=seed % 2 == 0))
    load = Load(rng, driver)
    load.fixed_budget = True
    while len(driver.diffs) < STEPS_PER_RUN:
        load.random_event()
    load.drain()
    assert replay(driver.header, driver.log, check=True) is None
    assert driver.replay_lines() is None
