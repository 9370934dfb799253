"""``quire plan``: simulate a trace with more or fewer engines until the targets are met."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quire.bench.measure.report import Table, rounded
from quire.protocol.errors import ConfigError, counted
from quire.replay.output import ReplayResult, check_outputs, progress_bar, publish
from quire.replay.plan.search import LeastSearch
from quire.replay.replay import UsageError, check_repeats, load_options, run_options
from quire.replay.report.summary import percent
from quire.replay.simulate.sweep import SweepRow, SweepTask, points_of, run_points

NUMBER = "data_parallel_size"
COLUMNS = (
    *("engines", "devices", "attained", "ttft p99, ms", "tpot p99, ms", "e2e p99, ms", "hit rate", "busiest over mean"),
)


class Try(NamedTuple):
    """One simulated run: a size of engine (texts by ``--set`` key), a number of them, and the run's ``summary``."""

    size: dict[str, str]
    engines: int
    figures: dict[str, Any]

    @property
    def devices(self) -> int:
        ranks: int = self.figures["settings"]["tensor_parallel_size"]
        return self.engines * ranks


def run(args: argparse.Namespace) -> None:
    """Run ``quire plan``.

    Raises:
        ConfigError: contradicting flags, or an unusable trace or setting.
    """
    check_repeats(args)
    check_outputs(args)
    for flag in ("set", "sweep"):
        if NUMBER in dict(getattr(args, flag)):
            raise UsageError(f"--{flag} {NUMBER} cannot be combined with quire plan, which finds it: use --engines")
    task = SweepTask(
        args.trace, args.format, load_options(args), dict(args.set), args.cost, run_options(args), dict(args.slo)
    )
    with progress_bar(None, " runs") as progress:
        tries, searches = _search(task, args, lambda count: progress(0.0, count))
    result = _result(args, tries, searches)
    publish(result, args)
    if args.json != "-":
        print(json.dumps(result.figures, allow_nan=False), flush=True)


def _search(task: SweepTask, args: argparse.Namespace, progress: Any) -> tuple[list[Try], list[LeastSearch]]:
    """Search for the least number of engines of each size, in parallel processes.

    Raises:
        ConfigError: a run failed.
    """
    sizes = points_of(args.sweep)
    searches = [LeastSearch(*args.engines) for _ in sizes]
    tries: list[Try] = []
    while any(search.next_number is not None for search in searches):
        open_ones = [(size, search) for size, search in zip(sizes, searches, strict=True) if search.next_number]
        points = [{**size, NUMBER: f"{search.next_number}"} for size, search in open_ones]
        rows = run_points(task, points, args.jobs)
        for (size, search), row in zip(open_ones, rows, strict=True):
            found = _try(size, row)
            tries.append(found)
            search.tried(found.figures["attained"] >= args.percentile / 100)
        progress(len(tries))
    return tries, searches


def _try(size: dict[str, str], row: SweepRow) -> Try:
    if row.figures is None:
        raise ConfigError(row.error)
    if row.figures["attained"] is None:
        raise ConfigError("the trace has no request in this window: there is nothing to plan")
    return Try(size, int(row.values[NUMBER]), row.figures)


def _result(args: argparse.Namespace, tries: Sequence[Try], searches: Sequence[LeastSearch]) -> ReplayResult:
    sizes = points_of(args.sweep)
    answers = [
        next(found for found in tries if found.size == size and found.engines == search.answer)
        for size, search in zip(sizes, searches, strict=True)
        if search.answer is not None
    ]
    best = min(answers, key=lambda found: (found.devices, found.engines), default=None)
    ordered = sorted(tries, key=lambda found: (sizes.index(found.size), found.engines))
    rows = [(_name(found.size) or "one size", _cells(found)) for found in ordered]
    answer = _answer(args, best, tries)
    figures = {
        "answer": answer,
        "engines": None if best is None else best.engines,
        "devices": None if best is None else best.devices,
        "size": None if best is None else best.size,
        "slo": args.slo,
        "percentile": args.percentile,
        "tried": [_figures(found) for found in ordered],
    }
    first = tries[0].figures
    head = [first["title"], f"cost: {first['cost']}", answer]
    return ReplayResult(rounded(figures), [], head, [Table("size", COLUMNS, rows)], list(first["notes"]))


def _answer(args: argparse.Namespace, best: Try | None, tries: Sequence[Try]) -> str:
    targets = " and ".join(f"{name} within {seconds:g} s" for name, seconds in args.slo.items())
    if best is None:
        first, last = args.engines
        most = percent(max(found.figures["attained"] for found in tries))
        return (
            f"--engines {first}-{last} is too few: at most {most} of the requests have {targets}, not "
            f"{args.percentile:g} %"
        )
    size = f" of {_name(best.size)}" if best.size else ""
    engines = f"{counted(best.engines, 'engine')}{size} ({counted(best.devices, 'device')})"
    attained = percent(best.figures["attained"])
    return f"{engines}: {args.percentile:g} % of the requests have {targets} (attained: {attained})"


def _name(size: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in size.items())


def _cells(found: Try) -> list[float | str | None]:
    figures, latency = found.figures, found.figures["latency_ms"]
    engines = figures.get("engines")
    return [
        *(found.engines, found.devices, percent(figures["attained"])),
        *(latency[name]["p99"] for name in ("ttft", "tpot", "e2e")),
        percent(figures["prefix_cache"]["hit_rate"]),
        engines["busiest_over_mean"] if engines else None,
    ]


def _figures(found: Try) -> dict[str, Any]:
    figures = found.figures
    latency = {name: figures["latency_ms"][name] for name in ("ttft", "tpot", "e2e")}
    return {
        "size": found.size,
        "engines": found.engines,
        "devices": found.devices,
        "attained": figures["attained"],
        "latency_ms": latency,
        "hit_rate": figures["prefix_cache"]["hit_rate"],
        "rejected": figures["rejected"],
    }
