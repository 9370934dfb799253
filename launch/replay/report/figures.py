"""Figures that all reports share, so that they agree: percentiles, latencies, counts."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from quire.launch.replay.run.run_record import RequestRun, RunRecord

UNSUCCESSFUL = ("", "rejected", "abort", "error")
"""Values of ``RequestRun.finish`` that exclude a request from all latencies; empty: unfinished."""


class Latency(NamedTuple):
    """Latencies of one request in milliseconds; None if undefined.

    Attributes:
        ttft: from arrival to the first token.
        tpot: mean time between tokens after the first; None for a single output token.
        e2e: from arrival to the end.
        queue: from arrival to the first admission; None in a live run, whose client cannot measure it.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    queue: float | None = None


def latency(run: RequestRun) -> Latency:
    """Return the latencies of a request, all None if it was rejected, failed, aborted or unfinished."""
    if run.finish in UNSUCCESSFUL or run.first_token < 0:
        return Latency()
    gaps = run.num_output_tokens - 1
    return Latency(
        (run.first_token - run.arrival) * 1e3,
        (run.end - run.first_token) * 1e3 / gaps if gaps > 0 else None,
        (run.end - run.arrival) * 1e3,
        (run.scheduled - run.arrival) * 1e3 if run.scheduled >= 0 else None,
    )


def sorted_latencies(record: RunRecord) -> dict[str, list[float]]:
    """Return ttft, tpot, e2e and queue in milliseconds, ascending, of all requests that have them."""
    found = [latency(run) for run in record.requests]
    return {
        name: sorted(value for value in (each[i] for each in found) if value is not None)
        for i, name in enumerate(Latency._fields)
    }


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


def conversation_seconds(record: RunRecord) -> list[float]:
    """Return the seconds from the first arrival to the last end of each conversation, ascending.

    A conversation with a request that did not succeed is left out.
    """
    spans: dict[str, tuple[float, float]] = {}
    failed = set()
    for run in record.requests:
        begin, end = spans.get(run.conversation, (run.arrival, run.end))
        spans[run.conversation] = min(begin, run.arrival), max(end, run.end)
        if run.finish in UNSUCCESSFUL:
            failed.add(run.conversation)
    return sorted(end - begin for name, (begin, end) in spans.items() if name and name not in failed)


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
