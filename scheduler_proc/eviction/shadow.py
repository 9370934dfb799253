"""A shadow of both policies on a sample of the contents, which shows the hits that each of them would have."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from quire.scheduler_proc.eviction.turns import NUM_CLASSES, Turns

SAMPLE = 16
"""One of this many contents is in the sample, more in small pools."""
MIN_CAPACITY = 4096
"""Contents that a shadow can keep, if the pool has as many."""


class Shadow:
    """Simulates, for a sample of the contents, a pool with the same share of the blocks under LRU and under value.

    A content is in the sample by its hash, so that a sample hits as often as all contents do. Memory is bounded by the
    capacity.

    Attributes:
        capacity: sampled contents that each policy can keep.
        num_looked_up: sampled contents of prompts.
        num_lru_hits, num_value_hits: those of them that were found under each policy.
    """

    def __init__(self, num_contents: int, turns: Turns) -> None:
        """``num_contents``: contents that the pool can have."""
        share = max(1.0 / SAMPLE, min(1.0, MIN_CAPACITY / num_contents))
        self.capacity = max(round(num_contents * share), 1)
        self.num_looked_up = self.num_lru_hits = self.num_value_hits = 0
        self._turns = turns
        self._end = round(share * 2**16).to_bytes(3, "big")[1:] if share < 1.0 else b"\xff" * 64
        """Contents with a lower key are in the sample."""
        self._lru: OrderedDict[bytes, None] = OrderedDict()
        self._lines: list[OrderedDict[bytes, float]] = [OrderedDict() for _ in range(NUM_CLASSES)]
        """By class: contents and their last use, the oldest first."""
        self._class_of: dict[bytes, int] = {}

    def ended(
        self, hashes: Sequence[bytes], num_prompt_hashes: int, number: int, now: float
    ) -> tuple[int, int, int] | None:
        """Look up the prompt of a request and use all its contents. O(hashes).

        Args:
            hashes: of its full blocks.
            num_prompt_hashes: those that it could have found.
            number: its class.

        Returns:
            How many contents were looked up, and were found under LRU and under value; None if none is in the sample.
        """
        end = self._end
        prompt = [key for key in hashes[:num_prompt_hashes] if key < end]
        sample = prompt + [key for key in hashes[num_prompt_hashes:] if key < end]
        if not sample:
            return None
        lru = sum(1 for _ in takewhile(self._lru.__contains__, prompt))
        value = sum(1 for _ in takewhile(self._class_of.__contains__, prompt))
        self.num_looked_up += len(prompt)
        self.num_lru_hits += lru
        self.num_value_hits += value
        self._use(sample, number, now)
        return len(prompt), lru, value

    def _use(self, sample: Sequence[bytes], number: int, now: float) -> None:
        line = self._lines[number]
        for key in reversed(sample):  # the beginning is evicted last
            self._lru[key] = None
            self._lru.move_to_end(key)
            before = self._class_of.get(key)
            if before is not None:
                del self._lines[before][key]
            self._class_of[key] = number
            line[key] = now
        while len(self._lru) > self.capacity:
            self._lru.popitem(last=False)
        self._evict_by_value(now)

    def _evict_by_value(self, now: float) -> None:
        surplus = len(self._class_of) - self.capacity
        if surplus <= 0:
            return
        hazards = {at: self._hazard(at, now) for at, line in enumerate(self._lines) if line}
        for _ in range(surplus):
            lowest = min(hazards, key=hazards.__getitem__)
            key, _ = self._lines[lowest].popitem(last=False)
            del self._class_of[key]
            if self._lines[lowest]:
                hazards[lowest] = self._hazard(lowest, now)
            else:
                del hazards[lowest]

    def _hazard(self, number: int, now: float) -> float:
        return self._turns.hazard(number, now - next(iter(self._lines[number].values())))
