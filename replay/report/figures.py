"""Figures that all reports share, so that they agree: percentiles, latencies, counts."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from quire.replay.run.run_record import RequestRun, RunRecord

UNSUCCESSFUL = ("", "rejected", "abort", "error")
"""Values of ``RequestRun.finish`` that exclude a request from all latencies; empty: unfinished."""


class Latency(NamedTuple):
    """Latencies of one request in milliseconds; None if undefined.

    Attributes:
        ttft: from arrival to the first token.
        tpot: mean time between tokens after the first; None for a single output token.
        e2e: from arrival to the end, also of a pooled request, which has no token.
        queue: from arrival to the first admission; None in a live run, whose client cannot measure it.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    queue: float | None = None


def latency(run: RequestRun) -> Latency:
    """Return the latencies of a request, all None if it was rejected, failed, aborted or unfinished."""
    if run.finish in UNSUCCESSFUL or run.end < 0:
        return Latency()
    e2e = (run.end - run.arrival) * 1e3
    queue = (run.scheduled - run.arrival) * 1e3 if run.scheduled >= 0 else None
    if run.first_token < 0:
        return Latency(e2e=e2e, queue=queue)
    gaps = run.num_output_tokens - 1
    return Latency(
        (run.first_token - run.arrival) * 1e3,
        (run.end - run.first_token) * 1e3 / gaps if gaps > 0 else None,
        e2e,
        queue,
    )


def sorted_latencies(record: RunRecord) -> dict[str, list[float]]:
    """Return ttft, tpot, e2e and queue in milliseconds, ascending, of all requests that have them."""
    found = [latency(run) for run in record.requests]
    return {
        name: sorted(value for value in (each[i] for each in found) if value is not None)
        for i, name in enumerate(Latency._fields)
    }


def attained_share(record: RunRecord, targets: Mapping[str, float]) -> float | None:
    """Return the share of all requests that met all targets; None without a request.

    A request without such a latency meets the target if it succeeded; a rejected or failed one misses it.

    Args:
        targets: most seconds by name of a latency.
    """
    if not record.requests:
        return None
    return sum(_meets(run, targets) for run in record.requests) / len(record.requests)


def _meets(run: RequestRun, targets: Mapping[str, float]) -> bool:
    found = latency(run)
    if found.e2e is None:
        return False
    values = {name: getattr(found, name) for name in targets}
    return all(values[name] is None or values[name] <= targets[name] * 1e3 for name in targets)


def spread(sorted_values: Sequence[float]) -> dict[str, float | None]:
    """Return mean, p50, p90 and p99, all None if there are no values."""
    return weighted_spread([(value, 1) for value in sorted_values])


class PrefixCache(NamedTuple):
    """Prefix cache hits of all requests. Rejected requests count as input tokens without a hit."""

    hit_tokens: int
    hit_blocks: int
    requests_with_hit: int
    input_tokens: int

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


def prefix_cache(record: RunRecord) -> PrefixCache:
    """Return the hits at first admissions: hits after a preemption are the request's own blocks and do not count."""
    hit_tokens = sum(run.num_cached_tokens for run in record.requests)
    return PrefixCache(
        hit_tokens,
        hit_tokens // record.block_size if record.block_size else 0,
        sum(run.num_cached_tokens > 0 for run in record.requests),
        sum(run.num_prompt_tokens for run in record.requests),
    )


class Conversations(NamedTuple):
    """Figures of the conversations of which each request succeeded.

    Attributes:
        seconds: from the first arrival to the last end of each, ascending.
        first_waits: seconds until the first turn of each was admitted, ascending; empty for a live run.
        hit_tokens, input_tokens: prompt tokens of all turns but the first, and those from the prefix cache.
    """

    seconds: list[float]
    first_waits: list[float]
    hit_tokens: int
    input_tokens: int


def conversations(record: RunRecord) -> Conversations:
    by_name: dict[str, list[RequestRun]] = {}
    for run in record.requests:
        if run.conversation:
            by_name.setdefault(run.conversation, []).append(run)
    turns = [each for each in by_name.values() if not any(run.finish in UNSUCCESSFUL for run in each)]
    firsts = [min(each, key=attrgetter("arrival")) for each in turns]
    later = [run for each, first in zip(turns, firsts, strict=True) for run in each if run is not first]
    return Conversations(
        sorted(max(run.end for run in each) - first.arrival for each, first in zip(turns, firsts, strict=True)),
        sorted(run.scheduled - run.arrival for run in firsts if run.scheduled >= 0),
        sum(run.num_cached_tokens for run in later),
        sum(run.num_prompt_tokens for run in later),
    )


def weighted_percentile(sorted_counts: Sequence[tuple[float, int]], q: float) -> float:
    """Return the nearest-rank percentile: the smallest value that at least ``q`` percent of all do not exceed.

    Args:
        sorted_counts: (value, count) in ascending order; not empty.
        q: 0 to 100; 0 gives the smallest.
    """
    counts = list(accumulate(count for _, count in sorted_counts))
    # Round, because a product slightly above a whole number would select the next rank.
    rank = math.ceil(round(q * counts[-1] / 100, 9))
    return sorted_counts[bisect_left(counts, max(rank, 1))][0]


def weighted_spread(sorted_counts: Sequence[tuple[float, int]]) -> dict[str, float | None]:
    """Return ``spread`` of (value, count) pairs in ascending order."""
    if not sorted_counts:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    mean = math.fsum(value * count for value, count in sorted_counts) / sum(count for _, count in sorted_counts)
    return {"mean": mean, **{f"p{q}": weighted_percentile(sorted_counts, q) for q in (50, 90, 99)}}


def long_spread(sorted_values: Sequence[float]) -> dict[str, float | None]:
    """Return ``spread``, and p95 and max: for figures whose longest values matter."""
    counts = [(value, 1) for value in sorted_values]
    ends = {"p95": weighted_percentile(counts, 95), "max": sorted_values[-1]} if counts else {"p95": None, "max": None}
    return {**weighted_spread(counts), **ends}
