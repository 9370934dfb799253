"""``quire bench serve --images``: the time between tokens of text streams, alone and beside images, by turns.

Images are sent by a process of their own, ``... URL MODEL N``, so that the client whose streams are timed handles no
bodies of megabytes. It has the lowest priority, because clients of a server have machines of their own.
"""

import argparse
import asyncio
import base64
import os
import random
import signal
import statistics
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from itertools import pairwise

from quire.bench.measure.http_client import RequestSettings, ServerClient, Timing
from quire.bench.measure.report import DISTRIBUTION_COLUMNS, RunReport, Table, distribution, distribution_row, rounded

POLL_S = 1.0
ANSWERED = "answered"
WIDTH, HEIGHT = 640, 480
PHASES = ("alone", "beside images")

Phase = Callable[[int], Awaitable[list[Timing]]]


async def measure(args: argparse.Namespace, client: ServerClient, model: str, phase: Phase) -> RunReport:
    """Return the report of ``--rounds`` rounds, of which each has a phase without images and one beside them.

    ``phase``: runs the text streams; its argument is a number that no other phase has.
    """
    gaps: dict[str, list[list[float]]] = {name: [] for name in PHASES}
    answers: Counter[str] = Counter()
    used: list[float] = []
    for number in range(-1, 2 * args.rounds):  # the first phase warms up beside images
        async with _images_in_work(args, model, answers) if number % 2 else nullcontext():
            while number < 0 and not answers:  # the first image waits for a helper process to start
                await asyncio.sleep(POLL_S)
            timings = await phase(number)
            figures = await client.metrics()
            used.append(figures.get("encoder_cache_used_tokens", 0))
        answers.update("a text stream: " + " ".join(each.error) for each in timings if each.error)
        if number >= 0:
            gaps[PHASES[number % 2]].append([b - a for each in timings for a, b in pairwise(each.chunks)])
    size = figures.get("encoder_cache_size_tokens", 0)
    return _report(args, gaps, answers, {"most_rows_in_encoder_cache": max(used), "rows_of_encoder_cache": size})


def _report(
    args: argparse.Namespace, gaps: dict[str, list[list[float]]], answers: Counter[str], rows: dict[str, float]
) -> RunReport:
    whole = {name: distribution(1000 * gap for each in found for gap in each) for name, found in gaps.items()}
    alone, beside = ([distribution(each).get("p99", 0.0) for each in gaps[name]] for name in PHASES)
    ratios = [later / first for first, later in zip(alone, beside, strict=True) if first]
    ratio = round(statistics.median(ratios), 3) if ratios else None
    names = ("images", "rounds", "num_prompts", "input_len", "concurrency", "rate", "max_tokens", "chat")
    found = {"inter_token_ms": whole, "p99_ratios": ratios, "p99_ratio": ratio, "images_answered": answers[ANSWERED]}
    report = RunReport("serve beside images", {name: getattr(args, name) for name in names}, rounded(found | rows, 3))
    errors = {kind: count for kind, count in answers.items() if kind != ANSWERED}
    report.results["errors"] = errors | ({} if answers[ANSWERED] else {"no image was answered": 1})
    table = [distribution_row(name, each) for name, each in whole.items()]
    report.tables.append(Table("inter-token latency, ms", DISTRIBUTION_COLUMNS, table))
    report.notes.append(f"p99 beside images / p99 alone, median of {len(ratios)} rounds: {ratio}")
    most, size = map(int, rows.values())
    report.notes.append(f"{answers[ANSWERED]} images answered, at most {most} of {size} rows in the encoder cache")
    report.notes += [f"error: {count} x {text[:200]}" for text, count in report.results["errors"].items()]
    return report


@asynccontextmanager
async def _images_in_work(args: argparse.Namespace, model: str, answers: Counter[str]) -> AsyncIterator[None]:
    """Keep images in work. ``answers``: counts each answer by how it ended."""
    command = (sys.executable, "-P", "-m", "quire.bench.beside_images", args.url, model, str(args.images))
    environment = os.environ | ({"QUIRE_API_KEY": args.api_key} if args.api_key else {})
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
    assert process.stdout is not None
    lines = process.stdout

    async def count() -> None:
        async for line in lines:
            answers[line.decode().strip()] += 1
        if await process.wait() != -signal.SIGKILL:
            answers[f"the process that sends images ended with status {process.returncode}"] += 1

    await lines.readline()
    counting = asyncio.create_task(count())
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await counting


async def _send(url: str, model: str, count: int) -> None:
    """Keep ``count`` images in work. Write a line before the first one, and one for each answer."""
    settings = RequestSettings(model, max_tokens=1, temperature=0.0, seed=0, chat=True, ignore_eos=True)

    async def one_client(client: ServerClient) -> None:
        error = None
        while error is None:
            content = [{"type": "image_url", "image_url": {"url": random_image()}}]
            error = (await client.stream(settings, content, time.perf_counter)).error
            print(" ".join(error) if error else ANSWERED, flush=True)

    async with ServerClient(url, None) as client:
        print(flush=True)
        await asyncio.gather(*(one_client(client) for _ in range(count)))


def random_image() -> str:
    """Return the data URL of a PNG of noise, which no cache has."""
    lines = b"".join(b"\0" + random.randbytes(3 * WIDTH) for _ in range(HEIGHT))
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)  # 8 bits, RGB
    chunks = (b"IHDR" + header, b"IDAT" + zlib.compress(lines, 0), b"IEND")
    parts = (struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in chunks)
    file = b"".join((b"\x89PNG\r\n\x1a\n", *parts))
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


if __name__ == "__main__":
    os.nice(19)
    asyncio.run(_send(sys.argv[1], sys.argv[2], int(sys.argv[3])))
