"""Reduces a long run to chart data: steps in bins of time, histograms, hit rates over time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.replay.run.run_record import RequestRun, StepColumns

Floats = npt.NDArray[np.float64]
MAX_STEP_BINS = 2000
HISTOGRAM_BINS = 80
RATE_BINS = 160
STEP_COLUMNS = ("running", "waiting", "held", "cached", "free", "prefill_tokens", "decode_tokens")
_IDLE_GAP = 20
"""A pause longer than this many median steps is a gap in the chart, not a longer step."""


def microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def bin_steps(steps: StepColumns, preemptions: Sequence[float], max_bins: int = MAX_STEP_BINS) -> dict[str, Any]:
    """Return columns over at most ``max_bins`` bins of equal time; a run of few steps has one bin per step.

    A row is valid until the next one. The last row repeats the previous row at the end of the run, without preemptions.
    A pause of the engine is a row of None.

    Args:
        preemptions: seconds, in any order.

    Returns:
        ``time``: microseconds. ``count``: steps per bin, None if each bin has one. STEP_COLUMNS: means over the steps
        of a bin. ``largest``: tokens of its largest step. ``preemptions``: number of preemptions.
    """
    if not len(steps):
        return {name: [] for name in ("time", *STEP_COLUMNS, "largest", "preemptions")} | {"count": None}
    order = np.argsort(np.asarray(steps.begin), kind="stable")
    begin, end = np.asarray(steps.begin)[order], np.asarray(steps.end)[order]
    values = {name: np.asarray(getattr(steps, name), np.float64)[order] for name in STEP_COLUMNS}
    starts = _starts(begin, end, max_bins)
    sizes = np.diff(np.append(starts, len(begin)))
    binned = {name: np.add.reduceat(column, starts) / sizes for name, column in values.items()}
    binned["largest"] = np.maximum.reduceat(values["prefill_tokens"] + values["decode_tokens"], starts)
    at = np.searchsorted(begin[starts], np.asarray(preemptions, np.float64), "right") - 1
    binned["preemptions"] = np.bincount(np.maximum(at, 0), minlength=len(starts)).astype(np.float64)
    ends = np.maximum.reduceat(end, starts)
    pauses = np.flatnonzero(begin[starts[1:]] - ends[:-1] > _IDLE_GAP * float(np.median(end - begin))) + 1
    time = np.append(np.insert(begin[starts], pauses, ends[pauses - 1]), ends[-1])
    count = None if len(starts) == len(begin) else _rows(sizes.astype(np.float64), pauses)
    columns = {name: _rows(column, pauses) for name, column in binned.items()}
    columns["preemptions"][-1] = 0
    return {"time": np.round(time * 1e6).astype(np.int64).tolist(), "count": count} | columns


def _starts(begin: Floats, end: Floats, max_bins: int) -> npt.NDArray[np.int64]:
    """Return the index of each bin's first step."""
    if len(begin) <= max_bins:
        return np.arange(len(begin))
    width = max(float(end.max() - begin[0]) / max_bins, 1e-9)
    bins = np.minimum(((begin - begin[0]) / width).astype(np.int64), max_bins - 1)
    return np.flatnonzero(np.diff(bins, prepend=-1))


def _rows(column: Floats, pauses: npt.NDArray[np.int64]) -> list[float | None]:
    rows = np.round(np.append(np.insert(column, pauses, np.nan), column[-1]), 2).tolist()
    return [None if np.isnan(value) else int(value) if value.is_integer() else value for value in rows]


def histogram(name: str, label: str, runs: Sequence[Sequence[tuple[float, int]]]) -> dict[str, Any]:
    """Count (milliseconds, count) pairs of each run in bins that all runs share: logarithmic for a wide range.

    Returns:
        ``edges``: milliseconds, one more than bins. ``counts``: per run. Both are empty if no run has a value.
    """
    values = [np.array([value for value, _ in run], np.float64) for run in runs]
    weights = [np.array([count for _, count in run], np.int64) for run in runs]
    all_values = np.concatenate(values) if values else np.zeros(0)
    if not len(all_values):
        return {"name": name, "label": label, "log": False, "edges": [], "counts": [[] for _ in runs]}
    edges, log = _edges(float(all_values.min()), float(all_values.max()))
    counts = []
    for value, weight in zip(values, weights, strict=True):
        bins = np.clip(np.searchsorted(edges, value, "right") - 1, 0, len(edges) - 2)
        counts.append(np.bincount(bins, weight, len(edges) - 1).astype(np.int64).tolist())
    return {"name": name, "label": label, "log": log, "edges": edges.tolist(), "counts": counts}


def _edges(low: float, high: float) -> tuple[Floats, bool]:
    """Return edges, rounded so that floating-point differences between machines do not change the page."""
    positive = max(low, high * 1e-5, 1e-3)
    log = high > 30 * positive
    if log:
        edges = np.geomspace(positive, high, HISTOGRAM_BINS + 1)
    else:
        # For nearly equal values, widen the axis until its ends have different labels.
        room = max(0.05 * (high - low) if high - low > 0.1 * high else 0.25 * high, 1e-4)
        edges = np.linspace(max(low - room, 0.0), high + room, HISTOGRAM_BINS + 1)
    return np.array([float(f"{edge:.6g}") for edge in edges]), log


def hit_rates(requests: Sequence[RequestRun], begin: float, end: float) -> dict[str, list[float]]:
    """Return the share of prompt tokens found in the prefix cache, by time of the first admission.

    Returns:
        ``time``: microseconds, ends of the bins with an admission. ``rate``: in the bin. ``total``: up to its end.
    """
    admitted = [run for run in requests if run.scheduled >= 0]
    width = max(end - begin, 1e-6) / RATE_BINS
    at = np.minimum(((np.array([run.scheduled for run in admitted]) - begin) / width).astype(np.int64), RATE_BINS - 1)
    used, bins = np.unique(at, return_inverse=True)
    hits = np.bincount(bins, [run.num_cached_tokens for run in admitted], len(used))
    tokens = np.bincount(bins, [run.num_prompt_tokens for run in admitted], len(used))
    return {
        "time": np.round((begin + (used + 1) * width) * 1e6).astype(np.int64).tolist(),
        "rate": np.round(hits / np.maximum(tokens, 1), 5).tolist(),
        "total": np.round(np.cumsum(hits) / np.maximum(np.cumsum(tokens), 1), 5).tolist(),
    }
