"""Lifetime, idle time and reuse gap of cached blocks. One block in 64 is sampled, because a step changes thousands."""

from bisect import bisect_left
from itertools import repeat

from quire.protocol.wire.front_end_messages import Histogram

SAMPLE_MASK = 63
"""A block is sampled when ``block_id & SAMPLE_MASK == 0``, so that the other blocks cost one test."""

BOUNDS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)
"""Upper bounds of the histogram buckets, in seconds."""


class Observations:
    """Counts in fixed buckets: memory use does not depend on the number of observations."""

    def __init__(self, bounds: tuple[float, ...] = BOUNDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._total += seconds

    def histogram(self) -> Histogram:
        """Return the histogram. Counts are per bucket, not cumulative."""
        return Histogram(list(self._bounds), list(self._counts), self._total)


class BlockMetrics:
    """Timestamps and histograms of the sampled blocks. The caller passes the time, and calls only for sampled blocks.

    The index of a block is its id divided by 64. Owns no blocks, only times.
    """

    def __init__(self, num_blocks: int) -> None:
        num_sampled = (num_blocks + SAMPLE_MASK) // (SAMPLE_MASK + 1)
        self._allocated = list(repeat(0.0, num_sampled))
        self._used = list(repeat(0.0, num_sampled))
        self._hit: list[float | None] = list(repeat(None, num_sampled))
        self._lifetime, self._idle_before_evict, self._reuse_gap = Observations(), Observations(), Observations()

    @property
    def lifetime(self) -> Histogram:
        """Seconds from the allocation of a block to the eviction of its content."""
        return self._lifetime.histogram()

    @property
    def idle_before_evict(self) -> Histogram:
        """Seconds from the last hit or release of a cached block to its eviction."""
        return self._idle_before_evict.histogram()

    @property
    def reuse_gap(self) -> Histogram:
        """Seconds between two consecutive hits of a cached block."""
        return self._reuse_gap.histogram()

    def allocated(self, block_id: int, now: float) -> None:
        index = block_id // (SAMPLE_MASK + 1)
        self._allocated[index] = self._used[index] = now
        self._hit[index] = None

    def hit(self, block_id: int, now: float) -> None:
        index = block_id // (SAMPLE_MASK + 1)
        before = self._hit[index]
        if before is not None:
            self._reuse_gap.observe(now - before)
        self._hit[index] = self._used[index] = now

    def released(self, block_id: int, now: float) -> None:
        self._used[block_id // (SAMPLE_MASK + 1)] = now

    def evicted(self, block_id: int, now: float) -> None:
        index = block_id // (SAMPLE_MASK + 1)
        self._lifetime.observe(now - self._allocated[index])
        self._idle_before_evict.observe(now - self._used[index])
