"""What a replay shows: tables or JSON on stdout, files of several kinds, a bar while it runs."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from quire.launch.measure.report import Table
from quire.launch.replay.report.summary import summary, tables
from quire.launch.replay.run.run_record import RunRecord
from quire.protocol.errors import ConfigError

PROGRESS_AFTER_S = 2.0
Progress = Callable[[float, int], None]


@dataclass(slots=True)
class Result:
    """What is to be shown.

    Attributes:
        head, notes: lines above and below the tables.
        figures: for ``--json``.
        complaint: last, to stderr: what is wrong with what was replayed.
    """

    figures: Any
    records: Sequence[RunRecord]
    head: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complaint: str = ""
    exit_status: int = 0


def result_of(record: RunRecord) -> Result:
    found = summary(record)
    head = [record.title, f"cost: {record.cost}"]
    if record.settings:
        head.append("settings: " + " ".join(f"{key}={value}" for key, value in record.settings.items()))
    return Result(found, [record], head, tables(found), list(record.notes))


@contextmanager
def progress_bar(total: int | None, unit: str = " requests") -> Iterator[Progress]:
    """A bar on a terminal, for runs that take a while; told of the run's own seconds and of what has ended."""
    with tqdm(
        total=total,
        desc="Replay",
        unit=unit,
        file=sys.stderr,
        delay=PROGRESS_AFTER_S,
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:

        def tell(now: float, ended: int) -> None:
            bar.set_postfix_str(f"{now:,.0f} s", refresh=False)
            bar.update(ended - bar.n)

        yield tell


def check_outputs(args: argparse.Namespace) -> None:
    """Before the run: nobody wants to hear after an hour that there is no such folder."""
    named = (("--json", None if args.json in (None, "-") else Path(args.json)), ("--html", args.html))
    for flag, path in (*named, ("--perfetto", args.perfetto)):
        if path is not None and path.is_dir():
            raise ConfigError(f"{flag} {path}: is a folder")
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{flag} {path}: there is no folder {path.parent}")


def publish(result: Result, args: argparse.Namespace) -> None:
    """Raises ConfigError: a file cannot be written; what goes to stdout is there by then."""
    line = json.dumps(result.figures, allow_nan=False)
    if args.json == "-":
        print(line, flush=True)
    else:
        _print(result)
    if args.json not in (None, "-"):
        _write("--json", Path(args.json), lambda path: path.write_text(line + "\n", encoding="utf-8"))
    if args.html is not None:
        from quire.launch.replay.report.html import write_html

        _write("--html", args.html, lambda path: write_html(path, result.records))
    if args.perfetto is not None:
        from quire.launch.replay.report.perfetto import write_perfetto

        _write("--perfetto", args.perfetto, lambda path: write_perfetto(path, result.records[0]))
    if result.complaint:
        print(f"quire: {result.complaint}", file=sys.stderr, flush=True)


def _print(result: Result) -> None:
    print(*result.head, sep="\n", end="\n\n")
    for table in result.tables:
        print(table.text(), end="\n\n")
    for note in result.notes:
        print(f"note: {note}")
    sys.stdout.flush()


def _write(flag: str, path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}") from None
