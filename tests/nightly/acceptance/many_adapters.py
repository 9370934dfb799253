"""``run.py adapters``: very many LoRA adapters behind one server, and what their loading costs other requests."""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from adapters import make_adapter
from own_server import Holdings, Target, serving

from quire.bench.measure.report import RunReport, Table, distribution, rounded
from quire.launch.config.model_folder import DEMO_MODEL
from quire.protocol.errors import ConfigError
from quire.protocol.model.model_config import load_model_config

PROMPT = "Once upon a time, there was a little girl who lived in a small house near the river. One day she"
"""The prompt of all requests: blocks of one adapter that another one finds would change its answer."""
BASE_SHARE = 0.1
"""Part of the requests that use no adapter."""
NUM_BLOCKS = 1000
"""Few, so that the memory of all blocks is touched before growth is measured."""
NUM_OUTPUT = 8
NUM_STREAMS = 8
NUM_LOADED = 16
"""Adapters that are loaded while streams decode."""


@dataclass(slots=True)
class Load:
    """What the requests of one phase got.

    Attributes:
        wrong: (adapter, answer) of answers that differ from that of the adapter alone.
        first: seconds from each request to its first token.
    """

    wrong: list[tuple[str, str]] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    first: list[float] = field(default_factory=list)


def run(args: argparse.Namespace) -> None:
    """Run the harness. Exit status 1 if an answer was wrong or failed.

    Raises:
        ConfigError: a flag is invalid.
    """
    least = NUM_LOADED * args.rounds + args.max_cpu_loras
    if args.count < least:
        raise ConfigError(f"--count must be at least {least} (got {args.count})")
    with tempfile.TemporaryDirectory() as folder:
        model = load_model_config(DEMO_MODEL)
        names = [f"adapter-{i:04d}" for i in range(args.count)]
        for i, name in enumerate(names):
            make_adapter(Path(folder) / name, model, rank=args.rank, seed=i, size=2.0)
        flags = ["--deterministic", "--lora-dir", folder, "--max-num-seqs", str(args.concurrency + NUM_STREAMS)]
        flags += ["--num-gpu-blocks-override", str(NUM_BLOCKS)]
        flags += ["--max-loras", str(args.max_loras), "--max-cpu-loras", str(args.max_cpu_loras)]
        with serving(None, None, flags, args.serve_args) as target:
            report = asyncio.run(_measure(target, names, args))
    report.publish(args.json)
    if report.results["wrong"] or report.results["failed"]:
        sys.exit(1)


async def _measure(target: Target, names: Sequence[str], args: argparse.Namespace) -> RunReport:
    limits, timeout = httpx.Limits(max_connections=None), httpx.Timeout(300.0)
    async with httpx.AsyncClient(base_url=target.url, limits=limits, timeout=timeout, trust_env=False) as http:
        base = (await http.get("/v1/models")).json()["data"][0]["id"]
        expected = {base: await _answer(http, base)}
        begin = time.perf_counter()
        for name in names:
            expected[name] = await _answer(http, name)
        alone_s = time.perf_counter() - begin
        draw = random.Random(args.seed)
        weights = [1 / (i + 1) for i in range(len(names))]
        chosen = draw.choices(names, weights, k=args.num_requests)
        wanted = [base if draw.random() < BASE_SHARE else name for name in chosen]
        quarter = len(wanted) // 4
        begin = time.perf_counter()
        load = await _run_all(http, wanted[:quarter], expected, args.concurrency)
        before = target.holdings()
        rest = await _run_all(http, wanted[quarter:], expected, args.concurrency)
        after, mixed_s = target.holdings(), time.perf_counter() - begin
        load = Load(load.wrong + rest.wrong, load.failed + rest.failed, load.first + rest.first)
        gaps = await _gaps(http, base, names, args)
    distinct = len(set(expected.values()))
    results = {
        "adapters": len(names),
        "distinct_answers": distinct,
        "requests": len(wanted),
        "wrong": len(load.wrong),
        "failed": dict(load.failed),
        "alone_s": alone_s,
        "mixed_s": mixed_s,
        "requests_per_s": len(wanted) / mixed_s,
        "first_token_s": distribution(load.first),
        "growth_mb": _growth(before, after),
        "resident_mb": {name: held.rss / 2**20 for name, held in after.items()},
        "gaps": gaps,
    }
    return _report(vars(args), rounded(results, 4))


async def _run_all(http: httpx.AsyncClient, wanted: Sequence[str], expected: dict[str, str], concurrency: int) -> Load:
    """Answer requests by ``concurrency`` clients, each with one at a time."""
    load, queue = Load(), iter(wanted)

    async def client() -> None:
        for name in queue:
            sent = time.perf_counter()
            try:
                text = await _answer(http, name, load.first)
            except (httpx.HTTPError, ValueError) as error:
                load.failed[f"{type(error).__name__} {error}"[:200]] += 1
                continue
            if text != expected[name]:
                load.wrong.append((name, text))
                print(f"{name}: {text!r} instead of {expected[name]!r} after {sent:.1f}", file=sys.stderr)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return load


async def _answer(http: httpx.AsyncClient, name: str, first: list[float] | None = None) -> str:
    """Return a greedy answer; append the seconds to its first token to ``first``.

    Raises:
        httpx.HTTPError: the server does not answer.
        ValueError: the answer is an error, or not complete.
    """
    body = {"model": name, "prompt": PROMPT, "max_tokens": NUM_OUTPUT, "temperature": 0, "ignore_eos": True}
    sent, pieces, done = time.perf_counter(), [], False
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        if response.status_code != 200:
            raise ValueError(f"{response.status_code} {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = httpx.Response(200, content=line[6:]).json()
            if "error" in event:
                raise ValueError(str(event["error"]))
            if not pieces and first is not None:
                first.append(time.perf_counter() - sent)
            pieces.append(event["choices"][0]["text"])
            done = event["choices"][0]["finish_reason"] == "length"
    if not done:
        raise ValueError("the answer is not complete")
    return "".join(pieces)


async def _gaps(http: httpx.AsyncClient, base: str, names: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Measure gaps between tokens of streams of the base model, while other requests arrive: of the base model too, or
    each of an adapter that is neither in a slot nor in host memory.

    Both phases alternate, so that they share the noise of the machine.
    """
    unused = iter(list(names[-NUM_LOADED * args.rounds :]))
    found: dict[str, list[float]] = {"usual": [], "loading": []}
    for _ in range(args.rounds):
        for phase, gaps in found.items():
            arriving = [base if phase == "usual" else next(unused) for _ in range(NUM_LOADED)]
            gaps += await _gaps_beside(http, base, arriving)
    usual, loading = distribution(found["usual"]), distribution(found["loading"])
    return {
        "usual_ms": usual,
        "loading_ms": loading,
        "longest_over_usual_p99": loading["max"] / usual["p99"],
        "p99_over_usual_p99": loading["p99"] / usual["p99"],
    }


async def _gaps_beside(http: httpx.AsyncClient, base: str, arriving: Sequence[str]) -> list[float]:
    """Return the gaps of all streams, in milliseconds, from the first arrival to the last one's answer."""
    times: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
    body = {"model": base, "prompt": PROMPT, "max_tokens": 1000, "temperature": 0, "ignore_eos": True, "stream": True}
    ended = asyncio.Event()

    async def stream(own: list[float]) -> None:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    own.append(time.perf_counter())
                if ended.is_set():
                    return

    streams = [asyncio.ensure_future(stream(own)) for own in times]
    while not all(len(own) > 20 for own in times):
        await asyncio.sleep(0.01)
    begin = time.perf_counter()
    for name in arriving:
        await asyncio.gather(_answer(http, name), asyncio.sleep(0.03))
    end = time.perf_counter()
    ended.set()
    await asyncio.gather(*streams)
    pairs = [pair for own in times for pair in pairwise(own)]
    return [1000 * (late - early) for early, late in pairs if begin < late <= end]


def _growth(before: dict[str, Holdings], after: dict[str, Holdings]) -> dict[str, float]:
    return {name: (held.rss - before[name].rss) / 2**20 for name, held in after.items() if name in before}


def _report(settings: dict[str, Any], results: dict[str, Any]) -> RunReport:
    names = ("count", "num_requests", "concurrency", "rank", "max_loras", "max_cpu_loras", "rounds", "seed")
    report = RunReport("adapters", {name: settings[name] for name in names}, results)
    rows: list[tuple[str, list[float | str | None]]] = [
        (name, [results[name]]) for name in ("adapters", "distinct_answers", "requests", "wrong", "requests_per_s")
    ]
    rows += [("failed", [sum(results["failed"].values())])]
    rows += [(f"first token {name}, ms", [1000 * value]) for name, value in results["first_token_s"].items()]
    rows += [(f"growth of {name}, MB", [value]) for name, value in results["growth_mb"].items()]
    for phase in ("usual_ms", "loading_ms"):
        rows += [(f"gap {phase} {name}", [value]) for name, value in results["gaps"][phase].items()]
    rows += [
        (name.replace("_", " "), [results["gaps"][name]]) for name in ("longest_over_usual_p99", "p99_over_usual_p99")
    ]
    report.tables.append(Table("adapters", ("",), rows))
    return report
