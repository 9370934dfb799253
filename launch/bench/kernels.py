"""``quire bench kernels``: kernels and whole steps on this machine's device, as shares of what the device can do.

What measures is a process of the worker's (``quire.worker_proc.bench``): here are its settings and its tables.
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

from quire.launch.bench.engine import QUIET_CORES, OthersClock, default_threads
from quire.launch.bench.peers import in_checkout
from quire.launch.measure.report import Report, Table, rounded
from quire.launch.measure.shapes import find_shape
from quire.protocol.errors import ConfigError, EngineError

DEVICE_LOST = 3
"""Exit status of a process that can measure nothing more on its device; the next one may."""

MODELS = ("smollm2-135m", "qwen3-0.6b", "llama-3.1-8b")


@dataclass(slots=True)
class Found:
    """What the measuring process has said so far.

    Attributes:
        plan: the names of the sections that it runs; empty before its first word.
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
    """Raises ConfigError for flags that this machine cannot do, EngineError when nothing was measured at all."""
    if args.time_limit is not None and args.time_limit <= 0:
        raise ConfigError(f"--time-limit must be more than 0, not {args.time_limit:g}")
    found, clock, begun = Found(), OthersClock(), time.monotonic()
    _measure(args, found, args.sections or "", _seconds_left(args, begun))
    # Whatever ended it (an illegal address on a GPU stays for the life of its process) may not end the others.
    while found.missing:
        if _seconds_left(args, begun) > 0:
            _measure(args, found, ",".join(found.missing), _seconds_left(args, begun))
        else:
            found.sections |= {name: _lost("not begun: no time was left") for name in found.missing}
    report = _report(args, found)
    _, others = clock.stop()
    report.results["others_cores"] = others
    if found.device["type"] == "cpu" and others > QUIET_CORES and not args.dry_run:
        report.notes.append(f"Other processes kept {others:.1f} cores busy meanwhile: these figures are theirs too.")
    report.publish(args.json)


def _seconds_left(args: argparse.Namespace, begun: float) -> float:
    return float("inf") if args.time_limit is None else args.time_limit - (time.monotonic() - begun)


def _lost(why: str) -> dict[str, Any]:
    return {"title": "", "rows": [], "error": why, "seconds": 0.0}


def _measure(args: argparse.Namespace, found: Found, sections: str, seconds: float) -> None:
    """Run the process over ``sections`` (empty: all of the device's) and take in what it says.

    At least one section is not missing afterwards: where the process ended within one, that is its result.

    Raises:
        ConfigError: it refuses the settings.
        EngineError: it ended before it began.
    """
    before = len(found.sections)
    command = [sys.executable, "-P", "-m", "quire.worker_proc.bench", "--device", args.device]
    command += ["--sections", sections] if sections else []
    command += ["--quick"] if args.quick else []
    command += ["--dry-run"] if args.dry_run else []
    command += ["--time-limit", f"{seconds:.1f}"] if args.time_limit else []
    rivals = in_checkout("attention.py")
    command += ["--rivals", str(rivals)] if rivals.is_file() else []
    shapes = msgspec.json.encode({name: find_shape(name) for name in MODELS})
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment(args)) as process:
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # its status tells why
            process.stdin.write(shapes)
            process.stdin.close()
        for line in process.stdout:
            _take(json.loads(line), found)
        status = process.wait()
    if not found.plan:
        raise EngineError(f"the measuring process ended with status {status} before it measured anything")
    # With this status it ended between two sections.
    if found.missing and (status != DEVICE_LOST or len(found.sections) == before):
        found.sections[found.missing[0]] = _lost(f"its process ended with status {status}")


def _environment(args: argparse.Namespace) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": str(default_threads())}
    if not args.dry_run:
        return os.environ | threads
    return os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def _take(message: dict[str, Any], found: Found) -> None:
    if "refused" in message:
        raise ConfigError(message["refused"])
    if "plan" in message:
        if not found.plan:
            found.plan, found.device, found.limits = message["plan"], message["device"], message["limits"]
        return
    name = message.pop("section")
    found.sections[name] = message
    print(f"{name}: {message['seconds']:.1f} s{', ' if message['error'] else ''}{message['error']}", file=sys.stderr)


def _report(args: argparse.Namespace, found: Found) -> Report:
    settings = {
        "device": found.device,
        "sections": found.plan,
        "quick": args.quick,
        "dry_run": args.dry_run,
        "time_limit": args.time_limit,
    }
    results = {"limits": found.limits, "sections": found.sections}
    report = Report("kernels", settings, rounded(results, 4))
    report.tables.append(_table("limits", found.limits))
    for name, section in found.sections.items():
        if section["rows"]:
            report.tables.append(_table(section["title"], section["rows"]))
        if section["error"]:
            report.notes.append(f"{name}: {section['error']}")
        for row in section["rows"]:
            if row["error"]:
                report.notes.append(f"{name}, {row['case']}, {row['way']}: {row['error']}")
    if args.dry_run:
        report.notes.append("A dry run: sizes are tiny and the GPU's kernels interpreted; no figure means anything.")
    return report


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """A line per case: microseconds of every way, then what else is known of the first way, ours."""
    ways = sorted(dict.fromkeys(row["way"] for row in rows), key=lambda way: way != "ours")
    first = ways[0]
    extras = list(dict.fromkeys(key for row in rows if row["way"] == first for key in row["figures"]))
    columns = [f"{way}, µs" for way in ways] + [extra.replace("_", " ") for extra in extras]
    lines: list[tuple[str, list[float | str | None]]] = []
    for case in dict.fromkeys(row["case"] for row in rows):
        by_way = {row["way"]: row for row in rows if row["case"] == case}
        figures = by_way.get(first, {}).get("figures", {})
        lines.append((case, [*_times(ways, by_way), *(figures.get(extra) for extra in extras)]))
    return Table(title, columns, lines)


def _times(ways: Sequence[str], by_way: dict[str, dict[str, Any]]) -> Iterator[float | str | None]:
    for way in ways:
        row = by_way.get(way)
        yield None if row is None else "failed" if row["error"] else row["us"]
