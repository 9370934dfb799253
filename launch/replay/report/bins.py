"""Reductions of a long run to what a chart can show: steps in bins of time, histograms, hit rates over time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.launch.replay.run.run_record import RequestRun, StepColumns

Floats = npt.NDArray[np.float64]
MAX_STEP_BINS = 2000
HISTOGRAM_BINS = 80
RATE_BINS = 160
STEP_COLUMNS = ("running", "waiting", "held", "cached", "free", "prefill_tokens", "decode_tokens")
_IDLE_GAP = 20
"""A pause of more than so many steps (of the median length) is a gap in the chart, not a longer step."""


def microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def bin_steps(steps: StepColumns, preemptions: Sequence[float], max_bins: int = MAX_STEP_BINS) -> dict[str, Any]:
    """Columns over at most ``max_bins`` bins of equal time; a run of few steps has one bin per step.

    A row holds until the next. The last row repeats the one before it, at the end of the run and without preemptions.
    A pause of the engine is a row of None.

    Args:
        preemptions: seconds, in any order.

    Returns:
        ``time``: microseconds. ``count``: steps of each bin, None where each has one. STEP_COLUMNS: means over the
        steps of a bin. ``largest``: the tokens of its largest step. ``preemptions``: how many it had.
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
    """Index of each bin's first step."""
    if len(begin) <= max_bins:
        return np.arange(len(begin))
    width = max(float(end.max() - begin[0]) / max_bins, 1e-9)
    bins = np.minimum(((begin - begin[0]) / width).astype(np.int64), max_bins - 1)
    return np.flatnonzero(np.diff(bins, prepend=-1))


def _rows(column: Floats, pauses: npt.NDArray[np.int64]) -> list[float | None]:
    rows = np.round(np.append(np.insert(column, pauses, np.nan), column[-1]), 2).tolist()
    return [None if np.isnan(value) else int(value) if value.is_integer() else value for value in rows]


def histogram(name: str, label: str, runs: Sequence[Sequence[tuple[float, int]]]) -> dict[str, Any]:
    """(milliseconds, how often) pairs of each run in bins that the runs share: logarithmic where they span much.

    Returns:
        ``edges``: one more than bins, milliseconds. ``counts``: per run. Empty lists where no run has a value.
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
    """Rounded, so that the last bit of another machine's floats does not change the page."""
    positive = max(low, high * 1e-5, 1e-3)
    log = high > 30 * positive
    if log:
        edges = np.geomspace(positive, high, HISTOGRAM_BINS + 1)
    else:
        # Values that hardly differ get an axis wide enough that its ends have different labels.
        room = max(0.05 * (high - low) if high - low > 0.1 * high else 0.25 * high, 1e-4)
        edges = np.linspace(max(low - room, 0.0), high + room, HISTOGRAM_BINS + 1)
    return np.array([float(f"{edge:.6g}") for edge in edges]), log


def hit_rates(requests: Sequence[RequestRun], begin: float, end: float) -> dict[str, list[float]]:
    """Share of prompt tokens found in the prefix cache, by the time of a request's first admission.

    Returns:
        ``time``: microseconds, ends of bins with an admission; ``rate`` in that bin; ``total`` until its end.
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
