"""``run.py hostile``: measure what honest clients lose to a hostile one, in steps, blocks and bytes."""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hostile_attacks import ATTACKS, VOCABULARY
from own_server import Target, serving
from raw_http import connected
from trace_share import RequestShare, count_shares

from quire.bench.measure.report import RunReport, Table, format_value, rounded
from quire.protocol.errors import ConfigError
from quire.replay.recorded.reader import TraceReader

CALM = "calm"
HONEST_KEY, HOSTILE_KEY = "honest", "hostile"
OUTPUT_LEN = 24
NUM_PREFIXES = 4
PREFIX_LEN = 64
HEAD_START_TOKENS, HEAD_START_S = 20_000, 10.0
"""Honest clients start after the attack took effect: after this many tokens, or this time."""
LOOK_EVERY_S = 0.25
MIB = 2**20
MAX_DIFFERENCE = 0.1
"""Relative difference from the calm round that counts as none."""

CHECKED = ("steps", "block_steps")
"""Figures of honest requests that must not grow. The front end's memory is not one, because limits allow some to
hostile clients."""
FIGURES = ("steps", "waited", "block_steps", "cached_tokens")


@dataclass(slots=True)
class Round:
    """One run of the honest clients.

    Attributes:
        texts: answers in order of requests; "" for a failed one, which ``faults`` counts.
        lines_lost: trace lines lost because the disk was too slow; the figures are then too low.
    """

    texts: list[str]
    ids: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    hostile: Counter[str] = field(default_factory=Counter)
    front_end_mib: float = 0.0
    lines_lost: int = 0
    shares: list[RequestShare] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Return means per completed request of the figures counted in the trace."""
        ended = [share for share in self.shares if share.took is not None]
        if not ended:
            return {}
        return {
            "steps": statistics.fmean(share.took or 0 for share in ended),
            "waited": statistics.fmean(share.waited or 0 for share in ended),
            "block_steps": statistics.fmean(share.block_steps for share in ended),
            "cached_tokens": statistics.fmean(share.cached_tokens for share in ended),
            "preempted": statistics.fmean(share.preempted for share in ended),
        }


def run(args: argparse.Namespace) -> None:
    """Run the harness. Exit status 1 if an honest request failed or got a different text.

    Raises:
        ConfigError: a flag is invalid.
        EngineError: the server does not answer.
    """
    if args.url is not None:
        raise ConfigError("hostile reads the server's trace, so it must start the server: remove --url")
    if args.num_requests < 1 or args.concurrency < 1:
        raise ConfigError("--num-requests and --concurrency must be at least 1")
    attacks = args.attacks.split(",") if args.attacks else list(ATTACKS)
    for name in attacks:
        if name not in ATTACKS:
            raise ConfigError(f"--attacks {name}: unknown attack; known: {', '.join(ATTACKS)}")
    rounds: dict[str, Round] = {}
    for name in (CALM, *attacks):
        rounds[name] = one_round(name, args)
        figures = ", ".join(f"{key} {format_value(value)}" for key, value in rounds[name].figures().items())
        print(f"round {name}: {figures}", file=sys.stderr, flush=True)
    settings = {name: vars(args)[name] for name in ("num_requests", "concurrency", "seed", "serve_args")}
    report = make_report(settings, rounds)
    report.publish(args.json)
    if any(found["faults"] or found["texts_changed"] for found in report.results["rounds"].values()):
        sys.exit(1)


def one_round(name: str, args: argparse.Namespace) -> Round:
    """Run a server with the honest clients, and the attack ``name`` if it is one; then read the server's trace."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        flags = ["--trace", str(trace), "--api-key", HONEST_KEY, HOSTILE_KEY, "--shutdown-timeout", "1"]
        with serving(None, HONEST_KEY, flags, args.serve_args) as target:
            made = asyncio.run(_load(target, name, args))
            made.lines_lost = int(target.metrics()["num_trace_lines_lost_total"])
        shares = count_shares(TraceReader(trace, lenient=True), frozenset(made.ids))
        made.shares = list(shares.values())
        return made


async def _load(target: Target, name: str, args: argparse.Namespace) -> Round:
    made = Round([""] * args.num_requests)
    attack = ATTACKS.get(name)
    others: list[asyncio.Task[None]] = [asyncio.create_task(_watch(target, made))]
    if attack is not None:
        hostile = replace(target, api_key=HOSTILE_KEY)
        others.append(asyncio.create_task(attack(hostile, random.Random(args.seed), made.hostile)))
        await _head_start(target)
    try:
        await _honest(target, args, made)
    finally:
        for task in others:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*others, return_exceptions=True)
    return made


async def _head_start(target: Target) -> None:
    deadline = time.monotonic() + HEAD_START_S
    while time.monotonic() < deadline:
        await asyncio.sleep(LOOK_EVERY_S)
        seen = await asyncio.to_thread(target.metrics)
        if seen["prompt_tokens_total"] + seen["generation_tokens_total"] >= HEAD_START_TOKENS:
            return


async def _watch(target: Target, made: Round) -> None:
    """Track the maximum memory of all front ends together."""
    while True:
        held = await asyncio.to_thread(target.holdings)
        now = sum(one.rss for name, one in held.items() if name.startswith("http")) / MIB
        made.front_end_mib = max(made.front_end_mib, now)
        await asyncio.sleep(LOOK_EVERY_S)


async def _honest(target: Target, args: argparse.Namespace, made: Round) -> None:
    """Run a closed loop over a fixed load: the order of requests does not depend on their speed."""
    waiting = iter(enumerate(honest_bodies(args.num_requests, args.seed)))

    async def one_client() -> None:
        async with connected(target.address) as connection:
            for index, body in waiting:
                try:
                    reply = await connection.fetch(target.post("/v1/completions", body))
                except (OSError, EOFError, TimeoutError) as error:
                    made.faults[type(error).__name__] += 1
                    continue
                if reply.status != 200:
                    made.faults[f"status {reply.status}"] += 1
                    continue
                answer = json.loads(reply.body)
                made.ids.append(answer["id"])
                made.texts[index] = answer["choices"][0]["text"]

    await asyncio.gather(*(one_client() for _ in range(args.concurrency)))


def honest_bodies(count: int, seed: int) -> list[bytes]:
    """Return short prompts after one of a few prefixes, greedy, all with the same output length."""
    draw = random.Random(seed + 1)
    prefixes = [draw.choices(VOCABULARY, k=PREFIX_LEN) for _ in range(NUM_PREFIXES)]
    return [
        json.dumps(
            {
                "prompt": [*prefixes[i % NUM_PREFIXES], *draw.choices(VOCABULARY, k=draw.randint(4, 40))],
                "max_tokens": OUTPUT_LEN,
                "temperature": 0,
                "ignore_eos": True,
            }
        ).encode()
        for i in range(count)
    ]


def make_report(settings: dict[str, Any], rounds: Mapping[str, Round]) -> RunReport:
    """``rounds``: the calm one and those with an attack."""
    calm = rounds[CALM]
    report = RunReport("hostile", settings)
    results: dict[str, Any] = {}
    rows: list[tuple[str, Sequence[float | str | None]]] = []
    for name, made in rounds.items():
        found = made.figures()
        ratios = {key: _ratio(found.get(key), calm.figures().get(key)) for key in FIGURES}
        ratios["front_end_mib"] = _ratio(made.front_end_mib, calm.front_end_mib)
        changed = sum(bool(text) and text != was for text, was in zip(made.texts, calm.texts, strict=True))
        results[name] = {
            **found,
            "front_end_mib": made.front_end_mib,
            "ratios": ratios,
            "faults": dict(made.faults),
            "texts_changed": changed,
            "hostile": dict(made.hostile),
        }
        row = [*(found.get(key) for key in (*FIGURES, "preempted")), made.front_end_mib, sum(made.faults.values())]
        rows.append((name, [*row, ratios["steps"], ratios["block_steps"]]))
        beyond = [key for key in CHECKED if _is_beyond(ratios[key])]
        if beyond:
            changes = ", ".join(f"{key} x {format_value(ratios[key])}" for key in beyond)
            report.notes.append(f"{name}: worse than without it: {changes}")
        report.notes += [f"{name}: honest requests failed: {count} x {what}" for what, count in made.faults.items()]
        if made.lines_lost:
            report.notes.append(f"{name}: {made.lines_lost} trace lines were lost: its figures are too low")
        if changed:
            report.notes.append(f"{name}: {changed} honest answers have a different text")
    report.results["rounds"] = rounded(results, 3)
    columns = (
        "steps",
        "waited",
        "block steps",
        "cached",
        "preempted",
        "front end MiB",
        "failed",
        "steps x",
        "blocks x",
    )
    report.tables.append(Table("honest requests, mean", columns, rows))
    outcomes = [
        (name, [", ".join(f"{count} x {what}" for what, count in made.hostile.items())])
        for name, made in rounds.items()
    ]
    report.tables.append(Table("answers to the hostile client", ("",), outcomes))
    return report


def _ratio(found: float | None, calm: float | None) -> float | None:
    return found / calm if found is not None and calm else None


def _is_beyond(ratio: float | None) -> bool:
    """Whether a ratio is more than ``MAX_DIFFERENCE`` worse than calm, or unknown."""
    return ratio is None or ratio > 1 + MAX_DIFFERENCE
