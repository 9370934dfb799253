"""Events in vLLM's format: a router that follows parents and tokens knows exactly the cached prefixes."""

import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from fake_adapters import adapter_ref
from kv_event_ends import WAIT_MS, key_of, keys_of, layout_of
from scheduler_driver import Driver
from vllm_events import Batch, BlockStored, Follower
from waits import wait_for

from quire.protocol.block_hash import prompt_hashes
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import KVGroup, KVLayout
from quire.protocol.wire.kv_events import HASH_BYTES
from quire.scheduler_proc.kv.events import DescribingRecorder, Span
from quire.scheduler_proc.process.kv_event_feeds import KVEventFeeds
from quire.scheduler_proc.process.kv_event_publisher import ANSWER_BATCHES, ANSWER_BYTES
from quire.scheduler_proc.process.vllm_kv_events import VllmEncoder, VllmPublisher

END = [b"", b"", b"\xff" * 8, b""]


class Followed:
    """An engine whose events are followed after each step, from its first one on."""

    def __init__(self, **settings: Any) -> None:
        self.driver = Driver(**settings)
        config = self.driver.config
        kv = self.driver.scheduler.kv
        self.recorder = DescribingRecorder(kv.layout, HASH_BYTES[config.prefix_caching_hash_algo])
        self.pools = [kv.pool, *(tier.pages for tier in kv.tiers)]
        for pool in self.pools:
            pool.events = self.recorder
        self.follower = Follower()
        self.batches: list[Batch] = []
        self._encoder = VllmEncoder(3)

    def follow(self) -> None:
        payload = self._encoder.encode(12.5, self.recorder.take(), self.recorder)
        self.recorder.forget()
        self.batches.append(self.follower.apply(payload))

    def check(self) -> None:
        """Check that the follower has the contents of the device, each with the prefix of which it is the end."""
        size, found = self.driver.config.block_size, set()
        for name in self.follower.of("GPU"):
            keys, tokens = self.follower.prefixes[name]
            hashes = prompt_hashes(tokens, size, *keys)
            assert len(hashes) * size == len(tokens)
            found.add(hashes[-1])
            assert name == int.from_bytes(hashes[-1], "big") % 2**63
        assert found == keys_of(self.pools[0])


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
def test_a_router_rebuilds_the_cached_prefixes(seed: int) -> None:
    """Prompts share beginnings and salts, the pool is small, and steps decode several blocks at once."""
    rng = random.Random(seed)
    engine = Followed(num_blocks=40, max_num_seqs=6, async_scheduling=bool(seed % 2))
    beginnings = [[rng.randrange(100) for _ in range(30)] for _ in range(3)]
    for number in range(30):
        prompt = [*rng.choice(beginnings)[: rng.randint(4, 30)], *(rng.randrange(9) for _ in range(rng.randint(1, 9)))]
        salt = rng.choice(("", "", "a salt"))
        engine.driver.add(str(number), prompt, max_tokens=rng.randint(1, 14), ignore_eos=True, cache_salt=salt)
        for _ in range(rng.randint(0, 5)):
            engine.driver.step()
            engine.follow()
            engine.check()
    engine.driver.finish()
    engine.follow()
    engine.check()
    assert {batch.data_parallel_rank for batch in engine.batches} == {3} and engine.batches[0].ts == 12.5


def test_contents_in_host_memory_are_named_without_tokens_and_loaded_with_them() -> None:
    engine = Followed(num_blocks=25, num_host_pages=30)
    for number in range(12):
        engine.driver.add(str(number), [number % 3 + 1] * 40, max_tokens=3)
        engine.driver.run()
        if number == 7:
            engine.driver.restart_worker()
        engine.follow()
        engine.check()
        held = {int.from_bytes(key, "big") % 2**63 for key in keys_of(engine.pools[1])}
        assert engine.follower.of("CPU") <= held
        assert number >= 7 or engine.follower.of("CPU") == held, "until a worker dies, which clears all media"
    stored = [each for batch in engine.batches for each in batch.events if isinstance(each, BlockStored)]
    assert {each.medium: bool(each.token_ids) for each in stored} == {"GPU": True, "CPU": False}
    assert all(each.token_ids for each in stored if each.medium == "GPU"), "those that were loaded, too"
    (load,) = [each for each in engine.driver.scheduler.statistics().tiers if each.name == "host"]
    assert load.num_loaded > 0


class Filled:
    """A request with full blocks of 4 tokens."""

    handle = 1

    def __init__(self, count: int, span: Span) -> None:
        self.block_hashes = [bytes([0xFF - at]) * 32 for at in range(count)]
        self._span = span

    def span(self, start: int, end: int) -> Span:
        return self._span._replace(token_ids=self._span.token_ids[start:end])


def number_of(byte: int) -> int:
    return int.from_bytes([byte] * 8, "big") % 2**63


def events_of(recorder: DescribingRecorder) -> list[dict[str, Any]]:
    """Return the events since the last call as plain values, because routers in other languages read these."""
    payload = VllmEncoder(0).encode(1.0, recorder.take(), recorder)
    recorder.forget()
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert (ts, rank) == (1.0, 0)
    return list(events)


def test_events_are_maps_with_the_names_of_vllm() -> None:
    recorder = DescribingRecorder(layout_of(4), 32)
    adapter = adapter_ref("an adapter", "content")
    request = Filled(3, Span(list(range(12)), ("salt",)))
    recorder.label = lambda _: (7, adapter.name)
    recorder.covers = lambda _, begin, end: ("picture",) if begin <= 5 < end else ()
    recorder.cleared()
    recorder.describe(request, 0, 0, 3)
    recorder.stored(request.block_hashes[:2], "device")
    recorder.stored(request.block_hashes[2:], "host")
    recorder.removed(request.block_hashes[:1], "device")
    shared = {"lora_id": None, "lora_name": None, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    assert events_of(recorder) == [
        {"type": "AllBlocksCleared"},
        shared
        | {
            "type": "BlockStored",
            "block_hashes": [number_of(0xFF), number_of(0xFE)],
            "parent_block_hash": None,
            "token_ids": list(range(8)),
            "block_size": 4,
            "medium": "GPU",
            "lora_id": 7,
            "lora_name": "an adapter",
            "extra_keys": [["an adapter", "salt"], ["an adapter", "picture"]],
        },
        shared
        | {
            "type": "BlockStored",
            "block_hashes": [number_of(0xFD)],
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 0,
            "medium": "CPU",
        },
        {"type": "BlockRemoved", "block_hashes": [number_of(0xFF)], "medium": "GPU", "group_idx": 0},
    ]


def test_events_name_the_kind_of_their_group() -> None:
    window = KVGroup("sliding_window", 4, [1], window=16)
    recorder = DescribingRecorder(KVLayout([KVGroup("full_attention", 4, [0]), window], 1, 4, "float32"), 32)
    request = Filled(6, Span(list(range(24))))
    for group in (0, 1):
        recorder.describe(request, group, 1, 3)
    recorder.stored(request.block_hashes[1:3], "device")
    recorder.stored([key_of(request.block_hashes[at], 1) for at in (1, 2)], "device")
    first, second = events_of(recorder)
    assert first["token_ids"] == list(range(4, 12)) and first["parent_block_hash"] == number_of(0xFF)
    assert "kv_cache_spec_sliding_window" not in first
    assert second["block_hashes"] == first["block_hashes"] and second["token_ids"] == first["token_ids"]
    assert (second["group_idx"], second["kv_cache_spec_kind"]) == (1, "sliding_window")
    assert second["kv_cache_spec_sliding_window"] == 16


def test_blocks_of_several_requests_are_events_of_their_own() -> None:
    recorder = DescribingRecorder(layout_of(4), 32)
    requests = [Filled(2, Span([number] * 8)) for number in (1, 2)]
    requests[1].block_hashes = [bytes([at]) * 32 for at in (1, 2)]
    for request in requests:
        recorder.describe(request, 0, 1, 2)
    recorder.stored([request.block_hashes[1] for request in requests], "device")
    assert [event["token_ids"] for event in events_of(recorder)] == [[1] * 4, [2] * 4]
    recorder.stored(requests[0].block_hashes[:1], "device")
    assert [event["token_ids"] for event in events_of(recorder)] == [[]], "its tokens are not known"


# ---- sockets


class Published:
    """A publisher of vLLM's events with a subscriber and a client for replays."""

    def __init__(self, context: "zmq.Context[Any]", folder: Path, **kept: int) -> None:
        events, self.replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self.publisher = VllmPublisher(context, events, self.replay, "kv@pod@model", **kept)
        self.feeds = KVEventFeeds([self.publisher], rank=1, wall=lambda: 5.0)
        self.recorder = self.feeds.record(layout_of(4), 32)
        self._context = context
        self._sockets = [context.socket(zmq.SUB)]
        self.sub = self._sockets[0]
        self.sub.subscribe(b"kv@")
        self.sub.connect(events)

    def client(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self.replay)
        self._sockets.append(socket)
        return socket

    def publish(self, count: int) -> None:
        for number in range(count):
            self.recorder.stored([number.to_bytes(32, "big")], "host")
            self.feeds.publish(0.0)

    def answers_to(self, client: Any, start: int) -> list[list[bytes]]:
        """Return the messages of an answer; each turn of the engine sends a part of it."""
        client.send_multipart([b"", start.to_bytes(8, "big")])
        (socket,) = self.feeds.replay_sockets
        assert socket.poll(WAIT_MS)
        found: list[list[bytes]] = []
        while not found or found[-1] != END:
            self.feeds.answer()
            while client.poll(20 if self.feeds.remaining() is not None else 200):
                found.append(client.recv_multipart())
        assert self.feeds.remaining() is None
        return found

    def close(self) -> None:
        for each in self._sockets:
            each.close()
        self.feeds.close()


@pytest.fixture
def published(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Published]:
    with zmq.Context() as context:
        published = Published(context, tmp_path, **getattr(request, "param", {}))
        yield published
        published.close()


def test_messages_and_replays_have_the_frames_of_vllm(published: Published) -> None:
    wait_for(lambda: published.sub.poll(20) or published.publish(1))  # type: ignore[func-returns-value]
    topic, sequence, payload = published.sub.recv_multipart()
    assert topic == b"kv@pod@model" and len(sequence) == 8
    assert msgspec.msgpack.decode(payload, type=Batch).data_parallel_rank == 1
    published.publish(2 * ANSWER_BATCHES)
    last = published.publisher.next_sequence
    dealer = published.client(zmq.DEALER)
    first = int.from_bytes(sequence, "big")
    *batches, end = published.answers_to(dealer, first)
    assert [frames[:3] for frames in batches] == [[b"", topic, at.to_bytes(8, "big")] for at in range(first, last)]
    assert end == END and int.from_bytes(end[2], "big", signed=True) == -1
    assert batches[0][3] == payload
    assert published.answers_to(dealer, last) == [END] == published.answers_to(dealer, last + 9)
    single = published.client(zmq.REQ)
    single.send(last.to_bytes(8, "big"))
    assert published.feeds.replay_sockets[0].poll(WAIT_MS)
    published.feeds.answer()
    assert single.recv_multipart() == END[1:]


@pytest.mark.parametrize("published", [{"kept_batches": 10}], indirect=True)
def test_a_replay_begins_with_the_oldest_batch_that_is_kept(published: Published) -> None:
    published.publish(40)
    batches = published.answers_to(published.client(zmq.DEALER), 0)[:-1]
    assert [int.from_bytes(frames[2], "big") for frames in batches] == list(range(30, 40))


def test_tokens_of_blocks_that_were_cached_before_are_not_kept(published: Published) -> None:
    recorder = published.recorder
    assert isinstance(recorder, DescribingRecorder)
    published.feeds.publish(0.0)
    recorder.describe(Filled(3, Span(list(range(12)))), 0, 0, 3)
    published.feeds.publish(1.0)  # a step without events
    assert published.publisher.next_sequence == 1 and not recorder.origins


@pytest.mark.parametrize(("size", "count", "turns"), [(10, 3 * ANSWER_BATCHES, 3), (ANSWER_BYTES // 2, 8, 4)])
def test_a_turn_sends_a_few_batches_to_one_client(published: Published, size: int, count: int, turns: int) -> None:
    for _ in range(count):
        published.publisher.publish(bytes(size))
    waiting = [published.client(zmq.DEALER) for _ in range(3)]
    for dealer in waiting:
        dealer.send_multipart([b"", bytes(8)])
    assert published.feeds.replay_sockets[0].poll(WAIT_MS)
    num_turns = 0
    while waiting:
        published.feeds.answer()
        num_turns += 1
        for dealer in list(waiting):
            while dealer.poll(5):
                if dealer.recv_multipart() == END:
                    waiting.remove(dealer)
    assert num_turns >= 3 * turns and published.feeds.remaining() is None


def test_malformed_replay_requests_and_clients_that_leave_are_ignored(published: Published) -> None:
    published.publish(3 * ANSWER_BATCHES)
    leaving, dealer = published.client(zmq.DEALER), published.client(zmq.DEALER)
    for frames in ([bytes(8)], [b"x", bytes(8)], [b"", bytes(7)], [b"", b"", bytes(8)], [b""]):
        dealer.send_multipart(frames)
        assert published.feeds.replay_sockets[0].poll(WAIT_MS)
        published.feeds.answer()
        assert published.feeds.remaining() is None
    leaving.send_multipart([b"", bytes(8)])
    assert published.feeds.replay_sockets[0].poll(WAIT_MS)
    published.feeds.answer()
    assert published.feeds.remaining() == 0.0
    leaving.close()
    assert len(published.answers_to(dealer, 0)) == 3 * ANSWER_BATCHES + 1


def test_tcp_without_keys_is_read_by_any_subscriber_if_it_is_allowed() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with zmq.Context() as context:
        with pytest.raises(ConfigError, match="TCP needs CURVE keys"):
            VllmPublisher(context, endpoint, "", "")
        publisher = VllmPublisher(context, endpoint, "", "", is_open=True)
        with context.socket(zmq.SUB) as sub:
            sub.subscribe(b"")
            sub.connect(endpoint)
            wait_for(lambda: sub.poll(20) or publisher.publish(b"batch"))  # type: ignore[func-returns-value]
            assert sub.recv_multipart()[::2] == [b"", b"batch"]
        publisher.close()
