"""``quire replay``: choose the kind of replay from the flags, run it and publish the result."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from quire.bench.measure.report import Table, rounded
from quire.protocol.errors import ConfigError
from quire.replay.formats.options import LoadOptions
from quire.replay.output import ReplayResult, change_of, check_outputs, progress_bar, publish, result_of
from quire.replay.report.summary import (
    CONVERSATION_COLUMNS,
    ENGINE_COLUMNS,
    SWEEP_COLUMNS,
    by_run,
    conversation_cells,
    engine_cells,
    side_by_side,
    summary,
    sweep_cells,
)
from quire.replay.run.run_record import RunRecord
from quire.replay.workload.workload import Workload

EX_INTERRUPTED = 130
MAX_VALUE = 200


class UsageError(ConfigError):
    """Flags that contradict each other (exit status 2)."""

    exit_status = 2


def run(args: argparse.Namespace) -> None:
    """Run ``quire replay``; exit status 1 if a decision differs, nothing was compared, or a server's answer failed.

    Raises:
        ConfigError: contradicting flags, an unusable trace or setting, or an unreachable server.
    """
    _check(args)
    result = _replay(args)
    publish(result, args)
    if result.exit_status:
        sys.exit(result.exit_status)


def _replay(args: argparse.Namespace) -> ReplayResult:
    from quire.replay.recorded.router import replay_router

    if args.against is not None:
        return _live(args)
    if _is_exact(args):
        return _exact(args)
    if _is_as_recorded(args, "router"):
        if args.html or args.perfetto:
            raise UsageError("--html and --perfetto cannot show a router's trace: it has choices, and no steps")
        return replay_router(args.trace)
    if args.sweep:
        return _sweep(args)
    return _compare(args) if args.compare else _what_if(args)


# ---- flags


WORKLOAD_FLAGS = (
    *("concurrency", "closed_loop", "rate", "limit", "start", "duration", "stagger", "seed"),
    *("join_subagents", "tokenizer", "overlong", "reuse_answers", "no_hints"),
)
ENGINE_FLAGS = ("set", "sweep", "compare", "cost", "jobs", "reuse_answers", "no_hints")
SERVER_FLAGS = ("model", "api_key", "vocab_size", "max_prompt_tokens")


def _given(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Return the flags among ``names`` that were given."""
    values = vars(args)
    return [f"--{name.replace('_', '-')}" for name in names if values[name] not in (None, False, [])]


def _check(args: argparse.Namespace) -> None:
    if args.against is not None:
        for flag in _given(args, ENGINE_FLAGS):
            raise UsageError(f"{flag} configures a simulated engine: it cannot be combined with --against")
        if args.perfetto is not None:
            raise UsageError("--perfetto shows steps, which a client cannot see: it cannot be combined with --against")
    else:
        for flag in _given(args, SERVER_FLAGS):
            raise UsageError(f"{flag} configures a live run: it needs --against URL")
    if args.sweep and args.compare:
        raise UsageError("--sweep cannot be combined with --compare: choose one")
    if args.jobs is not None and not args.sweep:
        raise UsageError("--jobs sets the processes of a sweep: it needs --sweep KEY=V1,V2")
    if args.sweep and (args.html or args.perfetto):
        raise UsageError("--html and --perfetto cannot show a sweep: run the setting of interest by itself")
    if args.compare and args.perfetto:
        raise UsageError("--perfetto shows one run: it cannot be combined with --compare")
    check_repeats(args)
    check_outputs(args)


def check_repeats(args: argparse.Namespace) -> None:
    """Raise UsageError if a setting is given twice."""
    for flag in ("set", "sweep", "compare"):
        keys = [key for key, _ in getattr(args, flag)]
        for key in keys:
            if keys.count(key) > 1:
                raise UsageError(f"--{flag} {key} is given twice")
    for key, _ in args.sweep:
        if key in dict(args.set):
            raise UsageError(f"{key} is given to both --set and --sweep")


def _is_exact(args: argparse.Namespace) -> bool:
    """Whether the trace is an engine's and no flag changes the run."""
    return _is_as_recorded(args, "quire")


def _is_as_recorded(args: argparse.Namespace, format: str) -> bool:
    """Whether the trace has this format and no flag changes the run."""
    from quire.replay.formats.detect import detect_format

    if _given(args, (*WORKLOAD_FLAGS, *ENGINE_FLAGS)):
        return False
    return args.format == format or (args.format == "auto" and detect_format(args.trace) == format)


# ---- kinds of replay


def _exact_record(args: argparse.Namespace) -> RunRecord:
    from quire.replay.recorded.replay_trace import replay_trace

    with progress_bar(None) as progress:
        return replay_trace(args.trace, lenient=args.lenient, progress=progress)


def _exact(args: argparse.Namespace) -> ReplayResult:
    record = _exact_record(args)
    result = result_of(record)
    if record.decisions_equal is False and record.first_difference is not None:
        result.exit_status = 1
        result.problem = _first_difference(record.first_difference)
    elif record.decisions_equal:
        result.head.insert(1, f"replayed exactly: all decisions are equal ({len(record.steps):,} steps)")
    elif not record.steps:
        result.exit_status = 1
        result.problem = f"nothing was replayed: {args.trace} has no steps that can be compared"
    return result


def _first_difference(found: dict[str, Any]) -> str:
    request = f" of request {found['req_id']}" if found["req_id"] else ""
    values = f"recorded {_format_value(found['recorded'])}, now {_format_value(found['decided'])}"
    where = f"{found['file'] or 'the trace'}, line {found['line']}"
    return (
        f"decisions differ first at step {found['step']}: {found['kind']} {found['field']}{request}: {values} ({where})"
    )


def _format_value(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}..."


def _what_if(args: argparse.Namespace) -> ReplayResult:
    """Run one simulation; for a change of settings of Quire's own trace, also the recorded settings."""
    workload = _load(args)
    changed = _run(args, workload, dict(args.set), {})
    if workload.format == "measured" and not _given(args, WORKLOAD_FLAGS):
        return _beside_measured(args, changed)
    if workload.format != "quire" or not args.set:
        return result_of(changed)
    recorded = _recorded(args, changed)
    base = _run(args, workload, {}, {})
    return change_of(recorded, base, changed)


def _beside_measured(args: argparse.Namespace, replayed: RunRecord) -> ReplayResult:
    """Return the result of a measured run's replay, with the measured figures."""
    from quire.replay.formats.measured_results import measured_record

    measured = measured_record(args.trace)
    result = result_of(replayed)
    if measured is not None:
        found = {"measured": summary(measured), "replayed": result.figures}
        result.tables = [*by_run(found), *result.tables[1:]]
        result.figures = {**result.figures, "measured": found["measured"]}
    return result


def _recorded(args: argparse.Namespace, changed: RunRecord) -> RunRecord | None:
    """Return the recorded run if its requests are those of the simulation, or None and a note in ``changed``."""
    if flags := _given(args, WORKLOAD_FLAGS):
        changed.notes.append(f"without the recorded figures, which are of other requests: {', '.join(flags)} was given")
        return None
    try:
        record = _exact_record(args)
    except ConfigError as error:
        changed.notes.append(f"without the recorded figures: {error}")
        return None
    if record.decisions_equal is False:
        changed.notes.append("without the recorded figures: this version decides otherwise than the recorded one")
        return None
    return record


def _run(args: argparse.Namespace, workload: Workload, changes: dict[str, str], base: dict[str, str]) -> RunRecord:
    """Run one simulation with these changes of the settings of ``base``; its title names both."""
    from quire.replay.simulate.whatif import prepare, run_workload

    setup, cost = prepare(workload, changes, args.cost, base)
    if args.perfetto and setup.num_engines > 1:
        raise UsageError(
            f"--perfetto shows the steps of one engine: it needs data_parallel_size=1 (got {setup.num_engines})"
        )
    with progress_bar(len(workload.calls)) as progress:
        record = run_workload(workload, setup, cost, **run_options(args), progress=progress)
    if given := {**base, **changes}:
        record.title += " with " + ", ".join(f"{key}={value}" for key, value in given.items())
    return record


def _compare(args: argparse.Namespace) -> ReplayResult:
    from quire.replay.report.compare import compare

    workload = _load(args)
    settings = dict(args.set)
    first = _run(args, workload, settings, {})
    second = _run(args, workload, dict(args.compare), settings)
    comparison = compare(first, second)
    found = [summary(first), summary(second)]
    notes = [*first.notes, *(note for note in second.notes if note not in first.notes)]
    figures = {"runs": found, "comparison": rounded(comparison.as_dict())}
    head = [f"cost: {first.cost}", *comparison.text().splitlines()]
    return ReplayResult(figures, [first, second], head, [side_by_side(*found)], notes)


def _sweep(args: argparse.Namespace) -> ReplayResult:
    """Raises ConfigError with the first run's error if no run of the sweep succeeded."""
    from quire.replay.simulate.sweep import SweepTask, sweep

    task = SweepTask(args.trace, args.format, load_options(args), dict(args.set), args.cost, run_options(args))
    with progress_bar(None, " runs") as progress:
        rows = sweep(task, args.sweep, args.jobs, lambda ended, total: progress(0.0, ended))
    good = [row.figures for row in rows if row.figures is not None]
    if not good:
        raise ConfigError(rows[0].error)
    names = [" ".join(f"{key}={value}" for key, value in row.values.items()) for row in rows]
    failed = [f"{name}: {row.error}" for name, row in zip(names, rows, strict=True) if row.error]
    figures = [{"set": row.values, **(row.figures or {"error": row.error})} for row in rows]
    shown = [(name, sweep_cells(row.figures)) for name, row in zip(names, rows, strict=True)]
    head = [good[0]["title"], f"cost: {good[0]['cost']}"]
    notes = [*failed, *(note for note in good[0]["notes"] if all(note in each["notes"] for each in good))]
    if any("keeps the memory" in note for each in good for note in each["notes"]):
        pools = sorted(each["settings"]["num_usable_blocks"] for each in good)
        notes.append(f"pools of other blocks keep their memory: num_usable_blocks is {pools[0]} to {pools[-1]}")
    tables = [Table("setting", SWEEP_COLUMNS, shown)]
    if any("engines" in each for each in good):
        engines = [(name, engine_cells(row.figures)) for name, row in zip(names, rows, strict=True)]
        tables.append(Table("engines", ENGINE_COLUMNS, engines))
    if args.closed_loop:
        jobs = [(name, conversation_cells(row.figures)) for name, row in zip(names, rows, strict=True)]
        tables.append(Table("conversations", CONVERSATION_COLUMNS, jobs))
    return ReplayResult(figures, [], head, tables, notes, exit_status=int(bool(failed)))


def _live(args: argparse.Namespace) -> ReplayResult:
    from quire.replay.live import LiveTarget, run_live

    workload = _load(args)
    target = LiveTarget(args.against, args.model, args.api_key, args.vocab_size, args.max_prompt_tokens)
    options = run_options(args)
    del options["reuse_answers"], options["no_hints"]
    with progress_bar(len(workload.calls)) as progress:
        record = run_live(workload, target, **options, progress=progress)
    result = result_of(record)
    if record.extra["errors"]:
        result.exit_status = 1
    if "interrupted" in record.extra:
        result.exit_status = EX_INTERRUPTED
    return result


def _load(args: argparse.Namespace) -> Workload:
    from quire.replay.formats.detect import load_workload

    return load_workload(args.trace, args.format, load_options(args))


def load_options(args: argparse.Namespace) -> LoadOptions:
    """Return how the trace is loaded."""
    known = LoadOptions.__dataclass_fields__
    given = {name: value for name, value in vars(args).items() if name in known and value is not None}
    return LoadOptions(**given, block_size=_content_unit(args))


def _content_unit(args: argparse.Namespace) -> int:
    """Return the tokens per content id for traces with tokens or text: a divisor of every run's block size."""
    sizes = [value for key, value in (*args.set, *args.compare) if key == "block_size"]
    sizes += [value for key, values in args.sweep if key == "block_size" for value in values]
    return math.gcd(LoadOptions.block_size, *(int(size) for size in sizes if size.isascii() and size.isdigit()))


def run_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``run_workload`` except ``progress``."""
    return {
        "concurrency": args.concurrency,
        "closed_loop": args.closed_loop,
        "overlong": args.overlong or "refuse",
        "reuse_answers": args.reuse_answers,
        "no_hints": args.no_hints,
    }
