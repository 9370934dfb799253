"""The screen of ``quire top`` as text. Pure functions of their arguments."""

from collections.abc import Callable, Iterable, Mapping
from string import Formatter
from typing import Any

from quire.launch.top.overview import Figures

BAR_WIDTH = 24
# A field is {name:form} or {name:form width}; FORMS has the forms.
LINES = (
    "quire top  {url}  {model}  {state}  ({window})",
    "",
    "requests        running {running:count}   waiting {waiting:count}   ended {ended_per_s:rate}   "
    "refused {rejected_per_s:rate}",
    "waiting for     {waiting_by_reason:reasons}",
    "tokens/s        generated {generation_tokens_per_s:number}   prompt {prompt_tokens_per_s:number}, "
    "of these cached {cached_tokens_per_s:number}   per step {tokens_per_step:number}",
    "KV blocks       {kv_use:bar} of {num_blocks:count} blocks{size}   cached {num_cached_blocks:count}   "
    "evicted {evicted_blocks_per_s:rate}",
    "prefix cache    {hit_share:bar} of the prompt tokens found",
    "preemptions     {preemptions_per_s:rate}   since the start {preemptions:count}: {preemptions_by_reason:reasons}",
)
DRAFTS = "draft tokens    {draft_acceptance:bar} accepted"
RESTARTS = (
    "restarts        workers {worker_restarts:count}   scheduler {scheduler_restarts:count}   "
    "front ends {front_end_restarts:count}"
)
SEVERAL = "   engines {engine_restarts:count}   router {router_restarts:count}"
COLUMNS = "{:<16}{:>10}{:>10}{:>10}{:>10}"
TIMES = "  {label:text <14}{mean:seconds >10}{p50:seconds >10}{p99:seconds >10}{count:count >10}"
STEPS = "  {label:text <14}{mean:ms >10}{p50:ms >10}{p99:ms >10}{share:percent >10}"
ENGINE = "  {engine:text <14}{running:count >10}{waiting:count >10}{kv_use:percent >10}"
ENGINE += "{generation_tokens_per_s:number >10}{routed:count >10}"


def screen(shown: Figures, url: str, more: Iterable[str] = (), width: int = 120) -> list[str]:
    """Return the lines, each at most ``width`` characters long and without control characters.

    ``more``: lines that come last, because the end of the screen is cut off on a small terminal.
    """
    head = {
        "url": url,
        "window": "since the start" if shown["window_s"] is None else f"last {shown['window_s']:.1f} s",
        "model": shown["model"] or "no model",
        "state": shown["state"] or "state unknown",
        "size": "" if shown["block_size"] is None else f" of {shown['block_size']} tokens",
    }
    drafts = [] if shown["draft_acceptance"] is None else [DRAFTS]
    lines = [line_of(each, {**shown, **head}) for each in (*LINES, *drafts)]
    lines += ["", COLUMNS.format("seconds", "mean", "p50", "p99", "number"), *_rows(TIMES, shown["times"])]
    lines += ["", COLUMNS.format("step, ms", "mean", "p50", "p99", "share"), *_rows(STEPS, shown["step_parts"])]
    lines += ["", line_of(RESTARTS + (SEVERAL if shown["engines"] else ""), shown)]
    if shown["engines"]:
        lines += ["", COLUMNS.format("engines", "running", "waiting", "KV use", "tokens/s") + f"{'routed':>10}"]
        lines += [line_of(ENGINE, each) for each in shown["engines"]]
    if shown["running"] is None:
        lines += ["", "the scheduler did not answer this scrape: its figures are missing"]
    return ["".join(each if each.isprintable() else "?" for each in line)[:width].rstrip() for line in [*lines, *more]]


def _rows(template: str, times: Mapping[str, Figures | None]) -> list[str]:
    missing = dict.fromkeys(("mean", "p50", "p99", "count", "share"))
    return [
        line_of(template, {**missing, **(each or {}), "label": label.replace("_", " ")})
        for label, each in times.items()
    ]


class _Forms(Formatter):
    def format_field(self, value: Any, spec: str) -> str:
        name, _, width = spec.partition(" ")
        return format(FORMS[name or "text"](value) if value is not None else MISSING.get(name, "-"), width)


def line_of(template: str, values: Mapping[str, Any]) -> str:
    """Return a line with the values that its fields name; None is shown as ``-``."""
    return _Forms().vformat(template, (), values)


def _bar(share: float) -> str:
    full = round(BAR_WIDTH * min(max(share, 0.0), 1.0))
    return f"[{'#' * full}{'.' * (BAR_WIDTH - full)}] {share:4.0%}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


FORMS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "bar": _bar,
    "count": "{:,}".format,
    "number": _number,
    "rate": lambda value: f"{_number(value)}/s",
    "percent": "{:.0%}".format,
    "tenths": "{:.1f}".format,
    "seconds": lambda value: f"{value:.4f}" if value < 1 else f"{value:.2f}",
    "ms": lambda value: f"{1000 * value:.2f}",
    "reasons": lambda reasons: ", ".join(f"{reason} {count:,}" for reason, count in reasons.items()) or "-",
}
MISSING = {"bar": f"[{'.' * BAR_WIDTH}]    -", "rate": "-/s"}
