"""``quire bench scheduler``: CPU time of the scheduler process per step, optionally next to another engine's scheduler.

Every section runs in a fresh process on one core; with a peer, the two engines alternate.
"""

import argparse
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from quire.bench.measure.report import RunReport, Table, flat
from quire.bench.peers import PeerFailed, run_json
from quire.bench.scheduler.scheduler_churn import load_churn_trace
from quire.bench.scheduler.scheduler_peer import SchedulerPeer, Tree, median_of, one_core, ratio_of
from quire.bench.scheduler.scheduler_sections import SECTIONS
from quire.protocol.errors import ConfigError, did_you_mean

CHILD = "quire.bench.scheduler.scheduler_sections"
MAX_REPEATS = 100

STEP_NOTE = (
    "a step of Quire: schedule() and encoding the SchedulerOutput; then, from the decoded ModelRunnerOutput, "
    "consume(), take_messages() and encoding the StepOutputs. The peer's figures have no encoding."
)
TIME_NOTE = "CPU time, µs: for Quire of the whole process with its helper threads, for the peer of its one thread"
BUILD_NOTE = (
    "build_and_add: Quire checks, builds, hashes and queues in one call, and hashing's us_per_1k_tokens is the time of "
    "that call; the peer's us_per_1k_tokens is of hashing alone"
)

# Figures shown in the table, as patterns of paths per section; the JSON has all figures.
SHOWN: dict[str, tuple[str, ...]] = {
    "steady": ("*.both.mean_us", "*.both.median_us", "*.both.p99_us"),
    "admission": ("*.median_us", "*.p99_us", "*hit_tokens"),
    "hashing": ("*us_per_1k*", "request_*.median_us", "request_*.p99_us"),
    "churn": (
        "*.both.mean_us",
        "*.both.median_us",
        "*.both.p99_us",
        "*.scheduler_seconds_incl_request_build",
        "*.build_and_add_mean_us",
        "*.preemptions",
        "*.requests_finished",
        "*.gc.max_pause_ms",
    ),
    "wire": ("*bytes*", "*.encode.mean_us", "*.decode.mean_us"),
    "outputs": ("bytes*", "encode.mean_us", "decode.mean_us"),
    "memory": ("*_MB_*", "construct_ms"),
    "trace": ("*_us", "*_bytes", "*.lost_lines"),
    "layouts": ("*.step_us", "*.ratio"),
    "loads": ("*_percent", "most_over_pure"),
    "tiers": ("*_us", "*.ratio", "*us_per_*"),
    "forks": ("*_us", "*us_per_block", "*_bytes", "*.computed_tokens", "*.kv_blocks"),
}


class SchedulerReport(RunReport):
    """A report whose JSON has ``ours``, ``peer`` and ``ratio`` at the top level."""

    def as_dict(self) -> dict[str, Any]:
        facts = super().as_dict()
        results: dict[str, Any] = facts.pop("results")
        return results | facts


def run(args: argparse.Namespace) -> None:
    """Exit with status 1 if a section of Quire failed; the figures of the others are printed.

    Raises:
        ConfigError: a flag is invalid.
    """
    sections = parse_sections(args.sections)
    if not 1 <= args.repeats <= MAX_REPEATS:
        raise ConfigError(f"--repeats must be from 1 to {MAX_REPEATS} (got {args.repeats})")
    peer = find_peer(args.peer, args.peer_driver)
    if args.peer_driver is not None:
        load_churn_trace(args.peer_driver)
    with one_core():
        own, other = measure_alternating(sections, args.repeats, peer, args.peer_driver, args.steady)
    make_report(sections, args, own, other).publish(args.json)
    if any("error" in own.get(section, {}) for section in sections):
        sys.exit(1)


def parse_sections(text: str | None) -> list[str]:
    """Parse the value of --sections, by default all. Raises ConfigError for an unknown section."""
    if not text:
        return list(SECTIONS)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SECTIONS:
            known = ", ".join(SECTIONS)
            raise ConfigError(f"--sections: unknown section {name!r}{did_you_mean(name, SECTIONS)} (known: {known})")
    return list(dict.fromkeys(names))


def find_peer(python: Path | None, driver: Path | None) -> SchedulerPeer | None:
    """Return the peer of --peer, or None. Raises ConfigError if it cannot be run."""
    if python is None:
        return None
    if driver is None:
        raise ConfigError("--peer requires --peer-driver FILE, the script that drives the peer's scheduler")
    return SchedulerPeer(python, driver)


def measure_alternating(
    sections: list[str], repeats: int, peer: SchedulerPeer | None, driver: Path | None, steady: bool
) -> tuple[Tree, Tree | None]:
    """Measure all sections, alternating with the peer. Return medians over the repeats of Quire and of the peer.

    If a section of Quire or of the peer fails, its figures there are the error.
    """
    own: list[Tree] = []
    other: list[Tree] = []
    for repeat in range(repeats):
        own.append({})
        other.append({})
        for section in sections:
            print(f"{section} ({repeat + 1} of {repeats})", file=sys.stderr, flush=True)
            own[-1] |= _measure_section(section, driver, steady)
            if peer is not None:
                try:
                    other[-1] |= peer.measure(section)
                except PeerFailed as error:
                    other[-1] |= {section: {"error": str(error)}}
    return median_of(own), median_of(other) if peer is not None else None


def _measure_section(section: str, driver: Path | None, steady: bool) -> Tree:
    command = [sys.executable, "-P", "-m", CHILD, section]
    if driver is not None:
        command += ["--trace-from", str(driver)]
    try:
        return run_json(command if steady else [*command, "--no-steady"])
    except PeerFailed as error:
        return {section: {"error": str(error)}}


def make_report(sections: list[str], args: argparse.Namespace, own: Tree, other: Tree | None) -> RunReport:
    """Make tables of the figures in ``SHOWN``, and JSON of all figures."""
    settings = {"sections": sections, "repeats": args.repeats, "steady": args.steady, "block_size": 16}
    ratio = None if other is None else ratio_of(own, other)
    report = SchedulerReport("scheduler", settings, {"ours": own, "peer": other, "ratio": ratio})
    report.tables = [make_table(section, own[section], other) for section in sections]
    report.notes = [STEP_NOTE, TIME_NOTE, BUILD_NOTE]
    if "env" in own:
        report.notes.append(f"reading the clock takes {own['env']['clock_call_us']} µs, which is not subtracted")
    for name, figures in (("quire", own), ("peer", other or {})):
        for section in sections:
            if "error" in figures.get(section, {}):
                report.notes.append(f"{name} failed in {section}: {figures[section]['error']}")
    return report


def make_table(section: str, own: Tree, other: Tree | None) -> Table:
    """Return a table of Quire's figures, and with a peer also its figures and the ratios."""
    peer = {} if other is None else flat(other.get(section, {}))
    rows: list[tuple[str, list[float | str | None]]] = []
    for path, value in flat(own).items():
        shown = any(fnmatchcase(path, pattern) for pattern in SHOWN[section])
        if shown and isinstance(value, int | float):
            peer_value = peer.get(path)
            rows.append((path, [value] if other is None else [value, peer_value, ratio_of(value, peer_value)]))
    return Table(section, ("quire",) if other is None else ("quire", "peer", "peer / quire"), rows)
