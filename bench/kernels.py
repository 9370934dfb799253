"""``quire bench kernels``: time of kernels and whole steps, as shares of the device's measured limits.

A separate process (``quire.bench.worker``) measures. This module starts it and makes the tables.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.bench.engine import QUIET_CORES, OtherProcessesClock, default_threads
from quire.bench.measure.report import RunReport, Table, rounded
from quire.bench.measure.shapes import find_shape
from quire.bench.peers import in_checkout
from quire.protocol.errors import ConfigError, EngineError

DEVICE_LOST = 3
"""Exit status of a process that can no longer use its device; a new process may."""

MODELS = ("smollm2-135m", "qwen3-0.6b", "llama-3.1-8b", "gpt-oss-20b")


@dataclass(slots=True)
class ReceivedResults:
    """The results received from the measuring process so far.

    Attributes:
        plan: names of the sections to run; empty before the first message.
        sections: results by name.
    """

    plan: list[str] = field(default_factory=list)
    device: dict[str, Any] = field(default_factory=dict)
    limits: list[dict[str, Any]] = field(default_factory=list)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def missing(self) -> list[str]:
        return [name for name in self.plan if name not in self.sections]


def run(args: argparse.Namespace) -> None:
    """Raises ConfigError for flags that this machine does not support, EngineError if nothing was measured."""
    if args.time_limit is not None and args.time_limit <= 0:
        raise ConfigError(f"--time-limit must be above 0 (got {args.time_limit:g})")
    found, clock, start = ReceivedResults(), OtherProcessesClock(), time.monotonic()
    _measure(args, found, args.sections or "", _seconds_left(args, start))
    # After a crash the other sections run in a new process: an illegal address, for example, makes the GPU unusable
    # for the process that caused it.
    while found.missing:
        if _seconds_left(args, start) > 0:
            _measure(args, found, ",".join(found.missing), _seconds_left(args, start))
        else:
            found.sections |= {name: _lost("not started: no time left") for name in found.missing}
    report = _report(args, found)
    _, others = clock.stop()
    report.results["others_cores"] = others
    if found.device["type"] == "cpu" and others > QUIET_CORES and not args.dry_run:
        report.notes.append(f"other processes used {others:.1f} cores: figures are affected")
    report.publish(args.json)


def _seconds_left(args: argparse.Namespace, start: float) -> float:
    return float("inf") if args.time_limit is None else args.time_limit - (time.monotonic() - start)


def _lost(reason: str) -> dict[str, Any]:
    return {"title": "", "rows": [], "error": reason, "seconds": 0.0}


def _measure(args: argparse.Namespace, found: ReceivedResults, sections: str, seconds: float) -> None:
    """Run the process for ``sections`` ("": all of the device) and add its results to ``found``.

    Adds at least one section: if the process ends during a section, that is the section's error.

    Raises:
        ConfigError: the process refuses the settings.
        EngineError: the process ended before its first message.
    """
    before = len(found.sections)
    command = [sys.executable, "-P", "-m", "quire.bench.worker", "--device", args.device]
    command += ["--sections", sections] if sections else []
    command += ["--quick"] if args.quick else []
    command += ["--dry-run"] if args.dry_run else []
    command += ["--time-limit", f"{seconds:.1f}"] if args.time_limit else []
    rivals = in_checkout("attention.py")
    command += ["--rivals", str(rivals)] if rivals.is_file() else []
    shapes = msgspec.json.encode({name: find_shape(name) for name in MODELS})
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment(args)) as process:
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # the exit status has the reason
            process.stdin.write(shapes)
            process.stdin.close()
        for line in process.stdout:
            _add(json.loads(line), found)
        status = process.wait()
    if not found.plan:
        raise EngineError(f"measuring process exited with status {status} before its first result")
    # With DEVICE_LOST it exits between two sections.
    if found.missing and (status != DEVICE_LOST or len(found.sections) == before):
        found.sections[found.missing[0]] = _lost(f"process exited with status {status}")


def _environment(args: argparse.Namespace) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": str(default_threads())}
    if not args.dry_run:
        return os.environ | threads
    return os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def _add(message: dict[str, Any], found: ReceivedResults) -> None:
    if "refused" in message:
        raise ConfigError(message["refused"])
    if "plan" in message:
        if not found.plan:
            found.plan, found.device, found.limits = message["plan"], message["device"], message["limits"]
        return
    name = message.pop("section")
    found.sections[name] = message
    print(f"{name}: {message['seconds']:.1f} s{', ' if message['error'] else ''}{message['error']}", file=sys.stderr)


def _report(args: argparse.Namespace, found: ReceivedResults) -> RunReport:
    settings = {
        "device": found.device,
        "sections": found.plan,
        "quick": args.quick,
        "dry_run": args.dry_run,
        "time_limit": args.time_limit,
    }
    results = {"limits": found.limits, "sections": found.sections}
    report = RunReport("kernels", settings, rounded(results, 4))
    report.tables.append(_table("limits", found.limits))
    for name, section in found.sections.items():
        if section["rows"]:
            report.tables.append(_table(section["title"], section["rows"]))
        if section["error"]:
            report.notes.append(f"{name}: {section['error']}")
        for row in section["rows"]:
            if row["error"]:
                report.notes.append(f"{name}, {row['case']}, {row['implementation']}: {row['error']}")
    if args.dry_run:
        report.notes.append("dry run with tiny sizes and interpreted GPU kernels: figures are meaningless")
    return report


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table with a row per case: time of each implementation, then the other figures of Quire's own."""
    names = sorted(dict.fromkeys(row["implementation"] for row in rows), key=lambda name: name != "quire")
    first = names[0]
    extras = list(dict.fromkeys(key for row in rows if row["implementation"] == first for key in row["figures"]))
    columns = [f"{name}, µs" for name in names] + [extra.replace("_", " ") for extra in extras]
    lines: list[tuple[str, list[float | str | None]]] = []
    for case in dict.fromkeys(row["case"] for row in rows):
        by_name = {row["implementation"]: row for row in rows if row["case"] == case}
        figures = by_name.get(first, {}).get("figures", {})
        lines.append((case, [*_times(names, by_name), *(figures.get(extra) for extra in extras)]))
    return Table(title, columns, lines)


def _times(names: Sequence[str], by_name: dict[str, dict[str, Any]]) -> Iterator[float | str | None]:
    for name in names:
        row = by_name.get(name)
        yield None if row is None else "failed" if row["error"] else row["us"]
