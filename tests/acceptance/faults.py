"""``run.py faults``: kill the processes of a running server, and see what its clients notice."""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import psutil
from fault_server import FaultServer, Role, has_settled, wait_until
from fault_slots import Slots, Verdicts
from live_streams import Answer, Ask, make_asks, stream
from raw_http import get
from tqdm import tqdm

from quire.launch.measure.report import DISTRIBUTION_COLUMNS, Report, Table, distribution, distribution_row, rounded
from quire.protocol.errors import ConfigError

Kind = Literal["worker", "worker-stop", "scheduler", "frontend", "supervisor"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ROLES: dict[Kind, Role] = {
    "worker": "worker",
    "worker-stop": "worker",
    "scheduler": "scheduler",
    "frontend": "frontend",
}
NUM_ASKS = 45
RECOVERY_S = 60.0
STANDBY_S = 20.0
ORPHANS_S = 2.0
"""How long a child may live when the supervisor is dead."""
FINISH_S = 60.0
CALM_S = (0.05, 1.0)
"""Between the moment when all streams flow and the next death: drawn from this range."""


@dataclass(slots=True)
class Blow:
    """One death, and how long it was felt; seconds from the signal.

    Attributes:
        noticed: until the server said so.
        next_token: until the end of the longest silence. None where others went on all the time.
        all_tokens: until every stream had its next token.
        gone: of a supervisor: until nothing of the server was there any more.
    """

    kind: Kind
    noticed: float | None = None
    next_token: float | None = None
    all_tokens: float | None = None
    gone: float | None = None


@dataclass(slots=True)
class Outcome:
    """Of a whole run. ``problems``: in words, whatever should not have happened; none is a pass."""

    blows: list[Blow] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


def run(args: argparse.Namespace) -> None:
    """Exit status 1 when anything was lost, changed or left behind. Raises ConfigError: a flag, or no server."""
    for name in ("count", "streams", "tensor_parallel_size", "api_server_count"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    busy = os.getloadavg()[0]
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the server ends as well
    try:
        outcome = asyncio.run(strike(args))
    finally:
        signal.signal(signal.SIGTERM, before)
    report = make_report(args, outcome)
    report.results["load_before"] = round(busy, 2)
    report.publish(args.json)
    if outcome.problems:
        sys.exit(1)


async def strike(args: argparse.Namespace) -> Outcome:
    """Everything but the report."""
    outcome = Outcome()
    draw = random.Random(args.seed)
    asks = make_asks(NUM_ASKS, args.seed)
    with tqdm(total=args.count, desc="Deaths", file=sys.stderr) as bar:
        if args.kill == "supervisor":
            for _ in range(args.count):
                await _lose_supervisor(args, asks, draw, outcome)
                bar.update()
        else:
            kinds = [kind for kind in KINDS if kind != "supervisor"] if args.kill == "all" else [args.kill]
            await _lose_others(args, asks, [draw.choice(kinds) for _ in range(args.count)], draw, outcome, bar)
            if args.kill == "all":
                await _lose_supervisor(args, asks, draw, outcome)
    return outcome


def server_flags(args: argparse.Namespace) -> list[str]:
    flags = ["--dtype", "float32", "--tensor-parallel-size", str(args.tensor_parallel_size)]
    flags += ["--api-server-count", str(args.api_server_count), "--max-num-seqs", str(2 * args.streams)]
    flags += ["--deterministic"] if args.deterministic else []
    return flags if args.standby else [*flags, "--no-standby-workers"]


# ---- everybody but the supervisor


async def _lose_others(
    args: argparse.Namespace,
    asks: Sequence[Ask],
    kinds: Sequence[Kind],
    draw: random.Random,
    outcome: Outcome,
    bar: "tqdm[Any]",
) -> None:
    with FaultServer(server_flags(args), num_ranks=args.tensor_parallel_size) as server:
        verdicts = Verdicts(await references(server.port, asks), exact=args.deterministic)
        slots = Slots(server.port, asks, args.streams, args.seed, verdicts)
        try:
            if not await slots.flow(0.0, RECOVERY_S):
                outcome.problems.append("the streams did not begin")
                return
            for kind in kinds:
                blow = await _one_death(server, slots, kind, draw, standby=args.standby)
                outcome.blows.append(blow)
                bar.update()
                if blow.all_tokens is None:
                    outcome.problems.append(f"after a {kind} death a stream had no token for {RECOVERY_S:g} s")
                    break
            unfinished = await slots.finish(FINISH_S)
        finally:
            slots.cancel()
        await _end_well(server, outcome, unfinished)
    _count(outcome, verdicts)


async def references(port: int, asks: Sequence[Ask]) -> list[Answer]:
    """Each request's answer while nothing is disturbed.

    Raises:
        ConfigError: one was not answered.
    """
    answers = await asyncio.gather(*(stream(port, ask) for ask in asks))
    for number, answer in enumerate(answers):
        if answer.error or answer.contradiction():
            raise ConfigError(f"undisturbed, request {number}: {answer.error or answer.contradiction()}")
    return answers


async def _one_death(server: FaultServer, slots: Slots, kind: Kind, draw: random.Random, *, standby: bool) -> Blow:
    if standby and kind.startswith("worker"):
        await asyncio.to_thread(wait_until, lambda: _standbys_ready(server), STANDBY_S)
    await asyncio.sleep(draw.uniform(*CALM_S))
    victim = draw.choice(server.victims(ROLES[kind]))
    if kind == "frontend":
        slots.doom(_client_ports(victim))
    slots.arrivals.clear()
    blow, began = Blow(kind), time.monotonic()
    victim.send_signal(signal.SIGSTOP if kind == "worker-stop" else signal.SIGKILL)
    while (noticed := server.noticed(began)) is None:
        if time.monotonic() > began + RECOVERY_S:
            return blow
        await asyncio.sleep(0.005)
    blow.noticed = noticed - began
    if not await slots.flow(noticed, RECOVERY_S):
        return blow
    resumed = began
    if kind != "frontend":
        resumed = slots.end_of_silence(began)
        blow.next_token = resumed - began
    blow.all_tokens = max(slots.firsts(resumed)) - began
    return blow


def _standbys_ready(server: FaultServer) -> bool:
    standbys = server.standbys()
    return len(standbys) == server.num_ranks and all(has_settled(process) for process in standbys)


def _client_ports(front_end: psutil.Process) -> set[int]:
    """Of the connections that it has; it is stopped, so that these stay all."""
    front_end.suspend()
    wait_until(lambda: front_end.status() == psutil.STATUS_STOPPED, 1.0)
    return {c.raddr.port for c in psutil.net_connections("tcp") if c.pid == front_end.pid and c.raddr}


async def _end_well(server: FaultServer, outcome: Outcome, unfinished: int) -> None:
    """Nothing is left in the engine, and then nothing of it."""
    if unfinished:
        outcome.problems.append(f"{unfinished} answers had not ended {FINISH_S:g} s after the last death")
    deadline = time.monotonic() + ORPHANS_S
    while held := _held((await get(server.port, "/metrics"))[1]):
        if time.monotonic() > deadline:
            outcome.problems.append(f"the engine still holds something: {held}")
            break
        await asyncio.sleep(0.05)
    status = await asyncio.to_thread(server.stop)
    if status != 0:
        outcome.problems.append(f"the server ended with status {status}")
    outcome.problems += server.leftovers()


def _held(metrics: str) -> str:
    """What the engine has in hand, in words."""
    names = ("num_requests_running", "num_requests_waiting", "num_free_blocks", "num_usable_blocks")
    found = {line.split("{")[0].removeprefix("quire:"): line.split()[-1] for line in metrics.splitlines()}
    if any(name not in found for name in names):
        return "it does not say"
    running, waiting, free, usable = (float(found[name]) for name in names)
    clean = not running and not waiting and free == usable
    return "" if clean else f"{running:g} running, {waiting:g} waiting, {free:g} of {usable:g} blocks free"


# ---- the supervisor


async def _lose_supervisor(
    args: argparse.Namespace, asks: Sequence[Ask], draw: random.Random, outcome: Outcome
) -> None:
    """A server of its own: what a supervisor leaves behind. Half the time one of its children is stopped as well."""
    with FaultServer(server_flags(args), num_ranks=args.tensor_parallel_size) as server:
        slots = Slots(server.port, asks, args.streams, args.seed, None)
        try:
            if not await slots.flow(0.0, RECOVERY_S):
                outcome.problems.append("the streams did not begin")
            await asyncio.sleep(draw.uniform(*CALM_S))
            children = server.orphans()
            if draw.random() < 0.5:
                draw.choice(children).suspend()
            began = time.monotonic()
            server.process.kill()
            server.process.wait()
            gone = await asyncio.to_thread(wait_until, lambda: not server.leftovers(), RECOVERY_S)
        finally:
            slots.cancel()
        outcome.blows.append(Blow("supervisor", gone=None if gone is None else time.monotonic() - began))
        if gone is None or gone > ORPHANS_S:
            outcome.problems += server.leftovers() or [f"all was gone only {gone:.1f} s after the supervisor"]


# ---- what came of it


def _count(outcome: Outcome, verdicts: Verdicts) -> None:
    outcome.counts = {
        "completed": verdicts.num_whole,
        "failed": verdicts.num_failed,
        "changed": verdicts.num_changed,
        "diverged": verdicts.num_diverged,
        "cut_with_front_end": verdicts.num_lost,
        "tokens": verdicts.num_tokens,
    }
    outcome.problems += verdicts.examples


def make_report(args: argparse.Namespace, outcome: Outcome) -> Report:
    names = ("kill", "count", "streams", "tensor_parallel_size", "api_server_count", "deterministic", "standby", "seed")
    report = Report("faults", {name: getattr(args, name) for name in names})
    measures = {"noticed": "noticed", "next_token": "next token", "all_tokens": "all streams", "gone": "all gone"}
    rows = []
    for kind in KINDS:
        blows = [blow for blow in outcome.blows if blow.kind == kind]
        for name, words in measures.items():
            found = distribution(1000 * value for blow in blows if (value := getattr(blow, name)) is not None)
            if found:
                rows.append(distribution_row(f"{kind}: {words}, ms", found))
                report.results.setdefault(kind, {"deaths": len(blows)})[f"{name}_ms"] = rounded(found, 1)
    report.tables.append(Table("from the signal", DISTRIBUTION_COLUMNS, rows))
    counts = [(name.replace("_", " "), [value]) for name, value in outcome.counts.items()]
    report.tables.append(Table("answers", ("",), [*counts, ("problems", [len(outcome.problems)])]))
    report.results |= outcome.counts | {"problems": len(outcome.problems)}
    report.notes += [f"problem: {text[:300]}" for text in outcome.problems]
    return report
