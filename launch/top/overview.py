"""The figures of ``quire top``, from two scrapes. Pure functions of their arguments."""

import msgspec

from quire.launch.top.scrape import Scrape, growth
from quire.launch.top.state import ShownRequest, ShownTenant

# Name in the JSON object and, with spaces, on the screen; and the histogram of seconds.
TIMES = (
    ("queue", "request_queue_time_seconds"),
    ("prefill", "request_prefill_time_seconds"),
    ("decode", "request_decode_time_seconds"),
    ("first_token", "time_to_first_token_seconds"),
    ("between_tokens", "inter_token_latency_seconds"),
    ("whole_request", "e2e_request_latency_seconds"),
)


# Parts of a step's time, and the histogram of seconds.
STEP_PARTS = (
    ("schedule", "step_schedule_time_seconds"),
    ("worker", "step_worker_time_seconds"),
    ("update", "step_update_time_seconds"),
    ("reply", "step_reply_time_seconds"),
)


class Times(msgspec.Struct, frozen=True):
    """Seconds of the requests that ended in the window."""

    count: int
    mean: float
    p50: float | None
    p99: float | None


class StepPartTimes(Times, frozen=True):
    """Seconds of one part of the steps in the window. ``share``: of the sum of all parts."""

    share: float


class EngineFigures(msgspec.Struct, frozen=True):
    """The present figures of one engine of several. ``kv_use``: from 0 to 1. ``routed``: requests that the router sent
    to it since the router's start."""

    engine: str
    running: int
    waiting: int
    kv_use: float | None
    generation_tokens_per_s: float | None
    routed: int


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """What the screen shows. None: the server has not exported it, or there was nothing to measure.

    Attributes:
        state: what /health answered, such as ready; empty without an answer.
        window_s: seconds between the two scrapes; rates and times are of this window. None: there was one scrape, and
            times and shares are since the start.
        prompt_tokens_per_s: prompt tokens of admitted requests, including those from the prefix cache.
        hit_share: share of looked-up prompt tokens that were found in the prefix cache.
        engines: one entry per engine that answers; empty for a server with one engine.
        engine_restarts, router_restarts: None with one engine.
        paused, tenants, requests: from ``/admin/state``, the oldest requests; None without an administrator's key.
        admin_error: why they are missing although there is a key.
    """

    model: str
    state: str
    window_s: float | None
    running: int | None
    waiting: int | None
    waiting_by_reason: dict[str, int]
    kv_use: float | None
    num_blocks: int | None
    num_cached_blocks: int | None
    block_size: int | None
    hit_share: float | None
    prompt_tokens_per_s: float | None
    cached_tokens_per_s: float | None
    generation_tokens_per_s: float | None
    tokens_per_step: float | None
    ended_per_s: float | None
    rejected_per_s: float | None
    preemptions: int | None
    preemptions_per_s: float | None
    preemptions_by_reason: dict[str, int]
    evicted_blocks_per_s: float | None
    draft_acceptance: float | None
    times: dict[str, Times | None]
    step_parts: dict[str, StepPartTimes | None]
    worker_restarts: int | None
    scheduler_restarts: int | None
    front_end_restarts: int | None
    engine_restarts: int | None = None
    router_restarts: int | None = None
    engines: list[EngineFigures] = []
    paused: str | None = None
    tenants: list[ShownTenant] | None = None
    requests: list[ShownRequest] | None = None
    admin_error: str = ""


def overview(now: Scrape, earlier: Scrape | None, state: str) -> Overview:
    """Return the figures of the time between two scrapes; without an earlier one, those since the start."""
    window = now.time - earlier.time if earlier is not None else None
    before = earlier or Scrape(now.time)

    def rate(name: str) -> float | None:
        grown = now.since(before, name)
        return None if grown is None or not window else grown / window

    def share(part: str, whole: str) -> float | None:
        grown, of = now.since(before, part), now.since(before, whole)
        return grown / of if of and grown is not None else None

    def number(name: str) -> int | None:
        value = now.values.get(name)
        return None if value is None else int(value)

    steps = now.distribution(before, "iteration_tokens_total")
    block_size = now.labels.get("cache_config_info", {}).get("block_size", "")
    return Overview(
        model=_model(now),
        state=state,
        window_s=window,
        running=number("num_requests_running"),
        waiting=number("num_requests_waiting"),
        waiting_by_reason=_reasons(now, "num_requests_waiting_by_reason"),
        kv_use=_kv_use(now.values),
        num_blocks=number("num_usable_blocks"),
        num_cached_blocks=number("num_cached_blocks"),
        block_size=int(block_size) if block_size.isdecimal() else None,
        hit_share=share("prefix_cache_hits_total", "prefix_cache_queries_total"),
        prompt_tokens_per_s=rate("prompt_tokens_total"),
        cached_tokens_per_s=rate("prompt_tokens_cached_total"),
        generation_tokens_per_s=rate("generation_tokens_total"),
        tokens_per_step=steps.mean if steps else None,
        ended_per_s=rate("request_success_total"),
        rejected_per_s=rate("admission_rejections_total"),
        preemptions=number("num_preemptions_total"),
        preemptions_per_s=rate("num_preemptions_total"),
        preemptions_by_reason=_reasons(now, "num_preemptions_by_reason_total"),
        evicted_blocks_per_s=rate("num_evicted_blocks_total"),
        draft_acceptance=share("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"),
        times={label: _times(now, before, name) for label, name in TIMES},
        step_parts=_step_parts(now, before),
        worker_restarts=number("num_worker_restarts_total"),
        scheduler_restarts=number("num_scheduler_restarts_total"),
        front_end_restarts=number("num_front_end_restarts_total"),
        engine_restarts=number("num_engine_restarts_total"),
        router_restarts=number("num_router_restarts_total"),
        engines=_engines(now, before, window),
    )


def _kv_use(values: dict[str, float]) -> float | None:
    """Return the share of the KV blocks in use, of all engines together."""
    usable, free = values.get("num_usable_blocks"), values.get("num_free_blocks")
    if usable and free is not None:
        return 1.0 - free / usable
    return values.get("kv_cache_usage_perc")


def _engines(now: Scrape, before: Scrape, window: float | None) -> list[EngineFigures]:
    """Return the figures of each engine; none for one engine alone, whose metrics have no label of an engine."""
    found = []
    for engine, values in sorted(now.by_engine.items(), key=lambda item: (len(item[0]), item[0])):
        if "num_requests_running" not in values:
            continue
        name = "generation_tokens_total"
        earlier = before.by_engine.get(engine)
        grown = None if earlier is None else growth(values.get(name, 0.0), earlier.get(name, 0.0))
        found.append(
            EngineFigures(
                engine,
                int(values["num_requests_running"]),
                int(values.get("num_requests_waiting", 0)),
                _kv_use(values),
                grown / window if window and grown is not None else None,
                int(values.get("router_choices_total", 0)),
            )
        )
    return found


def _model(scrape: Scrape) -> str:
    names = {labels["model_name"] for labels in scrape.labels.values() if "model_name" in labels}
    return ", ".join(sorted(names))


def _reasons(scrape: Scrape, name: str) -> dict[str, int]:
    """Return the reasons that occur, the most frequent first."""
    found = {reason: int(value) for reason, value in scrape.by_reason.get(name, {}).items() if value}
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _times(now: Scrape, before: Scrape, name: str) -> Times | None:
    found = now.distribution(before, name)
    if found is None:
        return None
    return Times(int(found.count), found.mean, found.quantile(0.5), found.quantile(0.99))


def _step_parts(now: Scrape, before: Scrape) -> dict[str, StepPartTimes | None]:
    times = {part: _times(now, before, name) for part, name in STEP_PARTS}
    total = sum(each.count * each.mean for each in times.values() if each is not None)

    def part(of: Times | None) -> StepPartTimes | None:
        if of is None:
            return None
        return StepPartTimes(of.count, of.mean, of.p50, of.p99, of.count * of.mean / total if total else 0.0)

    return {name: part(each) for name, each in times.items()}
