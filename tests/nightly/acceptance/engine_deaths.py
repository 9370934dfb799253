"""``run.py engines``: kill engines and routers of a server with several, restart all engines, and check the answers."""

import argparse
import asyncio
import json
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil
from fault_server import MODULES, FaultServer, module_of, wait_until
from fault_slots import AnswerCounts, Slots
from faults import ORPHANS_S, RECOVERY_S, references
from live_streams import StreamRequest, make_requests
from raw_http import connected
from tqdm import tqdm

from quire.bench.measure.report import DISTRIBUTION_COLUMNS, RunReport, Table, distribution, distribution_row, rounded
from quire.protocol.errors import ConfigError

Event = Literal["engine", "scheduler", "worker", "router", "restart"]
KILLS: tuple[Event, ...] = ("engine", "scheduler", "worker")
ADMIN_KEY = "admin"
DELAY_S = (0.3, 1.0)
"""Range of the random delay between the time when enough engines serve and the next event."""
RESTART_S = 600.0
FINISH_S = 120.0


class FleetServer(FaultServer):
    """A server with several engines, whose processes are children of their engine's process."""

    def engine_process(self, engine: int) -> psutil.Process | None:
        """Return the process that supervises an engine, or None while it is not running."""
        children = psutil.Process(self.process.pid).children()
        found = [each for each in children if module_of(each) == "quire.launch.fleet" and _is_engine(each, engine)]
        return found[-1] if found else None

    def victim(self, event: Event, engine: int) -> psutil.Process | None:
        """Return the process to kill; None if it is not running."""
        if event == "router":
            children = psutil.Process(self.process.pid).children()
            return next((each for each in children if module_of(each) == "quire.router_proc"), None)
        process = self.engine_process(engine)
        if process is None or event == "engine":
            return process
        modules = MODULES["worker" if event == "worker" else "scheduler"]
        return next((each for each in process.children() if module_of(each) in modules), None)


@dataclass(slots=True)
class EngineOutcome:
    """Results of a run. ``gaps``: for each kind of event, the longest time between two tokens of one answer, of each
    stream until the next event."""

    gaps: dict[str, list[float]] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    engine_starts: int = 0


def run(args: argparse.Namespace) -> None:
    """Run the harness. Exit status 1 if an answer was lost or changed, or anything was left behind.

    Raises:
        ConfigError: a flag is invalid, or the server does not start.
    """
    for name, least in (("engines", 2), ("streams", 1), ("kills", 0), ("router_kills", 0), ("restarts", 0)):
        if getattr(args, name) < least:
            text = f"--{name.replace('_', '-')} must be at least {least} (got {getattr(args, name)})"
            raise ConfigError(text)
    outcome = asyncio.run(run_engine_deaths(args))
    make_report(args, outcome).publish(args.json)
    if outcome.problems:
        sys.exit(1)


async def run_engine_deaths(args: argparse.Namespace) -> EngineOutcome:
    """Run the harness without its report."""
    outcome, draw = EngineOutcome(), random.Random(args.seed)
    events: list[Event] = [KILLS[number % len(KILLS)] for number in range(args.kills)]
    events += ["router"] * args.router_kills + ["restart"] * args.restarts
    draw.shuffle(events)
    requests = make_requests(args.num_requests, args.seed)
    with FleetServer(server_flags(args)) as server, tqdm(total=len(events), desc="Events", file=sys.stderr) as bar:
        await _disturb(server, args, requests, events, draw, outcome, bar)
        status = await asyncio.to_thread(server.stop)
        if status != 0:
            outcome.problems.append(f"the server exited with status {status}")
        await asyncio.to_thread(wait_until, lambda: not server.leftovers(), RECOVERY_S)
        outcome.problems += server.leftovers()
        if any("Traceback" in line for line in server.log):
            outcome.problems.append("a traceback in the server's log")
    return outcome


def server_flags(args: argparse.Namespace) -> list[str]:
    flags = [
        "--dtype",
        "float32",
        "--deterministic",
        "--data-parallel-size",
        str(args.engines),
        "--routing",
        args.routing,
    ]
    flags += ["--admin-api-key", ADMIN_KEY, "--no-standby-workers", "--num-gpu-blocks-override", "2000"]
    flags += ["--max-num-seqs", str(args.streams), "--drain-timeout", f"{args.drain_timeout:g}"]
    return flags + shlex.split(args.serve_args or "")


async def _disturb(
    server: FleetServer,
    args: argparse.Namespace,
    requests: Sequence[StreamRequest],
    events: Sequence[Event],
    draw: random.Random,
    outcome: EngineOutcome,
    bar: "tqdm[Any]",
) -> None:
    counts = AnswerCounts(await references(server.port, requests), exact=True)
    slots = Slots(server.port, requests, args.streams, args.seed, counts)
    try:
        if not await slots.wait_for_data(0.0, RECOVERY_S):
            outcome.problems.append("the streams did not start")
            return
        for event in events:
            await _one(server, slots, args, event, draw, outcome)
            bar.update()
        await _settle(server, args.engines, outcome)
        unfinished = await slots.finish(FINISH_S)
    finally:
        slots.cancel()
    if unfinished:
        outcome.problems.append(f"{unfinished} answers did not end within {FINISH_S:g} s after the last event")
    await _check_idle(server, outcome)
    outcome.counts = {
        "completed": counts.num_whole,
        "failed": counts.num_failed,
        "changed": counts.num_changed,
        "tokens": counts.num_tokens,
    }
    outcome.problems += counts.examples


async def _one(
    server: FleetServer,
    slots: Slots,
    args: argparse.Namespace,
    event: Event,
    draw: random.Random,
    outcome: EngineOutcome,
) -> None:
    """Let one event happen, wait until enough engines serve and all streams have data, and note the silences."""
    needed = args.engines if event == "restart" else max(args.engines - 1, 2)
    serving = await _settle(server, needed, outcome)
    await asyncio.sleep(draw.uniform(*DELAY_S))
    last = slots.last_arrivals()
    slots.arrivals.clear()
    slots.begins.clear()
    began = time.monotonic()
    if event == "restart":
        await _restart(server, serving, outcome)
    else:
        process = server.victim(event, draw.choice(sorted(serving)))
        if process is None:
            return
        process.kill()
    outcome.events[event] += 1
    if not await slots.wait_for_data(max(began, time.monotonic()), RECOVERY_S):
        outcome.problems.append(
            f"after {event} number {outcome.events[event]} a stream had no token for {RECOVERY_S:g} s"
        )
    await _settle(server, max(args.engines - 1, 2), outcome)
    outcome.gaps.setdefault(event, []).extend(slots.longest_silences(last))


async def _restart(server: FleetServer, before: dict[int, int], outcome: EngineOutcome) -> None:
    """Order a rolling restart, and wait until each engine has started once more and serves."""
    status, text = await _admin(server.port, "POST", "/admin/engines/restart")
    if status != 202:
        outcome.problems.append(f"the rolling restart was refused: {status} {text[:200]}")
        return
    deadline = time.monotonic() + RESTART_S
    while True:
        now = await _serving(server.port)
        if all(now.get(engine, 0) > starts for engine, starts in before.items()):
            return
        if time.monotonic() > deadline:
            outcome.problems.append(f"the rolling restart took more than {RESTART_S:g} s")
            return
        await asyncio.sleep(0.1)


async def _settle(server: FleetServer, needed: int, outcome: EngineOutcome) -> dict[int, int]:
    """Wait until this many engines serve; return their numbers of starts."""
    deadline = time.monotonic() + RECOVERY_S
    while len(serving := await _serving(server.port)) < needed:
        if time.monotonic() > deadline:
            outcome.problems.append(f"only {len(serving)} engines serve after {RECOVERY_S:g} s")
            break
        await asyncio.sleep(0.1)
    outcome.engine_starts = max(outcome.engine_starts, sum(serving.values()))
    return serving


async def _serving(port: int) -> dict[int, int]:
    """Return the number of starts of each engine that serves and has workers."""
    _, text = await _admin(port, "GET", "/admin/engines")
    engines = json.loads(text).get("engines", ())
    return {each["engine"]: each["starts"] for each in engines if each["state"] == "serving" and not each["detail"]}


async def _admin(port: int, method: str, path: str) -> tuple[int, str]:
    head = f"{method} {path} HTTP/1.1\r\nHost: quire\r\nAuthorization: Bearer {ADMIN_KEY}\r\n"
    async with connected(("127.0.0.1", port)) as connection:
        reply = await connection.fetch(f"{head}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())
        return reply.status, reply.body.decode(errors="replace")


async def _check_idle(server: FleetServer, outcome: EngineOutcome) -> None:
    """Check that no engine computes or holds anything."""
    deadline = time.monotonic() + ORPHANS_S
    while True:
        engines = json.loads((await _admin(server.port, "GET", "/admin/engines"))[1])["engines"]
        held = [each for each in engines if each["running"] or each["waiting"] or each["kv_use"]]
        if not held:
            return
        if time.monotonic() > deadline:
            outcome.problems.append(f"engines are not idle: {held}")
            return
        await asyncio.sleep(0.05)


def _is_engine(process: psutil.Process, engine: int) -> bool:
    try:
        return any(f"/engine-{engine}." in word for word in process.cmdline())
    except psutil.Error:
        return False


def make_report(args: argparse.Namespace, outcome: EngineOutcome) -> RunReport:
    names = (
        "engines",
        "streams",
        "kills",
        "router_kills",
        "restarts",
        "routing",
        "drain_timeout",
        "seed",
        "serve_args",
    )
    report = RunReport("engines", {name: getattr(args, name) for name in names})
    gaps = {**outcome.gaps, "all kills": [gap for event in (*KILLS, "router") for gap in outcome.gaps.get(event, ())]}
    rows = []
    for event, values in gaps.items():
        if found := distribution(1000 * value for value in values):
            rows.append(distribution_row(f"{event}: to the next token, ms", found))
            report.results[event.replace(" ", "_")] = {
                "events": outcome.events.get(event, sum(outcome.events.values()) - outcome.events["restart"]),
                "gap_ms": rounded(found, 1),
            }
    report.tables.append(Table("from each event to the next", DISTRIBUTION_COLUMNS, rows))
    counts = [(name, [value]) for name, value in outcome.counts.items()]
    report.tables.append(Table("answers", ("",), [*counts, ("problems", [len(outcome.problems)])]))
    report.results |= outcome.counts | {"engine_starts": outcome.engine_starts, "problems": len(outcome.problems)}
    report.notes += [f"problem: {text[:300]}" for text in outcome.problems]
    return report
