"""The figures of ``quire top``, from two scrapes. Pure functions of their arguments."""

from typing import Any

from quire.launch.top.scrape import Scrape, growth

Figures = dict[str, Any]
"""What the screen shows and ``--json`` prints. None: the server does not export it, or there was nothing to measure."""

NUMBERS = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "num_blocks": "num_usable_blocks",
    "num_cached_blocks": "num_cached_blocks",
    "preemptions": "num_preemptions_total",
    "worker_restarts": "num_worker_restarts_total",
    "scheduler_restarts": "num_scheduler_restarts_total",
    "front_end_restarts": "num_front_end_restarts_total",
    "engine_restarts": "num_engine_restarts_total",
    "router_restarts": "num_router_restarts_total",
}
"""Present values. The last two are missing with one engine."""
REASONS = {
    "waiting_by_reason": "num_requests_waiting_by_reason",
    "preemptions_by_reason": "num_preemptions_by_reason_total",
}
"""Present values by reason, of those that occur, the most frequent first."""
RATES = {
    # prompt tokens of admitted requests, including those from the prefix cache
    "prompt_tokens_per_s": "prompt_tokens_total",
    "cached_tokens_per_s": "prompt_tokens_cached_total",
    "generation_tokens_per_s": "generation_tokens_total",
    "ended_per_s": "request_success_total",
    "rejected_per_s": "admission_rejections_total",
    "preemptions_per_s": "num_preemptions_total",
    "evicted_blocks_per_s": "num_evicted_blocks_total",
}
SHARES = {
    # of looked-up prompt tokens, those found in the prefix cache
    "hit_share": ("prefix_cache_hits_total", "prefix_cache_queries_total"),
    "draft_acceptance": ("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"),
}
"""Share of the first counter's growth in that of the second."""
TIMES = {
    "queue": "request_queue_time_seconds",
    "prefill": "request_prefill_time_seconds",
    "decode": "request_decode_time_seconds",
    "first_token": "time_to_first_token_seconds",
    "between_tokens": "inter_token_latency_seconds",
    "whole_request": "e2e_request_latency_seconds",
}
"""Histograms of the seconds of requests. In ``times`` there are count, mean, p50 and p99 of those in the window."""
STEP_PARTS = {
    "schedule": "step_schedule_time_seconds",
    "worker": "step_worker_time_seconds",
    "update": "step_update_time_seconds",
    "reply": "step_reply_time_seconds",
}
"""The same of the parts of a step, in ``step_parts``; ``share``: of the sum of all parts."""


def overview(now: Scrape, earlier: Scrape | None, state: str) -> Figures:
    """Return the figures of the time between two scrapes; without an earlier one, those since the start.

    ``state``: what /health answered, such as ready; empty without an answer. ``window_s``: seconds between the scrapes.
    """
    window = now.time - earlier.time if earlier is not None else None
    before = earlier or Scrape(now.time)
    steps = now.distribution(before, "iteration_tokens_total")
    block_size = now.labels.get("cache_config_info", {}).get("block_size", "")
    names = {labels["model_name"] for labels in now.labels.values() if "model_name" in labels}
    return {
        "model": ", ".join(sorted(names)),
        "state": state,
        "window_s": window,
        **{name: None if (n := now.values.get(metric)) is None else int(n) for name, metric in NUMBERS.items()},
        **{name: _reasons(now, metric) for name, metric in REASONS.items()},
        "kv_use": _kv_use(now.values),
        "block_size": int(block_size) if block_size.isdecimal() else None,
        **{name: _ratio(now.since(before, metric), window) for name, metric in RATES.items()},
        **{name: _ratio(*(now.since(before, metric) for metric in pair)) for name, pair in SHARES.items()},
        "tokens_per_step": steps.mean if steps else None,
        "times": {label: _times(now, before, metric) for label, metric in TIMES.items()},
        "step_parts": _step_parts(now, before),
        "engines": _engines(now, before, window),
    }


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if whole and part is not None else None


def _kv_use(values: dict[str, float]) -> float | None:
    """Return the share of the KV blocks in use, of all engines together."""
    usable, free = values.get("num_usable_blocks"), values.get("num_free_blocks")
    if usable and free is not None:
        return 1.0 - free / usable
    return values.get("kv_cache_usage_perc")


def _engines(now: Scrape, before: Scrape, window: float | None) -> list[Figures]:
    """Return the figures of each engine; none for one engine alone, whose metrics have no label of an engine."""
    found: list[Figures] = []
    for engine, values in sorted(now.by_engine.items(), key=lambda item: (len(item[0]), item[0])):
        if "num_requests_running" not in values:
            continue
        name = "generation_tokens_total"
        earlier = before.by_engine.get(engine)
        grown = None if earlier is None else growth(values.get(name, 0.0), earlier.get(name, 0.0))
        found.append(
            {
                "engine": engine,
                "running": int(values["num_requests_running"]),
                "waiting": int(values.get("num_requests_waiting", 0)),
                "kv_use": _kv_use(values),
                "generation_tokens_per_s": _ratio(grown, window),
                "routed": int(values.get("router_choices_total", 0)),
            }
        )
    return found


def _reasons(scrape: Scrape, name: str) -> dict[str, int]:
    found = {reason: int(value) for reason, value in scrape.by_reason.get(name, {}).items() if value}
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _times(now: Scrape, before: Scrape, name: str) -> Figures | None:
    found = now.distribution(before, name)
    if found is None:
        return None
    quantiles = {"p50": found.quantile(0.5), "p99": found.quantile(0.99)}
    return {"count": int(found.count), "mean": found.mean, **quantiles}


def _step_parts(now: Scrape, before: Scrape) -> dict[str, Figures | None]:
    times = {part: _times(now, before, name) for part, name in STEP_PARTS.items()}
    total = sum(each["count"] * each["mean"] for each in times.values() if each) or 1.0
    return {part: each and {**each, "share": each["count"] * each["mean"] / total} for part, each in times.items()}
