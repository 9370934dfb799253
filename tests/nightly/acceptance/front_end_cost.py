"""``run.py cost``: CPU time of the front end per streamed token, with few and with many streams."""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import psutil
import uvloop
from own_server import Target, serving
from timed_streams import TimedStream, drive, read_answer

from quire.bench.measure.report import RunReport, Table, distribution, rounded
from quire.protocol.errors import ConfigError

WORDS = ("time", "day", "name", "story", "garden", "river", "small", "old", "little", "house", "water", "light", "road")
PROMPT_WORDS = 12
RAMP_S = 0.5
TIMEOUT_S = 300.0
READ_EVERY_S = 0.1
MERGED = 1.05
"""Tokens per delivery from which a figure is doubtful: a delivery of several tokens is cheaper than one for each."""
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
APIS = ("chat", "tools", "completions")


class Reading(NamedTuple):
    """CPU seconds of all front ends at a time of ``time.perf_counter``."""

    at: float
    cpu: float


def run(args: argparse.Namespace) -> None:
    """Run the harness. Exit status 1 if a stream was lost.

    Raises:
        ConfigError: a flag is invalid.
        EngineError: the server does not answer.
    """
    for name in ("output_len", "rounds"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    flags = ["--max-num-seqs", str(max(args.num_streams) + 8)]
    with serving(args.url, args.api_key, flags, args.serve_args) as target:
        report = measure(target, args)
    report.publish(args.json)
    if any(figures["lost"] for figures in report.results["streams"].values()):
        sys.exit(1)


def measure(target: Target, args: argparse.Namespace) -> RunReport:
    """Run all rounds of all counts of streams in turn, and report the cheapest round of each count."""
    found: dict[int, list[dict[str, Any]]] = {count: [] for count in args.num_streams}
    for _ in range(args.rounds):
        for count, figures in found.items():
            figures.append(_round(target, args, count))
            print(f"{count} streams: {json.dumps(rounded(figures[-1], 3))}", file=sys.stderr, flush=True)
    names = ("api", "num_streams", "output_len", "rounds", "seed", "serve_args")
    return make_report({name: vars(args)[name] for name in names}, found)


def make_report(settings: dict[str, Any], found: dict[int, list[dict[str, Any]]]) -> RunReport:
    """``found``: the figures of each round, by number of streams."""
    best: dict[int, dict[str, Any]] = {}
    for count, figures in found.items():
        costs = [each["us_per_token"] for each in figures if each["us_per_token"] is not None]
        ratios = [each["p99_over_p50"] for each in figures if each["p99_over_p50"] is not None]
        best[count] = {
            "us_per_token": min(costs, default=None),
            "median_us_per_token": statistics.median(costs) if costs else None,
            "us_per_request": min((each["us_per_request"] or 0.0 for each in figures), default=None),
            "p99_over_p50": statistics.median(ratios) if ratios else None,
            "tokens_per_delivery": max(each["tokens_per_delivery"] for each in figures),
            "lost": sum(each["lost"] for each in figures),
        }
    costs = [each["us_per_token"] for each in best.values()]
    ratio = costs[-1] / costs[0] if len(costs) > 1 and None not in costs else None
    by_count = {str(count): {**best[count], "rounds": found[count]} for count in found}
    report = RunReport("cost", settings, rounded({"streams": by_count, "last_over_first": ratio}, 3))
    columns = {
        "us/token": "us_per_token",
        "median": "median_us_per_token",
        "us/request": "us_per_request",
        "p99/p50": "p99_over_p50",
        "tokens/delivery": "tokens_per_delivery",
        "lost": "lost",
    }
    rows = [(f"{count}", [best[count][name] for name in columns.values()]) for count in best]
    report.tables.append(Table("streams", tuple(columns), rows))
    report.notes += [
        f"{count} streams: the front end merged tokens, so its cost per token is too low; use a slower engine"
        for count in best
        if best[count]["tokens_per_delivery"] > MERGED
    ]
    return report


def _round(target: Target, args: argparse.Namespace, count: int) -> dict[str, Any]:
    draw = random.Random(args.seed)
    streams = [TimedStream(_request(target, args, draw), RAMP_S * i / count) for i in range(count)]
    readings: list[Reading] = []
    cpu, start = time.process_time(), time.perf_counter()
    uvloop.run(_drive(target, streams, readings))
    client = (time.process_time() - cpu) / (time.perf_counter() - start)
    return figures_of(streams, readings, args.output_len) | {"client_cores": client}


async def _drive(target: Target, streams: Sequence[TimedStream], readings: list[Reading]) -> None:
    reading = asyncio.ensure_future(_read(target.front_ends(), readings))
    await drive(target.address, streams, TIMEOUT_S)
    reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading


async def _read(front_ends: Sequence[psutil.Process], readings: list[Reading]) -> None:
    while True:
        times = [process.cpu_times() for process in front_ends]
        readings.append(Reading(time.perf_counter(), sum(each.user + each.system for each in times)))
        await asyncio.sleep(READ_EVERY_S)


def figures_of(streams: Sequence[TimedStream], readings: Sequence[Reading], output_len: int) -> dict[str, Any]:
    """Return the figures of one round.

    The cost of a token is measured while all streams run, without starts and ends of requests. What is left of the CPU
    time is the cost of the requests.
    """
    answers = [read_answer(stream) for stream in streams]
    lost = sum(answer.num_output_tokens != output_len or bool(answer.error) for answer in answers)
    deliveries = sorted(when for answer in answers for when in answer.deliveries)
    num_tokens = sum(answer.num_output_tokens for answer in answers)
    begin = max((answer.deliveries[0] for answer in answers if answer.deliveries), default=0.0)
    end = min((answer.deliveries[-1] for answer in answers if answer.deliveries), default=0.0)
    steady = [reading for reading in readings if begin <= reading.at <= end]
    gaps = distribution(
        1000 * (after - before)
        for answer in answers
        for before, after in zip(answer.deliveries, answer.deliveries[1:], strict=False)
        if begin < after <= end
    )
    per_delivery = num_tokens / max(len(deliveries), 1)
    cost = per_request = None
    if len(steady) > 1:
        num_steady = per_delivery * sum(steady[0].at < when <= steady[-1].at for when in deliveries)
        cost = 1e6 * (steady[-1].cpu - steady[0].cpu) / num_steady
        per_request = (1e6 * (readings[-1].cpu - readings[0].cpu) - cost * num_tokens) / len(streams)
    return {
        "us_per_token": cost,
        "us_per_request": per_request,
        "steady_s": steady[-1].at - steady[0].at if steady else 0.0,
        "inter_token_ms": gaps,
        "p99_over_p50": gaps["p99"] / gaps["p50"] if gaps else None,
        "tokens_per_delivery": per_delivery,
        "lost": lost,
    }


def _request(target: Target, args: argparse.Namespace, draw: random.Random) -> bytes:
    text = " ".join(draw.choices(WORDS, k=PROMPT_WORDS))
    body: dict[str, Any] = {
        "max_tokens": args.output_len,
        "ignore_eos": True,
        "seed": args.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if args.api == "completions":
        return target.post("/v1/completions", json.dumps(body | {"prompt": text}).encode(), close=True)
    body["messages"] = [{"role": "user", "content": text}]
    if args.api == "tools":
        body["tools"] = [TOOL]
    return target.post("/v1/chat/completions", json.dumps(body).encode(), close=True)
