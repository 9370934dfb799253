"""Figures of a run as JSON and as short tables."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from quire.bench.measure.report import Table, rounded
from quire.replay.report.figures import (
    conversations,
    long_spread,
    prefix_cache,
    sorted_latencies,
    spread,
    weighted_spread,
)
from quire.replay.run.run_record import RunRecord

SPREAD = ("mean", "p50", "p90", "p99")
LATENCY_WORDS = {
    "ttft": "time to first token, ms",
    "tpot": "time per output token, ms",
    "itl": "inter-token latency, ms",
    "e2e": "end-to-end latency, ms",
    "queue": "time in queue, ms",
}


def summary(record: RunRecord) -> dict[str, Any]:
    """Return all figures of a run as JSON types.

    ``prefix_cache`` counts each request once, at its first admission; its ``input_tokens`` include rejected requests.
    ``latency_ms`` covers successful requests; percentiles are nearest-rank. A figure is null if it has no values or if
    the client of a live run cannot measure it. When a run is repeated, only ``wall_s`` and ``speedup`` differ.
    """
    runs = record.requests
    inside = record.block_size > 0  # the client of a live run sees neither blocks nor steps
    jobs = conversations(record)
    finishes = Counter(run.finish or "unfinished" for run in runs)
    figures: dict[str, Any] = {
        "title": record.title,
        "source": record.source,
        "cost": record.cost,
        "settings": record.settings,
        "block_size": record.block_size,
        "num_usable_blocks": record.num_usable_blocks,
        "requests": len(runs),
        "rejected": finishes["rejected"],
        "rejected_reasons": _rejections(record),
        "finish_reasons": dict(sorted(finishes.items())),
        "prefix_cache": _prefix_cache(record),
        "preemptions": sum(run.num_preemptions for run in runs) if inside else None,
        "preemptions_by_reason": dict(record.preemptions_by_reason),
        "recomputed_tokens": sum(run.num_recomputed_tokens for run in runs) if inside else None,
        "loaded_tokens": sum(run.num_loaded_tokens for run in runs) if inside else None,
        "evicted_blocks": record.num_evicted_blocks if inside else None,
        "evicted_by_policy": dict(record.evictions_by_policy),
        "tiers": {name: {"hit_tokens": None} | tier for name, tier in record.tiers.items()},
        "pins": dict(record.pins),
        "program_limit": dict(record.program_limit),
        "output_tokens": sum(run.num_output_tokens for run in runs),
        "latency_ms": {name: spread(values) for name, values in sorted_latencies(record).items()},
        "conversation_s": long_spread(jobs.seconds),
        "first_turn_wait_s": long_spread(jobs.first_waits),
        "later_turns_hit_rate": _ratio(jobs.hit_tokens, jobs.input_tokens),
        "throughput": _throughput(record),
        "virtual_s": record.virtual_s,
        "wall_s": record.wall_s,
        "speedup": _ratio(record.virtual_s, record.wall_s),
        "steps": len(record.steps) if inside else None,
        "step_ms": _step_milliseconds(record),
        "decisions_equal": record.decisions_equal,
        "first_difference": record.first_difference,
        "notes": list(record.notes),
    }
    figures["latency_ms"]["itl"] = weighted_spread(record.itl)
    found: dict[str, Any] = rounded({**record.extra, **figures})
    return found


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Return the tables of ``found``, the result of ``summary``."""
    latencies = found["latency_ms"]
    rows = [
        (words, [latencies[name][column] for column in SPREAD])
        for name, words in LATENCY_WORDS.items()
        if latencies[name]["mean"] is not None
    ]
    made = [Table("latency", SPREAD, rows)] if rows else []
    if found["tiers"]:
        made.append(tier_table(found["tiers"]))
    if "engines" in found:
        made += engine_tables(found["engines"])
    made += pin_tables(found["pins"])
    return [*made, Table("run", ("",), [(label, [value]) for label, value in _totals(found)])]


TIER_COLUMNS = {
    "hit tokens": "hit_tokens",
    "loaded": "num_loaded",
    "stored": "num_stored",
    "evicted": "num_evicted",
    "not saved": "num_unsaved",
    "failed": "num_failed",
    "late loads": "num_late",
    "load s": "load_seconds",
    "store s": "store_seconds",
}
"""Columns of the table of tiers, and the keys of ``tiers`` in the JSON. Counts without a unit are blocks."""


def tier_table(tiers: Mapping[str, Any]) -> Table:
    """Return a row for each tier of the prefix cache beyond the device."""
    rows = [(name, [tier[key] for key in TIER_COLUMNS.values()]) for name, tier in tiers.items()]
    return Table("tier", tuple(TIER_COLUMNS), rows)


def engine_tables(engines: Mapping[str, Any]) -> list[Table]:
    """Return a row for each of several engines, and how requests were routed to them."""
    rows = [
        (f"engine {number}", [each["requests"], each["computed_tokens"], percent(each["hit_rate"])])
        for number, each in enumerate(engines["each"])
    ]
    choices = [(f"routed by {reason}", [count]) for reason, count in engines["choices"].items()]
    balance = ("tokens computed, busiest over mean", [engines["busiest_over_mean"]])
    columns = ("requests", "tokens computed", "hit rate")
    return [Table("engine", columns, rows), Table("routing", ("",), [balance, *choices])]


def percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.2%}"


def pin_tables(pins: Mapping[str, Any]) -> list[Table]:
    """Return how the blocks of programs were kept while their tools ran; empty if they were not."""
    if not pins:
        return []
    ended = Table("pins", ("",), [(reason, [number]) for reason, number in pins["ended"].items()])
    seconds = [(tool, [chosen]) for tool, chosen in pins["seconds"].items()]
    return [ended, Table("blocks kept last, by tool", ("s",), seconds)]


def side_by_side(first: Mapping[str, Any], second: Mapping[str, Any]) -> Table:
    """Return a table of two runs' summaries."""
    columns = ("first mean", "second mean", "first p99", "second p99")
    rows = []
    for name, words in LATENCY_WORDS.items():
        pair = (first["latency_ms"][name], second["latency_ms"][name])
        rows.append((words, [each[column] for column in ("mean", "p99") for each in pair]))
    return Table("latency", columns, rows)


def by_run(found: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """Return tables of the means and the 99th percentiles of several runs' summaries by name."""
    latencies = {name: figures["latency_ms"] for name, figures in found.items()}
    made = []
    for column in ("mean", "p99"):
        rows = [
            (words, [each[name][column] for each in latencies.values()])
            for name, words in LATENCY_WORDS.items()
            if any(each[name][column] is not None for each in latencies.values())
        ]
        made.append(Table(f"latency, {column}", tuple(found), rows))
    return made


SWEEP_COLUMNS = (
    *("hit rate", "rejected", "preempted", "ttft p50", "ttft p99", "tpot p50", "tpot p99", "e2e p50"),
    *("output tokens/s", "seconds"),
)


def sweep_cells(found: Mapping[str, Any] | None) -> list[float | str | None]:
    """Return the row of one run in a sweep's table; ``found`` is None if the run failed. Latencies in milliseconds."""
    if found is None:
        return ["failed", *[None] * (len(SWEEP_COLUMNS) - 1)]
    ttft, tpot, e2e = (found["latency_ms"][name] for name in ("ttft", "tpot", "e2e"))
    return [
        f"{found['prefix_cache']['hit_rate']:.2%}",
        *(found["rejected"], found["preemptions"]),
        *(ttft["p50"], ttft["p99"], tpot["p50"], tpot["p99"], e2e["p50"]),
        *(found["throughput"]["output_tokens_per_s"], found["virtual_s"]),
    ]


def _totals(found: Mapping[str, Any]) -> list[tuple[str, float | str | None]]:
    cache, throughput = found["prefix_cache"], found["throughput"]
    hits = f"{cache['hit_tokens']:,} of {cache['input_tokens']:,} ({cache['hit_rate']:.2%})"
    totals = [
        ("requests", found["requests"]),
        ("rejected", found["rejected"]),
        *((f"  {reason}", count) for reason, count in found["rejected_reasons"].items()),
        ("prompt tokens from the prefix cache", hits),
        ("requests with a hit", cache["requests_with_hit"]),
        *_program_totals(found.get("programs")),
        ("preemptions", found["preemptions"]),
        *((f"  {reason}", count) for reason, count in found["preemptions_by_reason"].items()),
        ("tokens recomputed after preemptions", found["recomputed_tokens"]),
        *([("tokens loaded from host memory or disk", found["loaded_tokens"])] if found["tiers"] else ()),
        *_conversations(found),
        *((f"programs released, {why}", n) for why, n in found["program_limit"].get("released", {}).items()),
        *((f"blocks evicted, {policy}", count) for policy, count in found["evicted_by_policy"].items()),
        ("requests/s", throughput["requests_per_s"]),
        ("output tokens/s", throughput["output_tokens_per_s"]),
        ("duration of the run, s", found["virtual_s"]),
    ]
    if found["steps"]:  # a live run has no steps, and its clock is real time
        totals.append(("steps", found["steps"]))
        totals.append(("duration of the replay, s", found["wall_s"]))
        totals.append(("speed-up over real time", found["speedup"]))
    return totals


ENGINE_COLUMNS = ("hit rate", "computed tokens", "busiest over mean", "ttft mean", "ttft p99", "e2e mean", "choices")


def engine_cells(found: Mapping[str, Any] | None) -> list[float | str | None]:
    """Return the row of one run in a sweep's table of engines; ``found`` is None if the run failed."""
    if found is None:
        return ["failed", *[None] * (len(ENGINE_COLUMNS) - 1)]
    engines, latency = found.get("engines"), found["latency_ms"]
    choices = ", ".join(f"{reason} {count}" for reason, count in engines["choices"].items()) if engines else None
    computed = sum(each["computed_tokens"] for each in engines["each"]) if engines else None
    return [
        percent(found["prefix_cache"]["hit_rate"]),
        *(computed, engines["busiest_over_mean"] if engines else None),
        *(latency["ttft"]["mean"], latency["ttft"]["p99"], latency["e2e"]["mean"]),
        choices,
    ]


def _conversations(found: Mapping[str, Any]) -> list[tuple[str, float | str | None]]:
    seconds, waits, rate = found["conversation_s"], found["first_turn_wait_s"], found["later_turns_hit_rate"]
    rows = [(f"duration of a conversation, {at}, s", seconds[at]) for at in ("mean", "p50", "p95", "max")]
    rows += [(f"wait of a first turn, {at}, s", waits[at]) for at in ("p50", "max")]
    rows.append(("later turns from the prefix cache", None if rate is None else f"{rate:.2%}"))
    return [row for row in rows if row[1] is not None]


CONVERSATION_COLUMNS = ("mean s", "p50 s", "p95 s", "max s", "longest wait of a first turn, s", "hits of later turns")


def conversation_cells(found: Mapping[str, Any] | None) -> list[float | str | None]:
    """Return the row of one run in a sweep's table of conversations; ``found`` is None if the run failed."""
    if found is None:
        return ["failed", *[None] * (len(CONVERSATION_COLUMNS) - 1)]
    seconds, rate = found["conversation_s"], found["later_turns_hit_rate"]
    waits = found["first_turn_wait_s"]["max"], None if rate is None else f"{rate:.2%}"
    return [*(seconds[at] for at in ("mean", "p50", "p95", "max")), *waits]


def _program_totals(programs: Mapping[str, int] | None) -> list[tuple[str, str]]:
    """Return the rows of a run without hints: how many turns were given to the program of their conversation."""
    kinds = {} if programs is None else {"turns": "", "turns of sub-agents": "subagent_"}
    return [
        (f"{words} in the right program", f"{programs[f'{key}right']:,} of {programs[f'{key}turns']:,}")
        for words, key in kinds.items()
        if programs is not None and programs[f"{key}turns"]
    ]


def _rejections(record: RunRecord) -> dict[str, int]:
    """Count rejections by reason, the most frequent first. Numbers in reasons become N, so that equal reasons merge."""
    details = (run.finish_detail for run in record.requests if run.finish == "rejected")
    return dict(Counter(re.sub(r"\d+", "N", detail) for detail in details).most_common())


def _prefix_cache(record: RunRecord) -> dict[str, float | None]:
    found = prefix_cache(record)
    blocks = found.hit_blocks if record.block_size else None
    return {**found._asdict(), "hit_blocks": blocks, "hit_rate": found.hit_rate}


def _throughput(record: RunRecord) -> dict[str, float | None]:
    """Return rates over the whole run, its slow start and end included. A prompt counts if it got an output token."""
    answered = [run for run in record.requests if run.num_output_tokens]
    output = sum(run.num_output_tokens for run in answered)
    total = output + sum(run.num_prompt_tokens for run in answered)
    ended = sum(run.finish in ("stop", "length") for run in record.requests)
    counts = {"requests_per_s": ended, "output_tokens_per_s": output, "total_tokens_per_s": total}
    return {name: _ratio(count, record.virtual_s) for name, count in counts.items()}


def _step_milliseconds(record: RunRecord) -> dict[str, float | None]:
    steps = record.steps
    return spread(sorted((end - begin) * 1e3 for begin, end in zip(steps.begin, steps.end, strict=True)))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
