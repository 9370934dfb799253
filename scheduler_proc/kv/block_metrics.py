"""How long contents stay, lie unused and come back: of one block in 64, for a step touches thousands."""

from bisect import bisect_left
from itertools import repeat

from quire.protocol.wire.front_end_messages import Histogram

SAMPLE_MASK = 63
"""A block is sampled when its id has none of these bits: then the cost for the others is one test."""

BOUNDS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)
"""Seconds."""


class Observations:
    """Counts in fixed buckets: the memory does not grow with what is observed."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._total += seconds

    def histogram(self) -> Histogram:
        """Each count is of its own bucket; they do not add up from the left."""
        return Histogram(list(BOUNDS), list(self._counts), self._total)


class BlockMetrics:
    """Stamps and histograms of the sampled blocks; the caller passes the time and sees to the sampling.

    A block's slot is its id divided by 64. Owns no block, and holds nothing but times of those it is told of.
    """

    def __init__(self, num_blocks: int) -> None:
        num_sampled = (num_blocks + SAMPLE_MASK) // (SAMPLE_MASK + 1)
        self._allocated = list(repeat(0.0, num_sampled))
        self._used = list(repeat(0.0, num_sampled))
        self._hit: list[float | None] = list(repeat(None, num_sampled))
        self._lifetime, self._idle_before_evict, self._reuse_gap = Observations(), Observations(), Observations()

    @property
    def lifetime(self) -> Histogram:
        """Seconds from the allocation of a block to the loss of the content that it then got."""
        return self._lifetime.histogram()

    @property
    def idle_before_evict(self) -> Histogram:
        """Seconds from the last hit or release of a content to its loss."""
        return self._idle_before_evict.histogram()

    @property
    def reuse_gap(self) -> Histogram:
        """Seconds between a hit and the next one on the same content."""
        return self._reuse_gap.histogram()

    def allocated(self, block_id: int, now: float) -> None:
        slot = block_id // (SAMPLE_MASK + 1)
        self._allocated[slot] = self._used[slot] = now
        self._hit[slot] = None

    def hit(self, block_id: int, now: float) -> None:
        slot = block_id // (SAMPLE_MASK + 1)
        before = self._hit[slot]
        if before is not None:
            self._reuse_gap.observe(now - before)
        self._hit[slot] = self._used[slot] = now

    def released(self, block_id: int, now: float) -> None:
        self._used[block_id // (SAMPLE_MASK + 1)] = now

    def evicted(self, block_id: int, now: float) -> None:
        slot = block_id // (SAMPLE_MASK + 1)
        self._lifetime.observe(now - self._allocated[slot])
        self._idle_before_evict.observe(now - self._used[slot])
