"""Outputs of a replay: tables or JSON on stdout, report files, and a progress bar."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from quire.bench.measure.report import Table
from quire.protocol.errors import ConfigError
from quire.protocol.process.log import one_line
from quire.replay.report.summary import by_run, summary, tables
from quire.replay.run.run_record import RunRecord

PROGRESS_AFTER_S = 2.0
Progress = Callable[[float, int], None]


@dataclass(slots=True)
class ReplayResult:
    """The result of a replay, ready to publish.

    Attributes:
        figures: the content of ``--json``.
        records: the runs for ``--html`` and ``--perfetto``.
        head, notes: lines above and below the tables.
        problem: what is wrong with the replayed run; printed last, to stderr.
    """

    figures: Any
    records: Sequence[RunRecord]
    head: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problem: str = ""
    exit_status: int = 0


def result_of(record: RunRecord) -> ReplayResult:
    found = summary(record)
    head = [record.title, f"cost: {record.cost}"]
    if record.settings:
        head.append("settings: " + " ".join(f"{key}={value}" for key, value in record.settings.items()))
    return ReplayResult(found, [record], head, tables(found), list(record.notes))


def change_of(recorded: RunRecord | None, base: RunRecord, changed: RunRecord) -> ReplayResult:
    """Return the result of a change of settings: recorded, and simulated before and after it by one cost model."""
    result = result_of(changed)
    runs = {"recorded": recorded, "base": base, "changed": changed}
    found = {name: summary(run) for name, run in runs.items() if run is not None}
    result.figures |= {name: figures for name, figures in found.items() if name != "changed"}
    result.records = [base, changed]
    result.tables = [*by_run(found), *result.tables[1:]]
    result.notes.append(
        "base and changed are simulated with the same cost model: compare these two; recorded shows how exact it is"
    )
    return result


@contextmanager
def progress_bar(total: int | None, unit: str = " requests") -> Iterator[Progress]:
    """Show a progress bar on a terminal once a run takes longer than ``PROGRESS_AFTER_S``.

    Yields a function of the run's own time in seconds and the number of finished units.
    """
    with tqdm(
        total=total,
        desc="Replay",
        unit=unit,
        file=sys.stderr,
        delay=PROGRESS_AFTER_S,
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:

        def update(now: float, ended: int) -> None:
            bar.set_postfix_str(f"{now:,.0f} s", refresh=False)
            bar.update(ended - bar.n)

        yield update


def check_outputs(args: argparse.Namespace) -> None:
    """Check the output paths before a run that may take an hour. Raises ConfigError."""
    named = (("--json", None if args.json in (None, "-") else Path(args.json)), ("--html", args.html))
    for flag, path in (*named, ("--perfetto", args.perfetto)):
        if path is not None and path.is_dir():
            raise ConfigError(f"{flag} {path}: is a folder, not a file")
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{flag} {path}: folder {path.parent} not found")


def publish(result: ReplayResult, args: argparse.Namespace) -> None:
    """Print the result, then write the report files. Raises ConfigError if a file cannot be written."""
    line = json.dumps(result.figures, allow_nan=False)
    if args.json == "-":
        print(line, flush=True)
    else:
        _print(result)
    if args.json not in (None, "-"):
        _write("--json", Path(args.json), lambda path: path.write_text(line + "\n", encoding="utf-8"))
    if args.html is not None:
        from quire.replay.report.html import write_html

        _write("--html", args.html, lambda path: write_html(path, result.records))
    if args.perfetto is not None:
        from quire.replay.report.perfetto import write_perfetto

        _write("--perfetto", args.perfetto, lambda path: write_perfetto(path, result.records[-1]))
    if result.problem:
        print(f"quire: {one_line(result.problem)}", file=sys.stderr, flush=True)


def _print(result: ReplayResult) -> None:
    print(*map(one_line, result.head), sep="\n", end="\n\n")
    for table in result.tables:
        print(table.text(), end="\n\n")
    for note in result.notes:
        print(f"note: {one_line(note)}")
    sys.stdout.flush()


def _write(flag: str, path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}") from None
