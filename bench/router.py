"""``quire bench router``: CPU time of a choice and of following events, and the memory of the index.

Runs the real Router and Follower in this process, without sockets and engines. Hashes are random.
"""

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from quire.bench.measure.report import DISTRIBUTION_COLUMNS, RunReport, Table, distribution, distribution_row, rounded
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import KVGroup, KVLayout
from quire.protocol.routing import KEY_BYTES, MAX_ENGINES, EnginePlace, RoutingConfig
from quire.protocol.wire.channel import Link
from quire.protocol.wire.kv_events import TOPIC, AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent, KVEventBatch
from quire.protocol.wire.router_messages import FrontEndToRouter, Progress, Route
from quire.router_proc.core.events import CacheChanged, EnginesKnown
from quire.router_proc.core.router import Router
from quire.router_proc.follower import Follower

HASH_BYTES = 32
BLOCK_SIZE = 16
CHAIN_BLOCKS = 6250
"""Blocks of each conversation that is cached; the first SHARED_BLOCKS are the same in all: a system prompt."""
SHARED_BLOCKS = 64
PROMPT_BLOCKS = (100, 1000, 6000)
NUM_WAITING, NUM_RUNNING = 16, 64
"""Requests that are on the engines while a choice is timed."""
MADE_AT_ONCE = 500
"""Questions that are made before they are used."""
MAX_EVENTS, MAX_HASHES = 8, 32
"""Events of a message, and hashes of an event, at most: both are uniform from 1."""
EVENTS_PER_MINUTE = 1_000_000

Hashes = list[bytes]


class Cached(NamedTuple):
    """A conversation that an engine has cached."""

    engine: int
    hashes: Hashes


def run(args: argparse.Namespace) -> None:
    """Raises ConfigError for a flag out of range."""
    for name, least, most in (
        ("engines", 2, MAX_ENGINES),
        ("blocks", CHAIN_BLOCKS, 2**22),
        ("requests", 1, 10**6),
        ("events", 1000, 10**8),
    ):
        if not least <= getattr(args, name) <= most:
            raise ConfigError(f"--{name} must be from {least} to {most} (got {getattr(args, name)})")
    rng = np.random.default_rng(0)
    router, cached = filled_router(args.engines, args.blocks, rng)
    index = router.index
    size = {"bytes_per_block": index.num_bytes / index.num_keys, "num_blocks": index.num_keys}
    choices = {str(n): measure_choices(router, cached, n, args.requests, rng) for n in PROMPT_BLOCKS}
    events = measure_events(router, cached, args.events, rng)
    settings = {name: getattr(args, name) for name in ("engines", "blocks", "requests", "events")}
    report = RunReport("router", settings, rounded({"choice": choices, "index": size, "events": events}, 3))
    title = f"CPU µs per request, {args.engines} engines of {args.blocks:,} blocks"
    labels = {
        "choose_us": "choose",
        "after_events_us": "choose, with events before",
        "message_us": "decode the message",
    }
    rows = [
        distribution_row(f"{length} blocks: {labels[name]}", figures)
        for length, found in choices.items()
        for name, figures in found.items()
    ]
    report.tables.append(Table(title, DISTRIBUTION_COLUMNS, rows))
    figures = [("bytes per block", [size["bytes_per_block"]]), *((name, [value]) for name, value in events.items())]
    report.tables.append(Table("index and events", ("",), figures))
    report.publish(args.json)


def filled_router(num_engines: int, num_blocks: int, rng: np.random.Generator) -> tuple[Router, list[Cached]]:
    """Return a Router whose engines have this many blocks cached, and which conversations these are."""
    router = Router(RoutingConfig())
    places = [EnginePlace(number, f"/engine-{number}", 1, "serving", BLOCK_SIZE) for number in range(num_engines)]
    router.consume(EnginesKnown(places))
    shared = new_hashes(SHARED_BLOCKS, rng)
    cached = []
    for engine in range(num_engines):
        left = num_blocks
        while left > SHARED_BLOCKS:
            hashes = shared + new_hashes(min(CHAIN_BLOCKS, left) - SHARED_BLOCKS, rng)
            left -= len(hashes)
            cached.append(Cached(engine, hashes))
            for at in range(0, len(hashes), MAX_HASHES):
                router.consume(CacheChanged(engine, [BlocksStored(hashes[at : at + MAX_HASHES], BLOCK_SIZE)]))
    router.index.apply()
    return router, cached


def new_hashes(number: int, rng: np.random.Generator) -> Hashes:
    raw = rng.bytes(HASH_BYTES * number)
    return [raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES)]


def measure_choices(
    router: Router, cached: list[Cached], num_blocks: int, num_requests: int, rng: np.random.Generator
) -> dict[str, dict[str, float]]:
    """Measure choices for prompts of this many blocks, of which any number is cached. Return CPU µs by what is timed.

    ``after_events_us`` includes the changes of 128 blocks, which are applied before the choice.
    """
    receiver = Link(FrontEndToRouter)
    present: deque[int] = deque()
    times: dict[str, list[float]] = {"choose_us": [], "after_events_us": [], "message_us": []}
    for ticket, frames in enumerate(_messages_of_routes(cached, num_blocks, num_requests, rng)):
        start = time.process_time_ns()
        route = receiver.incoming(frames).message
        times["message_us"].append((time.process_time_ns() - start) / 1000)
        name = "after_events_us" if ticket % 2 else "choose_us"
        if ticket % 2:
            _change_blocks(router, rng)
        start = time.process_time_ns()
        router.consume(route, 1)
        router.take_messages()
        times[name].append((time.process_time_ns() - start) / 1000)
        present.append(ticket)
        ended = [present.popleft()] if len(present) > NUM_WAITING + NUM_RUNNING else []
        router.consume(Progress([present[-NUM_WAITING]] if len(present) >= NUM_WAITING else [], ended), 1)
    router.consume(Progress([], list(present)), 1)
    return {name: distribution(found) for name, found in times.items() if found}


def _messages_of_routes(
    cached: list[Cached], num_blocks: int, number: int, rng: np.random.Generator
) -> Iterator[list[bytes]]:
    """Yield the frames of questions. Many are made before one is used, because making one evicts the CPU's caches."""
    sender = Link(FrontEndToRouter)
    made: list[list[bytes]] = []
    for ticket in range(number):
        known = cached[int(rng.integers(len(cached)))].hashes[: int(rng.integers(num_blocks + 1))]
        keys = b"".join([each[:KEY_BYTES] for each in known])
        keys += rng.bytes(KEY_BYTES * (num_blocks - len(known)))
        frames = sender.outgoing(Route(ticket, num_blocks * BLOCK_SIZE, keys, f"{ticket}"))
        made.append([bytes(frame) for frame in frames])
        if len(made) == MADE_AT_ONCE or ticket == number - 1:
            yield from made
            made = []


def _change_blocks(router: Router, rng: np.random.Generator) -> None:
    hashes = new_hashes(64, rng)
    router.consume(CacheChanged(0, [BlocksStored(hashes, BLOCK_SIZE)]))
    router.consume(CacheChanged(0, [BlocksRemoved(hashes)]))


def measure_events(router: Router, cached: list[Cached], num_events: int, rng: np.random.Generator) -> dict[str, float]:
    """Measure the CPU time of messages as engines publish them, from their bytes to the index: as many blocks are
    removed as are stored."""
    layout = KVLayout([KVGroup("full_attention", BLOCK_SIZE, [0])], num_kv_heads=1, head_dim=1, dtype="float32")
    followers, sequences = [], []
    for engine in sorted({each.engine for each in cached}):
        follower = Follower(engine, layout, HASH_BYTES, _without_start(router), lambda sequence: None)
        follower.tick(0.0)
        follower.answered([b"end", bytes(8), bytes(8)], 0.0)
        followers.append(follower)
        sequences.append(0)
    blocks = [
        deque(each for chain in cached if chain.engine == e for each in chain.hashes) for e in range(len(followers))
    ]
    spent = num_hashes = done = 0
    for events in _messages(num_events, rng):
        engine = int(rng.integers(len(followers)))
        batch = list(_events(events, blocks[engine], rng))
        frames = [TOPIC, sequences[engine].to_bytes(8, "big"), msgspec.msgpack.encode(KVEventBatch(0.0, batch))]
        sequences[engine] += 1
        start = time.process_time_ns()
        followers[engine].published(frames, 0.0)
        spent += time.process_time_ns() - start
        done += events
        num_hashes += sum(len(event.hashes) for event in batch if not isinstance(event, AllBlocksCleared))
    start = time.process_time_ns()
    router.index.apply()
    seconds = (spent + time.process_time_ns() - start) / 1e9
    router.check()
    return {
        "CPU s per 1,000,000 events": seconds / done * 1e6,
        "% of a core at 1,000,000 events a minute": seconds / done * EVENTS_PER_MINUTE / 60 * 100,
        "CPU ns per hash": seconds / num_hashes * 1e9,
        "bytes per block after them": router.index.num_bytes / router.index.num_keys,
    }


def _without_start(router: Router) -> Callable[[Any], None]:
    """Return ``router.consume`` for events after the start, which would empty the index."""
    return lambda event: router.consume(event) if isinstance(event, CacheChanged) else None


def _messages(num_events: int, rng: np.random.Generator) -> Iterator[int]:
    """Yield the numbers of events of messages."""
    while num_events > 0:
        number = min(num_events, int(rng.integers(1, MAX_EVENTS + 1)))
        num_events -= number
        yield number


def _events(number: int, blocks: deque[bytes], rng: np.random.Generator) -> Iterator[KVEvent]:
    """Yield events that store new blocks and remove the oldest ones, in turn."""
    for at in range(number):
        size = int(rng.integers(1, MAX_HASHES + 1))
        if at % 2:
            yield BlocksRemoved([blocks.popleft() for _ in range(min(size, len(blocks) - 1))])
        else:
            hashes = new_hashes(size, rng)
            blocks.extend(hashes)
            yield BlocksStored(hashes, BLOCK_SIZE)
