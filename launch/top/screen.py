"""The screen of ``quire top`` as text. Pure functions of their arguments."""

from quire.launch.top.overview import Overview, StepPartTimes, Times

BAR_WIDTH = 24
LABEL_WIDTH = 16
COLUMN_WIDTH = 10
MAX_TENANTS, MAX_REQUESTS = 8, 8
"""Most lines of each. The end of the screen is cut off on a small terminal, so these come last."""


def screen(shown: Overview, url: str, width: int = 120) -> list[str]:
    """Return the lines, each at most ``width`` characters long and without control characters."""
    window = "since the start" if shown.window_s is None else f"last {shown.window_s:.1f} s"
    lines = [
        f"quire top  {url}  {shown.model or 'no model'}  {shown.state or 'state unknown'}  ({window})",
        "",
        *_requests(shown),
        *_cache(shown),
        "",
        _columns("seconds", "mean", "p50", "p99", "number"),
        *(_time_row(label, times) for label, times in shown.times.items()),
        "",
        _columns("step, ms", "mean", "p50", "p99", "share"),
        *(_step_row(label, part) for label, part in shown.step_parts.items()),
        "",
        _row(
            "restarts",
            f"workers {_count(shown.worker_restarts)}   scheduler {_count(shown.scheduler_restarts)}   "
            f"front ends {_count(shown.front_end_restarts)}",
            f"   engines {_count(shown.engine_restarts)}   router {_count(shown.router_restarts)}"
            if shown.engines
            else "",
        ),
        *_engines(shown),
    ]
    if shown.running is None:
        lines += ["", "the scheduler did not answer this scrape: its figures are missing"]
    if shown.admin_error:
        lines += ["", shown.admin_error]
    lines += [*_tenants(shown), *_oldest(shown)]
    return ["".join(each if each.isprintable() else "?" for each in line)[:width].rstrip() for line in lines]


def _requests(shown: Overview) -> list[str]:
    rates = f"ended {_rate(shown.ended_per_s)}   refused {_rate(shown.rejected_per_s)}"
    return [
        _row("requests", f"running {_count(shown.running)}   waiting {_count(shown.waiting)}   {rates}"),
        _row("waiting for", _reasons(shown.waiting_by_reason)),
        _row(
            "tokens/s",
            f"generated {_number(shown.generation_tokens_per_s)}   prompt {_number(shown.prompt_tokens_per_s)}, "
            f"of these cached {_number(shown.cached_tokens_per_s)}   per step {_number(shown.tokens_per_step)}",
        ),
    ]


def _cache(shown: Overview) -> list[str]:
    size = "" if shown.block_size is None else f" of {shown.block_size} tokens"
    lines = [
        _row(
            "KV blocks",
            f"{_bar(shown.kv_use)} {_share(shown.kv_use)} of {_count(shown.num_blocks)} blocks{size}   "
            f"cached {_count(shown.num_cached_blocks)}   evicted {_rate(shown.evicted_blocks_per_s)}",
        ),
        _row("prefix cache", f"{_bar(shown.hit_share)} {_share(shown.hit_share)} of the prompt tokens found"),
        _row(
            "preemptions",
            f"{_rate(shown.preemptions_per_s)}   since the start {_count(shown.preemptions)}: "
            f"{_reasons(shown.preemptions_by_reason)}",
        ),
    ]
    if shown.draft_acceptance is not None:
        lines.append(_row("draft tokens", f"{_bar(shown.draft_acceptance)} {_share(shown.draft_acceptance)} accepted"))
    return lines


def _row(label: str, *cells: str) -> str:
    return f"{label:<{LABEL_WIDTH}}{''.join(cells)}"


def _columns(label: str, *cells: str) -> str:
    return _row(label, *(f"{cell:>{COLUMN_WIDTH}}" for cell in cells))


def _time_row(label: str, times: Times | None) -> str:
    cells = ("-",) * 4
    if times is not None:
        cells = (_seconds(times.mean), _seconds(times.p50), _seconds(times.p99), f"{times.count:,}")
    return _columns(f"  {label.replace('_', ' ')}", *cells)


def _step_row(label: str, part: StepPartTimes | None) -> str:
    cells = ("-",) * 4
    if part is not None:
        cells = (_ms(part.mean), _ms(part.p50), _ms(part.p99), f"{part.share:.0%}")
    return _columns(f"  {label}", *cells)


def _engines(shown: Overview) -> list[str]:
    """Return a line for each engine of several."""
    if not shown.engines:
        return []
    lines = ["", _columns("engines", "running", "waiting", "KV use", "tokens/s", "routed")]
    for each in shown.engines:
        cells = (_count(each.running), _count(each.waiting), _share(each.kv_use), _number(each.generation_tokens_per_s))
        lines.append(_columns(f"  {each.engine}", *cells, _count(each.routed)))
    return lines


def _tenants(shown: Overview) -> list[str]:
    """Return the tenants with the most requests."""
    if not shown.tenants:
        return []
    most = sorted(shown.tenants, key=lambda each: (-each.running - each.waiting, each.tenant))
    lines = ["", _columns("tenants", "running", "waiting", "KV blocks")]
    for each in most[:MAX_TENANTS]:
        lines.append(_columns(f"  {each.tenant}", _count(each.running), _count(each.waiting), _count(each.kv_blocks)))
    return [*lines, *_more(len(most) - MAX_TENANTS)]


def _oldest(shown: Overview) -> list[str]:
    if not shown.requests:
        return []
    lines = ["", _columns("oldest requests", "tenant", "seconds", "prompt", "output", "KV blocks")]
    for each in shown.requests[:MAX_REQUESTS]:
        state = each.state if each.reason is None else f"{each.state} ({each.reason})"
        if each.adapter is not None:
            state += f", adapter {each.adapter}"
        cells = (f"{each.tenant}", f"{each.seconds:.1f}", _count(each.prompt_tokens), _count(each.output_tokens))
        lines.append(f"{_columns('', *cells, _count(each.kv_blocks))}  {state}  {each.id}")
    return lines


def _more(number: int) -> list[str]:
    return [f"  and {number:,} more"] if number > 0 else []


def _bar(share: float | None) -> str:
    full = 0 if share is None else round(BAR_WIDTH * min(max(share, 0.0), 1.0))
    return f"[{'#' * full}{'.' * (BAR_WIDTH - full)}]"


def _share(share: float | None) -> str:
    return "   -" if share is None else f"{share:4.0%}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _rate(value: float | None) -> str:
    return f"{_number(value)}/s"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if value < 1 else f"{value:.2f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.2f}"


def _reasons(reasons: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in reasons.items()) or "-"
