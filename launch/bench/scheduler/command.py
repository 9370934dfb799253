"""``quire bench scheduler``: what the scheduler process pays for a step, alone and beside another engine's scheduler.

Every section is measured in a fresh process on one core, by turns with the peer's where one is named.
"""

import argparse
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from quire.launch.bench.peers import PeerFailed, run_json
from quire.launch.bench.scheduler.scheduler_churn import load_churn_trace
from quire.launch.bench.scheduler.scheduler_peer import SchedulerPeer, Tree, median_of, one_core, ratio_of
from quire.launch.bench.scheduler.scheduler_sections import SECTIONS
from quire.launch.measure.report import Report, Table, flat
from quire.protocol.errors import ConfigError, EngineError, did_you_mean

CHILD = "quire.launch.bench.scheduler.scheduler_sections"
MAX_REPEATS = 100

WHAT_A_STEP_IS = (
    "a step of ours: schedule() and encoding the SchedulerOutput to frames; then, from the decoded ModelRunnerOutput, "
    "consume(), take_messages() and encoding the StepOutputs to frames. The peer's figures have neither encoding."
)
WHAT_TIME_IS = "CPU time, µs: ours of the whole process, helper threads included; the peer's of its one thread"
WHAT_BUILD_IS = (
    "build_and_add: ours checks, builds, hashes and queues in one call, and hashing's us_per_1k_tokens is of that "
    "call; the peer's us_per_1k_tokens is of hashing alone"
)

# Which of a section's figures, by their paths, the table shows; the JSON has them all.
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
}


class SchedulerReport(Report):
    """The JSON line begins with ``ours``, ``peer`` and ``ratio`` themselves."""

    def as_dict(self) -> dict[str, Any]:
        facts = super().as_dict()
        results: dict[str, Any] = facts.pop("results")
        return results | facts


def run(args: argparse.Namespace) -> None:
    """Raises ConfigError for a flag that cannot be used, EngineError when our own process fails."""
    sections = parse_sections(args.sections)
    if not 1 <= args.repeats <= MAX_REPEATS:
        raise ConfigError(f"--repeats must be from 1 to {MAX_REPEATS}, not {args.repeats}")
    peer = find_peer(args.peer, args.peer_driver)
    if args.peer_driver is not None:
        load_churn_trace(args.peer_driver)
    with one_core():
        ours, theirs = measure_by_turns(sections, args.repeats, peer, args.peer_driver, args.cruise)
    make_report(sections, args, ours, theirs).publish(args.json)


def parse_sections(text: str | None) -> list[str]:
    """The named sections; all when none are. Raises ConfigError for an unknown one."""
    if not text:
        return list(SECTIONS)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SECTIONS:
            known = ", ".join(SECTIONS)
            raise ConfigError(f"--sections: unknown section {name!r}{did_you_mean(name, SECTIONS)} (known: {known})")
    return list(dict.fromkeys(names))


def find_peer(python: Path | None, driver: Path | None) -> SchedulerPeer | None:
    """Raises ConfigError when the peer is named but cannot be run."""
    if python is None:
        return None
    if driver is None:
        raise ConfigError("--peer needs --peer-driver, the file that drives the peer's scheduler")
    return SchedulerPeer(python, driver)


def measure_by_turns(
    sections: list[str], repeats: int, peer: SchedulerPeer | None, driver: Path | None, cruise: bool
) -> tuple[Tree, Tree | None]:
    """Medians over the repeats: ours, and the peer's. A section in which the peer fails has its error."""
    ours: list[Tree] = []
    theirs: list[Tree] = []
    for repeat in range(repeats):
        ours.append({})
        theirs.append({})
        for section in sections:
            print(f"{section} ({repeat + 1} of {repeats})", file=sys.stderr, flush=True)
            ours[-1] |= _measure_ours(section, driver, cruise)
            if peer is not None:
                try:
                    theirs[-1] |= peer.measure(section)
                except PeerFailed as error:
                    theirs[-1] |= {section: {"error": str(error)}}
    return median_of(ours), median_of(theirs) if peer is not None else None


def _measure_ours(section: str, driver: Path | None, cruise: bool) -> Tree:
    command = [sys.executable, "-P", "-m", CHILD, section]
    if driver is not None:
        command += ["--trace-from", str(driver)]
    try:
        return run_json(command if cruise else [*command, "--no-cruise"])
    except PeerFailed as error:
        raise EngineError(f"section {section}: {error}") from None


def make_report(sections: list[str], args: argparse.Namespace, ours: Tree, theirs: Tree | None) -> Report:
    """Tables of what ``SHOWN`` names; the JSON has everything."""
    settings = {"sections": sections, "repeats": args.repeats, "cruise": args.cruise, "block_size": 16}
    ratio = None if theirs is None else ratio_of(ours, theirs)
    report = SchedulerReport("scheduler", settings, {"ours": ours, "peer": theirs, "ratio": ratio})
    report.tables = [make_table(section, ours[section], theirs) for section in sections]
    report.notes = [WHAT_A_STEP_IS, WHAT_TIME_IS, WHAT_BUILD_IS]
    report.notes.append(f"reading the clock takes {ours['env']['clock_call_us']} µs; nothing is subtracted for it")
    for section in sections if theirs is not None else ():
        if "error" in (theirs or {})[section]:
            report.notes.append(f"the peer failed in {section}: {(theirs or {})[section]['error']}")
    return report


def make_table(section: str, ours: Tree, theirs: Tree | None) -> Table:
    """ours / peer / ratio, or ours alone."""
    peer = {} if theirs is None else flat(theirs.get(section, {}))
    rows: list[tuple[str, list[float | str | None]]] = []
    for path, value in flat(ours).items():
        named = any(fnmatchcase(path, pattern) for pattern in SHOWN[section])
        if named and isinstance(value, int | float):
            other = peer.get(path)
            rows.append((path, [value] if theirs is None else [value, other, ratio_of(value, other)]))
    return Table(section, ("ours",) if theirs is None else ("ours", "peer", "peer / ours"), rows)
