"""``run.py faults``: kill the processes of a running server, and check the answers of its clients."""

import argparse
import asyncio
import os
import random
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import psutil
from fault_server import FaultServer, Role, has_settled, wait_until
from fault_slots import AnswerCounts, Slots
from live_streams import Answer, StreamRequest, make_requests, stream
from raw_http import get
from tqdm import tqdm

from quire.bench.measure.http_client import parse_metrics
from quire.bench.measure.report import DISTRIBUTION_COLUMNS, RunReport, Table, distribution, distribution_row, rounded
from quire.protocol.errors import ConfigError

Kind = Literal["worker", "worker-stop", "scheduler", "frontend", "supervisor"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ROLES: dict[Kind, Role] = {
    "worker": "worker",
    "worker-stop": "worker",
    "scheduler": "scheduler",
    "frontend": "frontend",
}
NUM_REQUESTS = 45
RECOVERY_S = 60.0
STANDBY_S = 20.0
ORPHANS_S = 2.0
"""Seconds that a child may outlive the supervisor."""
FINISH_S = 60.0
DELAY_S = (0.05, 1.0)
"""Range of the random delay between the time when all streams receive data and the next death."""


@dataclass(slots=True)
class FaultRecord:
    """One death and its effects, in seconds from the signal.

    Attributes:
        noticed: until the server logged it.
        next_token: until the end of the longest silence. None if other streams continued all the time.
        all_tokens: until every stream had its next token.
        gone: for a supervisor, until no process or file of the server was left.
        kept: of the contents in tiers (docs/tiers.md) at the death, the part that is there when all streams continue.
    """

    kind: Kind
    noticed: float | None = None
    next_token: float | None = None
    all_tokens: float | None = None
    gone: float | None = None
    kept: float | None = None


@dataclass(slots=True)
class Outcome:
    """Results of a whole run. ``problems``: violations, as text; a run without any passes."""

    records: list[FaultRecord] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


def run(args: argparse.Namespace) -> None:
    """Run the harness. Exit status 1 if an answer was lost or changed, or anything was left behind.

    Raises:
        ConfigError: a flag is invalid, or the server does not start.
    """
    for name in ("count", "streams", "tensor_parallel_size", "api_server_count"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1 (got {getattr(args, name)})")
    busy = os.getloadavg()[0]
    # SIGTERM raises SystemExit, so that the server is stopped.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        outcome = asyncio.run(run_faults(args))
    finally:
        signal.signal(signal.SIGTERM, before)
    report = make_report(args, outcome)
    report.results["load_before"] = round(busy, 2)
    report.publish(args.json)
    if outcome.problems:
        sys.exit(1)


async def run_faults(args: argparse.Namespace) -> Outcome:
    """Run the harness without its report."""
    outcome = Outcome()
    draw = random.Random(args.seed)
    requests = make_requests(NUM_REQUESTS, args.seed)
    with tqdm(total=args.count, desc="Deaths", file=sys.stderr) as bar:
        if args.kill == "supervisor":
            for _ in range(args.count):
                await _kill_supervisor(args, requests, draw, outcome)
                bar.update()
        else:
            kinds = [kind for kind in KINDS if kind != "supervisor"] if args.kill == "all" else [args.kill]
            await _kill_others(args, requests, [draw.choice(kinds) for _ in range(args.count)], draw, outcome, bar)
            if args.kill == "all":
                await _kill_supervisor(args, requests, draw, outcome)
    return outcome


def server_flags(args: argparse.Namespace) -> list[str]:
    flags = ["--dtype", "float32", "--tensor-parallel-size", str(args.tensor_parallel_size)]
    flags += ["--api-server-count", str(args.api_server_count), "--max-num-seqs", str(2 * args.streams)]
    flags += ["--deterministic"] if args.deterministic else []
    flags += [] if args.standby else ["--no-standby-workers"]
    return flags + shlex.split(args.serve_args or "")


# ---- all processes except the supervisor


async def _kill_others(
    args: argparse.Namespace,
    requests: Sequence[StreamRequest],
    kinds: Sequence[Kind],
    draw: random.Random,
    outcome: Outcome,
    bar: "tqdm[Any]",
) -> None:
    with FaultServer(server_flags(args), num_ranks=args.tensor_parallel_size) as server:
        counts = AnswerCounts(await references(server.port, requests), exact=args.deterministic)
        slots = Slots(server.port, requests, args.streams, args.seed, counts)
        try:
            if not await slots.wait_for_data(0.0, RECOVERY_S):
                outcome.problems.append("the streams did not start")
                return
            for kind in kinds:
                record = await _kill_one(server, slots, kind, draw, standby=args.standby)
                outcome.records.append(record)
                bar.update()
                if record.all_tokens is None:
                    outcome.problems.append(f"after a {kind} death a stream had no token for {RECOVERY_S:g} s")
                    break
            unfinished = await slots.finish(FINISH_S)
        finally:
            slots.cancel()
        await _check_shutdown(server, outcome, unfinished)
    _count(outcome, counts)


async def references(port: int, requests: Sequence[StreamRequest]) -> list[Answer]:
    """Return each request's answer without faults.

    Raises:
        ConfigError: a request was not answered.
    """
    answers = await asyncio.gather(*(stream(port, request) for request in requests))
    for number, answer in enumerate(answers):
        if answer.error or answer.contradiction():
            raise ConfigError(f"request {number} failed without faults: {answer.error or answer.contradiction()}")
    return answers


async def _kill_one(
    server: FaultServer, slots: Slots, kind: Kind, draw: random.Random, *, standby: bool
) -> FaultRecord:
    if standby and kind.startswith("worker"):
        await asyncio.to_thread(wait_until, lambda: _standbys_ready(server), STANDBY_S)
    await asyncio.sleep(draw.uniform(*DELAY_S))
    victim = draw.choice(server.victims(ROLES[kind]))
    if kind == "frontend":
        slots.expect_cut(_client_ports(victim))
    cached = await _cached_in_tiers(server.port)
    slots.arrivals.clear()
    record, began = FaultRecord(kind), time.monotonic()
    victim.send_signal(signal.SIGSTOP if kind == "worker-stop" else signal.SIGKILL)
    while (noticed := server.noticed(began)) is None:
        if time.monotonic() > began + RECOVERY_S:
            return record
        await asyncio.sleep(0.005)
    record.noticed = noticed - began
    if not await slots.wait_for_data(noticed, RECOVERY_S):
        return record
    resumed = began
    if kind != "frontend":
        resumed = slots.end_of_silence(began)
        record.next_token = resumed - began
    record.all_tokens = max(slots.first_arrivals(resumed)) - began
    if cached:
        record.kept = await _cached_in_tiers(server.port) / cached
    return record


async def _cached_in_tiers(port: int) -> float:
    """Return the number of blocks whose content is in a tier."""
    return parse_metrics((await get(port, "/metrics"))[1]).get("tier_num_cached_blocks", 0.0)


def _standbys_ready(server: FaultServer) -> bool:
    standbys = server.standbys()
    return len(standbys) == server.num_ranks and all(has_settled(process) for process in standbys)


def _client_ports(front_end: psutil.Process) -> set[int]:
    """Stop the front end and return the client ports of its connections, which then no longer change."""
    front_end.suspend()
    wait_until(lambda: front_end.status() == psutil.STATUS_STOPPED, 1.0)
    return {c.raddr.port for c in psutil.net_connections("tcp") if c.pid == front_end.pid and c.raddr}


async def _check_shutdown(server: FaultServer, outcome: Outcome, unfinished: int) -> None:
    """Check that the engine is idle, stop the server, and check for leftovers."""
    if unfinished:
        outcome.problems.append(f"{unfinished} answers did not end within {FINISH_S:g} s after the last death")
    deadline = time.monotonic() + ORPHANS_S
    while held := _held((await get(server.port, "/metrics"))[1]):
        if time.monotonic() > deadline:
            outcome.problems.append(f"the engine is not idle: {held}")
            break
        await asyncio.sleep(0.05)
    status = await asyncio.to_thread(server.stop)
    if status != 0:
        outcome.problems.append(f"the server exited with status {status}")
    # Helpers of a front end exit when their pipe closes, which a busy machine delays.
    await asyncio.to_thread(wait_until, lambda: not server.leftovers(), RECOVERY_S)
    outcome.problems += server.leftovers()


def _held(metrics: str) -> str:
    """Describe what the engine still holds; empty if nothing."""
    names = ("num_requests_running", "num_requests_waiting", "num_free_blocks", "num_usable_blocks")
    found = {line.split("{")[0].removeprefix("quire:"): line.split()[-1] for line in metrics.splitlines()}
    if any(name not in found for name in names):
        return "gauges are missing in /metrics"
    running, waiting, free, usable = (float(found[name]) for name in names)
    clean = not running and not waiting and free == usable
    return "" if clean else f"{running:g} running, {waiting:g} waiting, {free:g} of {usable:g} blocks free"


# ---- the supervisor


async def _kill_supervisor(
    args: argparse.Namespace, requests: Sequence[StreamRequest], draw: random.Random, outcome: Outcome
) -> None:
    """Kill the supervisor of a separate server and check what is left; half the time one of its children is stopped
    first.
    """
    with FaultServer(server_flags(args), num_ranks=args.tensor_parallel_size) as server:
        slots = Slots(server.port, requests, args.streams, args.seed, None)
        try:
            if not await slots.wait_for_data(0.0, RECOVERY_S):
                outcome.problems.append("the streams did not start")
            await asyncio.sleep(draw.uniform(*DELAY_S))
            children = server.orphans()
            if draw.random() < 0.5:
                draw.choice(children).suspend()
            began = time.monotonic()
            server.process.kill()
            server.process.wait()
            gone = await asyncio.to_thread(wait_until, lambda: not server.leftovers(), RECOVERY_S)
        finally:
            slots.cancel()
        outcome.records.append(FaultRecord("supervisor", gone=None if gone is None else time.monotonic() - began))
        if gone is None or gone > ORPHANS_S:
            outcome.problems += server.leftovers() or [f"the server was gone only {gone:.1f} s after the supervisor"]


# ---- results


def _count(outcome: Outcome, counts: AnswerCounts) -> None:
    outcome.counts = {
        "completed": counts.num_whole,
        "failed": counts.num_failed,
        "changed": counts.num_changed,
        "diverged": counts.num_diverged,
        "cut_with_front_end": counts.num_lost,
        "tokens": counts.num_tokens,
    }
    outcome.problems += counts.examples


def make_report(args: argparse.Namespace, outcome: Outcome) -> RunReport:
    names = ("kill", "count", "streams", "tensor_parallel_size", "api_server_count", "deterministic", "standby", "seed")
    names = (*names, "serve_args")
    report = RunReport("faults", {name: getattr(args, name) for name in names})
    measures = {"noticed": "noticed", "next_token": "next token", "all_tokens": "all streams", "gone": "all gone"}
    rows = []
    for kind in KINDS:
        records = [record for record in outcome.records if record.kind == kind]
        for name, words in measures.items():
            found = distribution(1000 * value for record in records if (value := getattr(record, name)) is not None)
            if found:
                rows.append(distribution_row(f"{kind}: {words}, ms", found))
                report.results.setdefault(kind, {"deaths": len(records)})[f"{name}_ms"] = rounded(found, 1)
    report.tables.append(Table("from the signal", DISTRIBUTION_COLUMNS, rows))
    if kept := [record.kept for record in outcome.records if record.kept is not None]:
        report.results["kept_in_tiers"] = round(min(kept), 3)
    counts = [(name.replace("_", " "), [value]) for name, value in outcome.counts.items()]
    report.tables.append(Table("answers", ("",), [*counts, ("problems", [len(outcome.problems)])]))
    report.results |= outcome.counts | {"problems": len(outcome.problems)}
    report.notes += [f"problem: {text[:300]}" for text in outcome.problems]
    return report
