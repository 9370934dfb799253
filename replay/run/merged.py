"""The records of several engines of one run as one record."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from quire.replay.run.run_record import RunRecord


def merge_engines(record: RunRecord, engines: Sequence[RunRecord], choices: Mapping[str, int]) -> None:
    """Add the runs of several engines to ``record``, in order of time. ``extra["engines"]`` has each one's figures.

    Args:
        choices: number of routed requests by reason.
    """
    record.requests = sorted((run for each in engines for run in each.requests), key=lambda run: run.arrival)
    _merge_steps(record, engines)
    for name in ("preemptions_by_reason", "evictions_by_policy"):
        setattr(record, name, _sum(getattr(each, name) for each in engines))
    record.num_evicted_blocks = sum(each.num_evicted_blocks for each in engines)
    for name in engines[0].tiers:
        record.tiers[name] = _sum(each.tiers[name] for each in engines)
    record.pins = _merge_pins([each.pins for each in engines if each.pins])
    limits = [each.program_limit for each in engines if each.program_limit]
    if limits:
        admitted = sum(each["admitted"] for each in limits)
        record.program_limit = {"admitted": admitted, "released": _sum(each["released"] for each in limits)}
    gaps: Counter[float] = Counter()
    for each in engines:
        gaps.update(dict(each.itl))
    record.itl = sorted(gaps.items())
    record.virtual_s = engines[0].virtual_s
    record.extra["engines"] = _figures(engines, choices)


def _figures(engines: Sequence[RunRecord], choices: Mapping[str, int]) -> dict[str, Any]:
    """Return the figures of each engine and of the balance between them."""
    each = []
    for engine in engines:
        asked = sum(run.num_prompt_tokens for run in engine.requests)
        hits = sum(run.num_cached_tokens for run in engine.requests)
        computed = sum(engine.steps.prefill_tokens) + sum(engine.steps.decode_tokens)
        rate = hits / asked if asked else None
        each.append({"requests": len(engine.requests), "computed_tokens": computed, "hit_rate": rate})
    computed_by = [figures["computed_tokens"] or 0 for figures in each]
    mean = sum(computed_by) / len(computed_by)
    busiest = max(computed_by) / mean if mean else None
    return {"each": each, "busiest_over_mean": busiest, "choices": dict(sorted(choices.items()))}


def _merge_steps(record: RunRecord, engines: Sequence[RunRecord]) -> None:
    steps = sorted(
        (begin, number, place) for number, each in enumerate(engines) for place, begin in enumerate(each.steps.begin)
    )
    for name in type(record.steps).__slots__:
        columns = [getattr(each.steps, name) for each in engines]
        getattr(record.steps, name).extend(columns[number][place] for _, number, place in steps)


def _merge_pins(pins: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not pins:
        return {}
    seconds = {tool: chosen for each in pins for tool, chosen in each["seconds"].items()}
    failures = sum(each["failures"] for each in pins)
    return {"ended": _sum(each["ended"] for each in pins), "seconds": seconds, "failures": failures}


def _sum(counts: Any) -> dict[str, Any]:
    """Return the sum of mappings, key by key."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)
