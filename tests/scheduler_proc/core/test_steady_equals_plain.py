"""Steady decode changes no decision: long outputs in the layouts of known models; the simulation has other events."""

import random
from collections import Counter
from itertools import product

import pytest
from kv_cases import LAYOUTS, layout_like
from log_replay import plain_scheduler, replay
from scheduler_driver import Driver
from tiers import thinned

from quire.scheduler_proc.kv.decode_blocks import NewBlocks, SteadyBlockAllocator
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.requests.steady_decode import SteadyDecode

RUNS = [("seven groups", 0, 0), ("full", 3, 0), ("full", 0, 3)]
MORE = [(layout, drafts, tenants) for layout in LAYOUTS for drafts in (0, 3) for tenants in (0, 3)]


@pytest.mark.parametrize(
    ("layout", "drafts", "tenants"),
    [*RUNS, *(pytest.param(*run, marks=pytest.mark.full) for run in MORE if run not in RUNS)],
)
def test_long_outputs_decide_the_same(layout: str, drafts: int, tenants: int) -> None:
    """The pool is full of old contents, so that each new block is taken from one of them: with tenants, from the one
    that has the most."""
    rng = random.Random(f"{layout} {drafts} {tenants}")
    block_size = rng.choice((1, 2, 4))
    groups = layout_like(layout, rng.randrange(4, 20), block_size)
    driver = Driver(
        layout=groups,
        num_blocks=1 + 6 * len(groups.groups) * (60 // block_size + 1),
        max_model_len=128,
        max_num_seqs=8,
        block_size=block_size,
        num_speculative_tokens=drafts,
        async_scheduling=True,
        num_tenants=tenants,
    )
    for index in range(12):
        max_tokens = 5 + 31 * index % 100
        driver.add(f"x{index}", [index, 7] * (index + 1), max_tokens=max_tokens, tenant=index % (tenants or 1))
    for _ in range(250):
        driver.random_step(rng)
    driver.finish()
    assert drafts or driver.num_steady > len(driver.diffs)
    assert replay(driver.header, list(driver.log), beside=plain_scheduler(driver.header)) is None


@pytest.mark.parametrize(("layout", "caching"), thinned(product(reversed(LAYOUTS), [True, False]), keep=2))
def test_no_layout_leaves_steady_decode_for_a_block(
    layout: str, caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = layout_like(layout, 12, 4)
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


def test_groups_that_disagree_are_found() -> None:
    driver = Driver(layout=layout_like("seven groups", 6, 4), num_blocks=200, block_size=4)
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
