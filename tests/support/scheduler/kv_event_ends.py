"""Both ends of cache events: a pool with random operations, and a consumer that follows docs/kv_events.md."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from quire.protocol.block_hash import group_key
from quire.protocol.model.kv_layout import KVGroup, KVLayout
from quire.protocol.wire.kv_events import (
    END,
    GONE,
    MORE,
    TOPIC,
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KVEvent,
    KVEventBatch,
)
from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.process.kv_event_feeds import KVEventFeeds
from quire.scheduler_proc.process.kv_event_publisher import KVEventPublisher

WAIT_MS = 60_000


def layout_of(*block_sizes: int) -> KVLayout:
    groups = [KVGroup("full_attention", size, [index]) for index, size in enumerate(block_sizes)]
    return KVLayout(groups, 1, 4, "float32")


def key_of(hash_: bytes, group: int) -> bytes:
    """The key of a block as the page defines it: hash and group."""
    return group_key(hash_, group)


class Mirror:
    """The contents that a consumer knows, by medium."""

    def __init__(self) -> None:
        self.media: dict[str, set[bytes]] = {}

    @property
    def keys(self) -> set[bytes]:
        """The device's contents."""
        return self.of("device")

    def of(self, medium: str) -> set[bytes]:
        return self.media.setdefault(medium, set())

    def apply(self, events: list[KVEvent]) -> None:
        for event in events:
            match event:
                case BlocksStored():
                    self.of(event.medium).update(key_of(h, event.group) for h in event.hashes)
                case BlocksRemoved():
                    self.of(event.medium).difference_update(key_of(h, event.group) for h in event.hashes)
                case AllBlocksCleared(medium=""):
                    self.media.clear()
                case AllBlocksCleared():
                    self.of(event.medium).clear()


def keys_of(pool: BlockPool) -> set[bytes]:
    return {key for key, _ in pool.cached_block_hash_to_block.blocks()}


class Holder:
    """Applies random operations to a pool, as requests would."""

    def __init__(self, pool: BlockPool, keys: list[bytes]) -> None:
        self.pool, self.keys = pool, keys
        self.held: list[KVCacheBlock] = []

    def act(self, action: int, number: int) -> None:
        """``number`` selects the block, the key or the count."""
        pool, held = self.pool, self.held
        key = self.keys[number % len(self.keys)]
        match action:
            case 0:
                held += pool.get_new_blocks(min(number % 4, pool.num_free_blocks))
            case 1 if held:
                held_one = held[number % len(held)]
                if held_one.block_hash is None:
                    pool.cache_full_blocks([held_one], [key])
            case 2:
                hit = pool.get_cached_blocks([key, *self.keys])
                pool.touch(hit)
                held += hit
            case 3 if held:
                count = number % len(held) + 1
                pool.free_blocks(held[:count])
                del held[:count]
            case 4:
                pool.invalidate(key)
            case 5 if number % 3 == 0:
                pool.free_blocks(held)
                held.clear()
                assert pool.reset_prefix_cache()


class Engine:
    """A pool with random operations, and its publisher; ``step`` publishes once."""

    def __init__(self, context: "zmq.Context[Any]", folder: Path, incarnation: int = 1, **kept: int) -> None:
        self.events, self.replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self.publisher = KVEventPublisher(context, self.events, self.replay, incarnation, **kept)
        self.feeds = KVEventFeeds([self.publisher], incarnation)
        recorder = self.feeds.record(layout_of(4), 32)
        self.pool = BlockPool(40, enable_caching=True, events=recorder)
        self._holder = Holder(self.pool, [os.urandom(32) for _ in range(60)])
        self._rng = random.Random(5)

    def step(self) -> None:
        before = self.publisher.next_sequence
        while self.publisher.next_sequence == before:
            for _ in range(4):
                self._holder.act(self._rng.choice([0, 1, 1, 1, 2, 3, 3, 4]), self._rng.randrange(1000))
            self.feeds.publish(float(before))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def answer(self) -> None:
        socket = self.publisher.replay_socket
        assert socket is not None and socket.poll(WAIT_MS)
        self.publisher.answer()


class Subscriber:
    """A consumer that follows the page."""

    def __init__(self, context: "zmq.Context[Any]", engine: Engine) -> None:
        self.mirror = Mirror()
        self.next = 0
        self.incarnation = -1
        self.num_gone = 0
        self._engine = engine
        self.sub = context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, TOPIC)
        self.sub.connect(engine.events)
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.LINGER, 0)
        self.dealer.connect(engine.replay)

    def read(self, loses: Callable[[int], bool] = lambda sequence: False, timeout_ms: int = 50) -> int:
        """Receive published batches while any arrive; return how often a batch was missed."""
        missed = 0
        while self.sub.poll(timeout_ms):
            topic, number, payload = self.sub.recv_multipart()
            assert topic == TOPIC
            sequence = int.from_bytes(number, "big")
            if not loses(sequence) and not self._take(sequence, payload):
                missed += 1
                self.ask()
        return missed

    def ask(self) -> None:
        """Request the batches from the next one wanted until there are no more."""
        while self.ask_once() != END:
            pass

    def ask_once(self) -> bytes:
        """Return the kind of the last answer; MORE as well if a batch is of another incarnation."""
        self.dealer.send(self.next.to_bytes(8, "big"))
        self._engine.answer()
        whole = True
        while True:
            kind, number, payload = self.receive()
            sequence = int.from_bytes(number, "big")
            if kind == TOPIC:
                whole = self._take(sequence, payload) and whole
                continue
            whole = self._is_of_this_life(int.from_bytes(payload, "big")) and whole
            if kind == GONE and whole:
                self.mirror.media.clear()
                self.next, self.num_gone = sequence, self.num_gone + 1
            elif kind != GONE:
                assert not whole or sequence == self.next
                return kind if whole else MORE

    def receive(self) -> list[bytes]:
        assert self.dealer.poll(WAIT_MS)
        return self.dealer.recv_multipart()

    def close(self) -> None:
        self.sub.close()
        self.dealer.close()

    def _take(self, sequence: int, payload: bytes) -> bool:
        """Return whether no batch is missing before this one."""
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        if self._is_of_this_life(batch.incarnation) and sequence == self.next:
            self.mirror.apply(batch.events)
            self.next += 1
        return sequence < self.next

    def _is_of_this_life(self, incarnation: int) -> bool:
        known, self.incarnation = self.incarnation, incarnation
        if known in (-1, incarnation):
            return True
        self.mirror.media.clear()
        self.next = 0
        return False
