"""Lifetime, idle time and reuse gaps of sampled blocks, by the time that the pool's owner sets."""

import pytest

from quire.protocol.wire.front_end_messages import Histogram
from quire.scheduler_proc.kv.block_metrics import BOUNDS, SAMPLE_MASK, BlockMetrics, Observations
from quire.scheduler_proc.kv.block_pool import BlockPool

SAMPLED = 64


def seen(histogram: Histogram) -> tuple[int, float]:
    """Return the number of observations and their sum."""
    assert histogram.bounds == list(BOUNDS) and len(histogram.counts) == len(BOUNDS) + 1
    return sum(histogram.counts), histogram.total


def pool_of_one_sampled_block() -> BlockPool:
    """Return a pool of which only block 64, which is sampled, is free: blocks 1 to 63 are held."""
    pool = BlockPool(SAMPLED + 1, enable_caching=True)
    pool.get_new_blocks(SAMPLED - 1)
    return pool


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [(0.0, 0), (BOUNDS[0], 0), (BOUNDS[0] + 0.01, 1), (BOUNDS[-1], len(BOUNDS) - 1), (1e9, len(BOUNDS))],
)
def test_bucket_bounds_are_inclusive(seconds: float, bucket: int) -> None:
    observations = Observations()
    observations.observe(seconds)
    histogram = observations.histogram()
    assert histogram.counts == [int(i == bucket) for i in range(len(BOUNDS) + 1)]
    assert histogram.total == seconds and list(BOUNDS) == sorted(BOUNDS)


def test_a_histogram_is_a_copy() -> None:
    observations = Observations()
    before = observations.histogram()
    observations.observe(1.0)
    assert seen(before) == (0, 0.0) and seen(observations.histogram()) == (1, 1.0)


def test_lifetime_idle_time_and_reuse_gaps_of_a_cached_block() -> None:
    """Allocated at 10, released at 15, hit at 20, 50 and 51, released at 60, evicted at 100."""
    pool = pool_of_one_sampled_block()
    pool.now = 10.0
    block = pool.get_new_blocks(1)
    assert block[0].block_id == SAMPLED
    pool.cache_full_blocks([block[0]], [b"a"])
    pool.now = 15.0
    pool.free_blocks(block)
    for now in (20.0, 50.0, 51.0):
        pool.now = now
        pool.touch(block)
    pool.now = 60.0
    for _ in range(3):
        pool.free_blocks(block)
    assert seen(pool.metrics.lifetime) == seen(pool.metrics.idle_before_evict) == (0, 0.0)
    pool.now = 100.0
    pool.get_new_blocks(1)
    assert seen(pool.metrics.lifetime) == (1, 90.0)
    assert seen(pool.metrics.idle_before_evict) == (1, 40.0)
    assert seen(pool.metrics.reuse_gap) == (2, 31.0)


def test_metrics_restart_with_the_next_content_of_a_block() -> None:
    pool = pool_of_one_sampled_block()
    block = pool.get_new_blocks(1)
    pool.cache_full_blocks([block[0]], [b"a"])
    pool.touch(block)
    for _ in range(2):
        pool.free_blocks(block)
    pool.now = 7.0
    pool.cache_full_blocks([pool.get_new_blocks(1)[0]], [b"b"])
    pool.now = 9.0
    pool.touch(block)
    assert seen(pool.metrics.reuse_gap) == (0, 0.0)
    for _ in range(2):
        pool.free_blocks(block)
    pool.now = 10.0
    pool.get_new_blocks(1)
    assert seen(pool.metrics.lifetime) == (2, 7.0 + 3.0)
    assert seen(pool.metrics.idle_before_evict) == (2, 7.0 + 1.0)


def test_uncached_content_is_not_observed() -> None:
    pool = pool_of_one_sampled_block()
    block = pool.get_new_blocks(1)
    pool.free_blocks(block)
    pool.now = 5.0
    pool.cache_full_blocks([pool.get_new_blocks(1)[0]], [b"a"])
    pool.invalidate(b"a")
    pool.free_blocks(block)
    pool.get_new_blocks(1)
    assert seen(pool.metrics.lifetime) == seen(pool.metrics.idle_before_evict) == (0, 0.0)


def test_one_block_in_64_is_sampled() -> None:
    pool = BlockPool(3 * 64 + 1, enable_caching=True)
    blocks = pool.get_new_blocks(3 * 64)
    for block in blocks:
        pool.cache_full_blocks([block], [bytes([block.block_id])])
    pool.free_blocks(blocks)
    pool.get_new_blocks(3 * 64)
    assert SAMPLE_MASK == 63 and seen(pool.metrics.lifetime) == (3, 0.0)
    assert pool.num_evicted_blocks == 3 * 64


def test_the_last_sampled_block_is_recorded() -> None:
    for num_blocks in (1, 64, 65, 128, 129):
        BlockMetrics(num_blocks).allocated((num_blocks - 1) // 64 * 64, 1.0)
