"""``run.py soak``: run very many short requests of all kinds; check that no process grows and all blocks are freed."""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from own_server import Holdings, Target, busy_shares, is_clean, serving
from raw_http import Connection, Reply, connected
from soak_requests import LEAVES, SoakRequest, draw_request
from tqdm import tqdm

from quire.bench.measure.report import RunReport, Table, rounded
from quire.protocol.errors import ConfigError

MIB = 2**20
FLAGS = ("--num-gpu-blocks-override", "4096")
"""Flags of the started server: a pool that the prefix cache fills during the warm-up, not only over the whole run."""
PER = 10_000
"""Number of requests to which growth is normalized."""
MOST_MIB = 1.0
"""Growth per ``PER`` requests that counts as none."""


class Sample(NamedTuple):
    """``num_requests``: number of completed requests at the time of the measurement."""

    num_requests: int
    held: dict[str, Holdings]


class Outcome(NamedTuple):
    """Outcomes by kind of request. ``faults``: kind and what arrived instead of the right answer."""

    kinds: Counter[str]
    faults: Counter[str]


def run(args: argparse.Namespace) -> None:
    """Run the harness. Exit status 1 if an answer was wrong, a process grew, or anything was left behind.

    Raises:
        ConfigError: a flag is invalid.
        EngineError: the server does not answer.
    """
    if not 0 <= args.warm_up < args.num_requests or args.concurrency < 1 or args.samples < 3:
        raise ConfigError("--warm-up must be below --num-requests, --concurrency at least 1, --samples at least 3")
    with serving(args.url, args.api_key, FLAGS, args.serve_args) as target:
        report = asyncio.run(measure(target, args))
    report.publish(args.json)
    if report.results["faults"] or report.results["grew"] or not is_clean(report.results["after"]):
        sys.exit(1)


async def measure(target: Target, args: argparse.Namespace) -> RunReport:
    """Run the load on ``target`` and measure its processes meanwhile."""
    before = target.settled()
    samples: list[Sample] = [Sample(0, target.holdings())]
    outcome = Outcome(Counter(), Counter())
    start, cpu, spent = time.perf_counter(), time.process_time(), target.cpu_seconds()
    with tqdm(total=args.num_requests, desc="Requests", file=sys.stderr) as bar:
        await _load(target, args, samples, outcome, bar)
    wall = time.perf_counter() - start
    shares = {"client": (time.process_time() - cpu) / wall} | busy_shares(spent, target.cpu_seconds(), wall)
    after = await asyncio.to_thread(target.settled)
    samples.append(Sample(args.num_requests, target.holdings()))
    settings = {name: vars(args)[name] for name in ("num_requests", "concurrency", "warm_up", "seed", "serve_args")}
    report = make_report(settings, samples, outcome, args.warm_up)
    report.results |= {"before": before, "after": after}
    rate = args.num_requests / wall
    report.results |= rounded({"wall_s": wall, "requests_per_s": rate, "cpu_shares": shares}, 3)
    report.tables.append(Table("processor", ("cores",), [(name, [share]) for name, share in shares.items()]))
    report.notes.append(f"{rate:.0f} requests/s")
    if not is_clean(after):
        report.notes.append(f"left behind: {after}")
    return report


async def _load(
    target: Target, args: argparse.Namespace, samples: list[Sample], outcome: Outcome, bar: "tqdm[Any]"
) -> None:
    draw = random.Random(args.seed)
    requests = (draw_request(draw) for _ in range(args.num_requests))
    every = max(1, args.num_requests // args.samples)

    async def one_client() -> None:
        async with connected(target.address) as connection:
            for request in requests:
                outcome.kinds[request.kind] += 1
                fault = await send_and_check(target, connection, request, draw.random())
                if fault:
                    outcome.faults[f"{request.kind}: {fault}"] += 1
                bar.update()
                if bar.n % every == 0:
                    samples.append(Sample(int(bar.n), target.holdings()))

    await asyncio.gather(*(one_client() for _ in range(args.concurrency)))


async def send_and_check(target: Target, connection: Connection, request: SoakRequest, chance: float) -> str:
    """Send a request and check the answer; return what is wrong, or an empty string. ``chance``: 0 to 1, when to
    disconnect.
    """
    raw = target.post(request.path, request.body)
    try:
        if request.leaves:
            await _leave(target, raw, request.leaves, chance)
            return ""
        reply = await connection.fetch(raw)
    except (OSError, EOFError, TimeoutError) as error:
        return type(error).__name__
    if reply.status not in request.statuses:
        return f"status {reply.status}"
    if request.streamed and not reply.body.endswith(b"data: [DONE]\n\n"):
        return "no end of the stream"
    return ""


async def _leave(target: Target, raw: bytes, where: str, chance: float) -> None:
    """Use a separate connection: send all or a part, perhaps read some data, and disconnect."""
    reply = Reply()
    async with connected(target.address) as connection:
        if where == LEAVES[0]:
            await connection.send(raw[: -max(1, int(chance * 50))], reply)
        elif where == LEAVES[1]:
            await connection.send(raw, reply)
            await asyncio.sleep(0.02 * chance)
        else:
            async with aclosing(connection.pieces(raw, reply)) as pieces:
                async for _ in pieces:
                    if len(reply.pieces) > 8 * chance:
                        return


def make_report(settings: dict[str, Any], samples: Sequence[Sample], outcome: Outcome, warm_up: int) -> RunReport:
    """``samples``: in order; the last is of the settled server."""
    rows = []
    growth: dict[str, dict[str, float]] = {}
    for name, points in _by_process(samples):
        late = [(at, held) for at, held in points if at >= warm_up]
        if len(late) < 2:
            continue
        first, last = points[0][1], points[-1][1]
        growth[name] = {
            "rss_mib": last.rss / MIB,
            "rss_mib_per_10k": PER * slope([(at, held.rss / MIB) for at, held in late]),
            "pss_mib_per_10k": PER * slope([(at, held.pss / MIB) for at, held in late]),
            "fds_first": max(first.num_fds, late[0][1].num_fds),
            "fds_most": max(held.num_fds for _, held in points),
            "fds_last": last.num_fds,
            "threads_last": last.num_threads,
        }
        rows.append((name, list(growth[name].values())))
    grew = [
        name
        for name, found in growth.items()
        if min(found["rss_mib_per_10k"], found["pss_mib_per_10k"]) >= MOST_MIB or found["fds_last"] > found["fds_first"]
    ]
    curves = {
        name: [[at, round(held.rss / MIB, 1), round(held.pss / MIB, 1), held.num_fds] for at, held in points]
        for name, points in _by_process(samples)
    }
    report = RunReport("soak", settings, rounded({"growth": growth}, 3))
    report.results |= {"grew": grew, "kinds": dict(outcome.kinds), "faults": dict(outcome.faults), "curves": curves}
    columns = ("RSS, MiB", "RSS per 10,000", "PSS per 10,000", "fds first", "most", "last", "threads")
    report.tables.append(Table("process", columns, rows))
    report.tables.append(Table("requests", ("",), [(kind, [count]) for kind, count in sorted(outcome.kinds.items())]))
    report.notes += [f"wrong: {count} x {fault}" for fault, count in outcome.faults.items()]
    report.notes += [f"grew: {name}" for name in grew]
    return report


def _by_process(samples: Sequence[Sample]) -> Iterator[tuple[str, list[tuple[int, Holdings]]]]:
    """Yield, for each process present at the start, (requests so far, resources held)."""
    for name in samples[0].held:
        yield name, [(sample.num_requests, sample.held[name]) for sample in samples if name in sample.held]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope by least squares; 0 if all x are equal."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if len(set(xs)) < 2:
        return 0.0
    return float(statistics.linear_regression(xs, ys).slope)
