"""Long runs made short enough to draw: steps in bins of time, values in histograms, rates over time."""

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
"""A pause of more than so many steps (of the median length) is shown as a pause, not as a longer step."""


def microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def bin_steps(steps: StepColumns, max_bins: int = MAX_STEP_BINS) -> dict[str, Any]:
    """Steps as at most ``max_bins`` bins of equal time; with few enough steps each has its own.

    Returns:
        begin, end: microseconds of each bin that has a step. ``count``: its steps; None where it is one each.
        Each of STEP_COLUMNS and ``tokens``: {mean, min, max} over a bin's steps; min and max None where they are equal.
    """
    if not len(steps):
        return {"begin": [], "end": [], "count": None} | {
            name: {"mean": [], "min": None, "max": None} for name in (*STEP_COLUMNS, "tokens")
        }
    order = np.argsort(np.asarray(steps.begin), kind="stable")
    begin, end = np.asarray(steps.begin)[order], np.asarray(steps.end)[order]
    starts = _starts(begin, end, max_bins)
    sizes = np.diff(np.append(starts, len(begin)))
    columns = {name: np.asarray(getattr(steps, name), np.int64)[order] for name in STEP_COLUMNS}
    columns["tokens"] = columns["prefill_tokens"] + columns["decode_tokens"]
    return {
        "begin": _microseconds(begin[starts]),
        "end": _microseconds(_ends(begin, end, starts)),
        "count": sizes.tolist() if len(starts) < len(begin) else None,
    } | {name: _binned(values, starts, sizes) for name, values in columns.items()}


def _starts(begin: Floats, end: Floats, max_bins: int) -> npt.NDArray[np.int64]:
    """Index of each bin's first step."""
    if len(begin) <= max_bins:
        return np.arange(len(begin))
    width = max(float(end.max() - begin[0]) / max_bins, 1e-9)
    bins = np.minimum(((begin - begin[0]) / width).astype(np.int64), max_bins - 1)
    return np.flatnonzero(np.diff(bins, prepend=-1))


def _ends(begin: Floats, end: Floats, starts: npt.NDArray[np.int64]) -> Floats:
    """A bin lasts until the next, unless the engine was idle in between."""
    ends = np.maximum.reduceat(end, starts)
    following = np.append(begin[starts[1:]], ends[-1])
    idle = following - ends > _IDLE_GAP * float(np.median(end - begin))
    return np.where(idle, ends, following)


def _binned(
    values: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> dict[str, Any]:
    if len(starts) == len(values):
        return {"mean": values.tolist(), "min": None, "max": None}
    means = np.round(np.add.reduceat(values, starts) / sizes, 2)
    return {
        "mean": [int(mean) if mean.is_integer() else mean for mean in means.tolist()],
        "min": np.minimum.reduceat(values, starts).tolist(),
        "max": np.maximum.reduceat(values, starts).tolist(),
    }


def _microseconds(seconds: Floats) -> list[int]:
    return np.round(seconds * 1e6).astype(np.int64).tolist()  # type: ignore[no-any-return]


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
    """Rounded, so that another machine's last bit makes no other page."""
    positive = max(low, high * 1e-5, 1e-3)
    if high > 30 * positive:
        edges = np.geomspace(positive, high, HISTOGRAM_BINS + 1)
        return np.array([float(f"{edge:.6g}") for edge in edges]), True
    # Values that hardly differ get room enough that the axis can tell its ends apart.
    room = max(0.05 * (high - low) if high - low > 0.1 * high else 0.25 * high, 1e-4)
    edges = np.linspace(max(low - room, 0.0), high + room, HISTOGRAM_BINS + 1)
    return np.array([float(f"{edge:.6g}") for edge in edges]), False


def hit_rates(requests: Sequence[RequestRun], begin: float, end: float) -> dict[str, list[float]]:
    """Share of prompt tokens found in the prefix cache, by when a request was first let in.

    Returns:
        ``time``: microseconds, ends of bins in which somebody was let in; ``rate`` in that bin; ``total`` until then.
    """
    width = max(end - begin, 1e-6) / RATE_BINS
    sums: dict[int, tuple[int, int]] = {}
    for run in requests:
        if run.scheduled >= 0:
            at = min(int((run.scheduled - begin) / width), RATE_BINS - 1)
            hits, tokens = sums.get(at, (0, 0))
            sums[at] = hits + run.num_cached_tokens, tokens + run.num_prompt_tokens
    made: dict[str, list[float]] = {"time": [], "rate": [], "total": []}
    all_hits = all_tokens = 0
    for at, (hits, tokens) in sorted(sums.items()):
        all_hits, all_tokens = all_hits + hits, all_tokens + tokens
        made["time"].append(microseconds(begin + (at + 1) * width))
        made["rate"].append(round(hits / max(tokens, 1), 5))
        made["total"].append(round(all_hits / max(all_tokens, 1), 5))
    return made


def preemption_marks(requests: Sequence[RequestRun], end: float, max_marks: int = 600) -> list[tuple[int, int]]:
    """(microseconds, how many) preemptions; those close together in time are one mark."""
    width = max(end, 1e-6) / max_marks
    counts: dict[int, tuple[int, int]] = {}
    for run in requests:
        for moment in run.moments:
            if moment.what == "preempt":
                at, count = counts.get(int(moment.time / width), (microseconds(moment.time), 0))
                counts[int(moment.time / width)] = min(at, microseconds(moment.time)), count + 1
    return sorted(counts.values())
