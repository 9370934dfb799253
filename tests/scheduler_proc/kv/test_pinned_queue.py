"""The free queue with pins: equals a naive model, and a pin never delays an allocation."""

import gc
import random
from collections.abc import Callable

import pytest
from free_queue_model import Case
from kv_cases import CacheCase, full, layout_of, sliding, step
from tiers import thinned

from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.fair_pool import FairBlockPool
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.kv.pinned_queue import PinnedFreeQueue
from quire.scheduler_proc.kv.releases import ReleaseLine, Releases

POOLS: list[Callable[..., BlockPool]] = [BlockPool, FairBlockPool]


# ---- against a model


@pytest.mark.parametrize("make", POOLS)
@pytest.mark.parametrize("seed", thinned(range(40), keep=4))
def test_random_operations_match_the_model(seed: int, make: Callable[..., BlockPool]) -> None:
    """The order of reuse, the pins and the counts, after each step. A fair pool with one tenant is the same."""
    case = Case(random.Random(seed).randint, make)
    for _ in range(120):
        case.step()


@pytest.mark.parametrize("seed", thinned(range(10), keep=2))
def test_without_pins_it_equals_the_plain_queue(seed: int) -> None:
    """The same requests find the same hits in the same blocks."""
    rng = random.Random(seed)
    kvs = [
        KVCacheManager(layout_of(full(), sliding(6)), 40, True, pool_class=pool_class)
        for pool_class in (BlockPool, lambda n, caching: BlockPool(n, caching, has_pins=True))
    ]
    running: list[list[CacheCase]] = []
    for handle in range(150):
        tokens = [*range(rng.randrange(30)), *(rng.randrange(2) for _ in range(rng.randrange(1, 20)))]
        pair = [CacheCase(handle, list(tokens)) for _ in kvs]
        new = [step(kv, request, len(tokens) // 2 + 1) for kv, request in zip(kvs, pair, strict=True)]
        if new[0] is None:
            assert new[1] is None and running
        else:
            running.append(pair)
        assert kvs[0].block_ids(pair[0])[0].tolist() == kvs[1].block_ids(pair[1])[0].tolist()
        while running and (new[0] is None or rng.random() < 0.5 or len(running) > 3):
            new[0] = []
            for kv, request in zip(kvs, running.pop(rng.randrange(len(running))), strict=True):
                kv.free(request)
        free = [[block.block_id for block in kv.pool.free_block_queue.blocks()] for kv in kvs]
        assert free[0] == free[1]


# ---- pins of requests


def managed(num_usable: int, make: Callable[..., BlockPool] = BlockPool) -> KVCacheManager:
    def pool(num_blocks: int, caching: bool) -> BlockPool:
        return make(num_blocks, caching, has_pins=True)

    return KVCacheManager(layout_of(full()), num_usable + 1, True, pool_class=pool)


def served(kv: KVCacheManager, handle: int, first: int, num_tokens: int, *, pin: int = 0, tenant: int = 0) -> int:
    """Compute and free a request of tokens ``first``, ``first + 1``, ...; return its hits in tokens."""
    request = CacheCase(handle, list(range(first, first + num_tokens)), account=tenant)
    hits = kv.get_computed_blocks(request)[1]
    assert step(kv, request, num_tokens - hits) is not None
    kv.free(request, pin=pin)
    kv.check()
    return hits


def found(kv: KVCacheManager, first: int, num_tokens: int) -> int:
    return kv.get_computed_blocks(CacheCase(99, list(range(first, first + num_tokens))))[1]


def test_a_pinned_prefix_outlives_newer_contents() -> None:
    kv = managed(12)
    served(kv, 1, 0, 17, pin=7)
    assert kv.pins == {7: 4}, "the partly filled block is not pinned"
    for handle in range(2, 9):
        served(kv, handle, handle * 100, 17)
    assert found(kv, 0, 17) == 16 and found(kv, 200, 17) == 0


def test_a_pin_ends_where_its_contents_would_be_without_it() -> None:
    kv = managed(12)
    served(kv, 1, 0, 16, pin=7)
    served(kv, 2, 100, 16)
    kv.unpin(7)
    kv.unpin(8)
    kv.check()
    assert kv.pins == {}
    served(kv, 3, 200, 28)
    assert found(kv, 0, 17) == 4 and found(kv, 100, 17) == 16, "the last blocks of the oldest request are evicted"


def test_pins_that_have_ended_leave_nothing() -> None:
    """As long as unpinned contents are evicted first, no eviction looks at the pins."""

    def num_lines() -> int:
        return sum(type(each) is ReleaseLine for each in gc.get_objects())

    kv, before = managed(40), num_lines()
    for pin in range(1, 400):
        served(kv, pin, pin * 100, 17, pin=pin)
        kv.unpin(pin - 3)
    assert num_lines() - before < 100


def test_pins_never_delay_an_allocation() -> None:
    """A request gets all blocks although all are pinned: the highest pin first, and its last block first."""
    kv = managed(8)
    served(kv, 1, 0, 16, pin=1)
    served(kv, 2, 100, 16, pin=2)
    assert kv.pool.num_free_blocks == 8
    served(kv, 3, 200, 12)
    assert kv.pins == {1: 4, 2: 1} and found(kv, 100, 17) == 4
    served(kv, 4, 300, 32)
    assert kv.pins == {} and kv.pool.num_free_blocks == 8


def test_hits_leave_a_pin_and_a_later_pin_adds_to_it() -> None:
    kv = managed(12)
    served(kv, 1, 0, 20, pin=7)
    assert served(kv, 2, 0, 13) == 12
    assert kv.pins == {7: 2}
    served(kv, 3, 0, 9, pin=7)
    assert kv.pins == {7: 4}
    kv.unpin(7)
    kv.check()
    assert kv.pins == {}


@pytest.mark.parametrize("make", POOLS)
def test_contents_that_are_lost_are_not_pinned(make: Callable[..., BlockPool]) -> None:
    kv = managed(8, make)
    served(kv, 1, 0, 16, pin=7)
    kv.invalidate(CacheCase(1, list(range(16))), 8)
    kv.check()
    assert kv.pins == {7: 2}
    kv.drop_device_contents()
    kv.check()
    assert kv.pins == {} and kv.reset_prefix_cache()
    served(kv, 2, 100, 32)


def test_a_copy_returns_to_its_pin() -> None:
    """Also if the pin was empty meanwhile; if it has ended, to where the content would be without it."""
    kv = managed(8)
    served(kv, 1, 0, 16, pin=7)
    hold = kv.holds.hold_sources(list(kv.pool.next_evicted()))
    assert kv.pins == {}
    kv.holds.end(hold)
    kv.check()
    assert kv.pins == {7: 4}
    hold = kv.holds.hold_sources(list(kv.pool.next_evicted()))
    kv.unpin(7)
    kv.holds.end(hold)
    kv.check()
    assert kv.pins == {}
    served(kv, 2, 100, 16)
    served(kv, 3, 200, 16)
    assert found(kv, 0, 17) == 0


def test_a_tenant_cannot_protect_itself_against_others_by_pins() -> None:
    """The tenant with the most blocks gives up its contents, all of which are pinned, before another tenant does."""
    kv = managed(12, FairBlockPool)
    served(kv, 1, 100, 16, tenant=1)
    served(kv, 2, 0, 32, pin=7, tenant=2)
    served(kv, 3, 200, 16, tenant=3)
    assert kv.pins == {7: 4} and found(kv, 100, 17) == 16
    served(kv, 4, 300, 32, tenant=3)
    assert found(kv, 100, 17) <= 16 and kv.pool.num_free_blocks == 12


# ---- checks


def test_check_fails_on_a_block_in_the_wrong_place() -> None:
    blocks = [KVCacheBlock(number) for number in range(6)]
    releases = Releases(6)
    queue = PinnedFreeQueue(blocks, releases)
    for block in queue.popleft_n(4):
        block.block_hash = b"%d" % block.block_id
    releases.begin(3)
    queue.append_n(blocks[:4])
    releases.end()
    queue.check()
    releases.check()
    blocks[1].block_hash = None
    with pytest.raises(AssertionError, match="without a content"):
        queue.check()
    blocks[1].block_hash = b"1"
    freed = releases.of_block[0]
    assert freed is not None
    freed.pin = 0
    for check in (queue.check, releases.check):
        with pytest.raises(AssertionError):
            check()
