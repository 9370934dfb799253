"""Whether a request loads what was found for it beyond the device, computes it, or both at the same time."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quire.scheduler_proc.costs.costs import Costs, Prefill

LOAD_LIMIT_S, MIN_LIMIT_S = 5.0, 0.2
"""Time after which a load is late while nothing is known, and its least value when something is."""
MESSAGES_S = 5e-4
"""A load must save this time, which its messages take."""
SPLIT_GAIN = 0.9
"""A split must take at most this part of the better of the others. It also loses a step, to join its load."""


class Prefix(NamedTuple):
    """What was found for a waiting request, in tokens from its start.

    Attributes:
        hit_tokens: found on the device.
        found_tokens: found on the device or beyond it.
        num_tokens: known tokens; those after ``found_tokens`` are computed in any case.
        pages: by tier, the index of the block of each page to load, ascending.
        block_size: tokens per index; 0 if the layout allows no split.
    """

    hit_tokens: int
    found_tokens: int
    num_tokens: int
    pages: Mapping[str, Sequence[int]]
    block_size: int


class WorkAhead(NamedTuple):
    """What is ahead of the request.

    Attributes:
        prefill: positions of running requests that are not computed.
        step_tokens, rows: see ``Costs.prefill_seconds``.
        load_seconds: time that the loads in flight take.
    """

    prefill: Prefill
    step_tokens: int
    rows: int
    load_seconds: float


class LoadChoice(NamedTuple):
    """The choice for one request.

    Attributes:
        kind: load, compute or split.
        front: tokens that a split request computes; it loads all pages after them. 0 if it is not split.
        load_seconds, compute_seconds: expected time to the end of its prefill; 0 while nothing is known.
        limit_s: time after which the load is late: in which the request would have computed what it loads.
        pages_seconds: expected time of the load, without that of loads before it.
        found: what was found for the request.
    """

    kind: str
    front: int = 0
    load_seconds: float = 0.0
    compute_seconds: float = 0.0
    limit_s: float = LOAD_LIMIT_S
    pages_seconds: float = 0.0
    found: Prefix = Prefix(0, 0, 0, {}, 0)

    def num_loaded(self, num_hit_tokens: int) -> int:
        """Return how many of the tokens that the request has found on the device were loaded for it."""
        first = self.found.found_tokens if self.kind == "compute" else self.front or self.found.hit_tokens
        return max(min(num_hit_tokens, self.found.found_tokens) - first, 0)

    def __str__(self) -> str:
        return f"loading would take {self.load_seconds:.2g} s, computing {self.compute_seconds:.2g} s"


def choose(costs: Costs, found: Prefix, queue: WorkAhead) -> LoadChoice:
    """Return what lets the request complete its prefill first. While a cost is unknown, it loads."""
    if not costs.knows({tier: len(indices) for tier, indices in found.pages.items()}):
        return LoadChoice("load")

    def computed(end: int) -> float:
        """Return when the tokens up to ``end`` are computed."""
        prefill = queue.prefill + Prefill.between(found.hit_tokens, end)
        return costs.prefill_seconds(prefill, queue.step_tokens, queue.rows)

    def loaded(index: int) -> float:
        """Return when the pages of the blocks from ``index`` on are loaded."""
        counts = {tier: len(indices) - bisect_left(indices, index) for tier, indices in found.pages.items()}
        return queue.load_seconds + costs.load_seconds(counts)

    rest = costs.prefill_seconds(Prefill.between(found.found_tokens, found.num_tokens), queue.step_tokens, queue.rows)
    # Loads and steps run beside each other, so the later of both counts, and not their sum.
    load, compute = max(loaded(0), computed(found.hit_tokens)) + rest, computed(found.num_tokens)
    estimates = load, compute, max(computed(found.found_tokens), MIN_LIMIT_S)
    if size := found.block_size:
        fronts = range(found.hit_tokens // size + 1, found.found_tokens // size)
        # Computing from the front takes longer with each block and loading the rest less, so that the best split is
        # where they meet.
        at = bisect_left(fronts, True, key=lambda index: computed(index * size) >= loaded(index))
        around = fronts[max(at - 1, 0) : at + 1]  # the last that is computed before the rest is loaded, and the next
        # At the end of its front the request returns to the queue, which costs it about one step.
        lost = costs.prefill_seconds(Prefill(1), queue.step_tokens, queue.rows)
        splits = [(max(computed(index * size) + lost, loaded(index)) + rest, index) for index in around]
        split, front = min(splits, default=(math.inf, 0))
        # Estimates are uncertain by some percent, and a split pays for two ways: it must be clearly better.
        if split < SPLIT_GAIN * min(load, compute):
            return LoadChoice("split", front * size, *estimates, loaded(front) - queue.load_seconds)
    if load + MESSAGES_S <= compute:
        return LoadChoice("load", 0, *estimates, loaded(0) - queue.load_seconds)
    return LoadChoice("compute", 0, *estimates)
