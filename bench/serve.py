"""``quire bench serve``: send the prompts of a dataset to a running server and time its responses."""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from quire.bench import beside_images
from quire.bench.dataset import random_prompts, read_prompts
from quire.bench.measure.http_client import Prompt, RequestSettings, ServerClient, Timing
from quire.bench.measure.report import DISTRIBUTION_COLUMNS, RunReport, Table, distribution, distribution_row, rounded
from quire.protocol.errors import ConfigError

# The scheduler runs a step ahead: shortly after the last response, requests may still hold rows and blocks.
SETTLE_S = 2.0
GAUGES = ("num_requests_running", "num_requests_waiting", "num_free_blocks", "num_usable_blocks")
MAX_MESSAGE = 200
RANDOM, NUM_RANDOM_PROMPTS, RANDOM_INPUT_LEN = "random", 100, 512

Send = Callable[[Prompt], Awaitable[Timing]]
Done = Callable[[], object]


def run(args: argparse.Namespace) -> None:
    """Run the benchmark; exit with status 1 if a response was incomplete.

    Raises:
        ConfigError: a flag or the dataset is invalid, or the server cannot be reached.
    """
    _check(args)
    if args.dataset == RANDOM:
        args.num_prompts, args.input_len = args.num_prompts or NUM_RANDOM_PROMPTS, args.input_len or RANDOM_INPUT_LEN
        prompts = random_prompts(args.num_prompts, args.input_len, args.seed)
    else:
        prompts = read_prompts(Path(args.dataset), args.num_prompts)
    num_errors = asyncio.run(_run(args, prompts))
    if num_errors:
        sys.exit(1)


def _check(args: argparse.Namespace) -> None:
    for name in ("num_prompts", "input_len", "concurrency", "max_tokens", "images", "rounds"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1 (got {value})")
    if args.rate is not None and not 0 < args.rate <= 1e6:
        raise ConfigError(f"--rate must be above 0 and at most 1000000 requests per second (got {args.rate:g})")


async def _run(args: argparse.Namespace, texts: list[str]) -> int:
    async with ServerClient(args.url, args.api_key) as client:
        model, context = await client.find_model(args.model)
        room = context - args.max_tokens
        if args.input_len is not None and args.input_len > room:
            free = f"the context of {context} tokens without --max-tokens"
            raise ConfigError(f"--input-len must be at most {room}, {free} (got {args.input_len})")
        prompts, num_cut = await fit_prompts(client, model, texts, args.input_len or room, chat=args.chat)
        settings = RequestSettings(model, args.max_tokens, args.temperature, args.seed, args.chat, args.ignore_eos)

        def send(prompt: Prompt) -> Awaitable[Timing]:
            return client.stream(settings, prompt, time.perf_counter)

        async def load(prompts: Sequence[Prompt]) -> list[Timing]:
            with tqdm(total=len(prompts), desc="Requests", file=sys.stderr) as bar:
                if args.rate is None:
                    return await closed_loop(prompts, args.concurrency, send, bar.update)
                return await open_loop(prompts, arrivals(args.rate, args.seed), send, bar.update)

        async def phase(number: int) -> list[Timing]:
            if args.dataset != RANDOM:
                return await load(prompts)
            texts = random_prompts(args.num_prompts, args.input_len, args.seed + number)
            return await load((await fit_prompts(client, model, texts, args.input_len, chat=args.chat))[0])

        if args.images is not None:
            report = await beside_images.measure(args, client, model, phase)
            report.publish(args.json)
            return sum(report.results["errors"].values())
        before = await client.metrics()
        start, cpu_start = time.perf_counter(), time.process_time()
        timings = await load(prompts)
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        after = await _settled_metrics(client)
    num_cut = 0 if args.dataset == RANDOM else num_cut  # a random prompt has more words than it needs
    report = make_report(_settings(args, context, len(prompts), num_cut), timings, wall)
    report.results["client_cpu_share"] = round(cpu / wall, 3)
    if cpu > 0.8 * wall:
        report.notes.append(f"the client's CPU was busy {cpu / wall:.0%} of the time and may be the bottleneck")
    _add_metrics(report, before, after)
    report.publish(args.json)
    return sum(report.results["errors"].values())


async def fit_prompts(
    client: ServerClient, model: str, texts: Sequence[str], room: int, *, chat: bool
) -> tuple[list[Prompt], int]:
    """Return prompts of at most ``room`` tokens, and how many of them were truncated.

    Raw prompts become token ids, truncated at the end. A chat prompt is rendered by the server, so its text is
    shortened until it fits.
    """
    if room < 1:
        raise ConfigError("--max-tokens leaves no room for a prompt in the model's context")
    prompts: list[Prompt] = []
    num_cut = 0
    with tqdm(total=len(texts), desc="Tokenize", file=sys.stderr, leave=False) as bar:
        for text in texts:
            prompt, cut = await _fit(client, model, text, room, chat=chat)
            prompts.append(prompt)
            num_cut += cut
            bar.update()
    return prompts, num_cut


async def _fit(client: ServerClient, model: str, text: str, room: int, *, chat: bool) -> tuple[Prompt, bool]:
    kept = text
    while True:
        tokens = await client.tokenize(model, kept, chat=chat)
        if tokens is not None and not chat:
            return tokens[:room], len(tokens) > room or kept != text
        if tokens is not None and len(tokens) <= room:
            return kept, kept != text
        share = 0.75 if tokens is None else 0.98 * room / len(tokens)
        if len(kept) <= 1:
            raise ConfigError("--max-tokens leaves no room for a message in the model's context")
        kept = kept[: max(1, int(len(kept) * share))]


# ---- load


async def closed_loop(prompts: Sequence[Prompt], concurrency: int, send: Send, done: Done) -> list[Timing]:
    """Run ``concurrency`` clients with one request at a time each. Return timings in the order of ``prompts``."""
    timings: dict[int, Timing] = {}
    waiting = iter(enumerate(prompts))

    async def one_client() -> None:
        for index, prompt in waiting:
            timings[index] = await send(prompt)
            done()

    await asyncio.gather(*(one_client() for _ in range(min(concurrency, len(prompts)))))
    return [timings[index] for index in range(len(prompts))]


async def open_loop(
    prompts: Sequence[Prompt],
    due: Iterator[float],
    send: Send,
    done: Done,
    sleep: Callable[[float], Any] = asyncio.sleep,
) -> list[Timing]:
    """Send each request at its time in ``due``, without waiting for earlier ones: a slow server shows as latency."""

    async def one(prompt: Prompt) -> Timing:
        timing = await send(prompt)
        done()
        return timing

    start = time.perf_counter()
    tasks = []
    for prompt, offset in zip(prompts, due, strict=False):
        await sleep(max(0.0, start + offset - time.perf_counter()))
        tasks.append(asyncio.create_task(one(prompt)))
    return list(await asyncio.gather(*tasks))


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Yield arrival times of a Poisson process, in seconds. Real arrivals have more bursts."""
    draw = random.Random(seed)
    at = 0.0
    while True:
        at += draw.expovariate(rate)
        yield at


# ---- report


def make_report(settings: dict[str, Any], timings: Sequence[Timing], wall: float) -> RunReport:
    whole = [t for t in timings if t.error is None]
    failed = [t.error for t in timings if t.error is not None]
    prompt_tokens, output_tokens = sum(t.prompt_tokens for t in whole), sum(t.output_tokens for t in whole)
    latencies = {
        "ttft_ms": distribution(1000 * t.ttft for t in whole if t.ttft is not None),
        "inter_token_ms": distribution(1000 * gap for t in whole for gap in t.gaps),
        "per_token_ms": distribution(1000 * t.per_token for t in whole if t.per_token is not None),
        "e2e_ms": distribution(1000 * (t.ended - t.sent) for t in whole),
    }
    totals = {
        "wall_s": wall,
        "completed": len(whole),
        "requests_per_s": len(whole) / wall,
        "output_tokens_per_s": output_tokens / wall,
        "total_tokens_per_s": (prompt_tokens + output_tokens) / wall,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "cached_tokens_share": sum(t.cached_tokens for t in whole) / prompt_tokens if prompt_tokens else 0.0,
        "finish_reasons": dict(Counter(t.finish_reason for t in whole)),
    }
    report = RunReport("serve", settings, rounded(latencies | totals, 3))
    report.results["errors"] = dict(Counter(kind for kind, _ in failed))
    labels = {
        "ttft_ms": "time to first token, ms",
        "inter_token_ms": "inter-token latency, ms",
        "per_token_ms": "time per output token, ms",
        "e2e_ms": "end to end, ms",
    }
    rows = [distribution_row(labels[name], found) for name, found in latencies.items()]
    report.tables.append(Table("latency", DISTRIBUTION_COLUMNS, rows))
    report.tables.append(_totals_table(totals, len(failed)))
    first: dict[str, str] = {}
    for kind, message in failed:
        first.setdefault(kind, message)
    report.notes += [
        f"error: {count} x {kind}: {first[kind][:MAX_MESSAGE]}" for kind, count in report.results["errors"].items()
    ]
    return report


def _totals_table(totals: dict[str, Any], num_failed: int) -> Table:
    rows: list[tuple[str, list[float | str | None]]] = [
        ("requests completed", [totals["completed"]]),
        ("requests with errors", [num_failed]),
        ("seconds", [totals["wall_s"]]),
        ("requests/s", [totals["requests_per_s"]]),
        ("output tokens/s", [totals["output_tokens_per_s"]]),
        ("prompt and output tokens/s", [totals["total_tokens_per_s"]]),
        ("prompt tokens from the prefix cache", [f"{totals['cached_tokens_share']:.1%}"]),
    ]
    return Table("throughput", ("",), rows)


def _settings(args: argparse.Namespace, context: int, num_prompts: int, num_cut: int) -> dict[str, Any]:
    load = {"concurrency": args.concurrency if args.rate is None else None, "rate": args.rate}
    flags = {
        name: getattr(args, name) for name in ("input_len", "max_tokens", "temperature", "seed", "chat", "ignore_eos")
    }
    found = {"num_prompts": num_prompts, "num_cut": num_cut, "max_model_len": context}
    return {"dataset": Path(args.dataset).name} | found | load | flags


async def _settled_metrics(client: ServerClient) -> dict[str, float]:
    """Return the server's metrics once it is idle, or after SETTLE_S."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        found = await client.metrics()
        busy = found.get("num_requests_running", 0) + found.get("num_requests_waiting", 0)
        if not busy or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.05)


def _add_metrics(report: RunReport, before: dict[str, float], after: dict[str, float]) -> None:
    """Add what the engine holds after the run: any request or block is a leak, or belongs to another client."""
    gauges = {name: int(after[name]) for name in GAUGES if name in after}
    preemptions = after.get("num_preemptions_total", 0) - before.get("num_preemptions_total", 0)
    report.results["after"] = gauges | {"preemptions": int(preemptions)}
    if len(gauges) < len(GAUGES):
        report.notes.append("server's /metrics has no gauges of requests and blocks")
        return
    running, waiting, free, usable = (gauges[name] for name in GAUGES)
    clean = not running and not waiting and free == usable
    state = f"after the run: {running} running, {waiting} waiting, {free} of {usable} blocks free"
    report.notes.append(state if clean else f"{state}: a leak, or another client is active")
