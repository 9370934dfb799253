"""The scheduler's loop publishes the cache changes of each step and answers replay requests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from kv_event_ends import WAIT_MS, Mirror
from loop_under_test import LoopUnderTest
from scheduler_driver import make_config, make_request
from vllm_events import Follower

from quire.protocol.wire.front_end_messages import Control, Statistics, StepOutputs
from quire.protocol.wire.kv_events import END, TOPIC, AllBlocksCleared, BlocksStored, KVEvent, KVEventBatch
from quire.protocol.wire.transfer_messages import CONTENTS_PER_MESSAGE, DiskContents, DiskPages
from quire.protocol.wire.zmq_channel import kv_events_address

pytestmark = pytest.mark.full


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    with zmq.Context() as context:
        yield context


def batches_from(dealer: Any, sequence: int) -> tuple[list[list[KVEvent]], bytes]:
    """Return the kept batches from this number on, as far as an answer has them, and how it ends."""
    dealer.send(sequence.to_bytes(8, "big"))
    found: list[list[KVEvent]] = []
    while True:
        assert dealer.poll(WAIT_MS)
        kind, _, payload = dealer.recv_multipart()
        if kind != TOPIC:
            return found, kind
        found.append(msgspec.msgpack.decode(payload, type=KVEventBatch).events)


def test_the_loop_publishes_events_and_answers_requests(context: "zmq.Context[Any]", tmp_path: Path) -> None:
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = make_config(kv_events_endpoint=events, kv_events_replay_endpoint=replay)
    loop = LoopUnderTest(context, tmp_path, config)
    loop.handshake()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(replay)

    def kept() -> list[KVEvent]:
        return [event for batch in batches_from(dealer, 0)[0] for event in batch]

    loop.client.send(make_request("a", list(range(10)), max_tokens=8, temperature=0.0))
    loop.until(lambda message: isinstance(message, StepOutputs) and bool(message.ended))
    events_so_far = kept()
    assert events_so_far[0] == AllBlocksCleared()
    stored = [h for event in events_so_far[1:] if isinstance(event, BlocksStored) for h in event.hashes]
    assert len(stored) == len(set(stored)) == 4  # 10 + 8 tokens in blocks of 4, the last token never computed
    loop.client.send(Control("reset_prefix_cache"))
    loop.until(lambda message: isinstance(message, Statistics) and message.done)
    mirror = Mirror()
    mirror.apply(kept())
    assert mirror.keys == set()
    dealer.close()
    loop.stop()


def test_the_router_and_the_subscribers_of_the_user_get_equal_batches(
    context: "zmq.Context[Any]", tmp_path: Path
) -> None:
    router, router_replay = kv_events_address(tmp_path, 1)
    replay = f"ipc://{tmp_path}/replay"
    endpoints = {"kv_events_endpoint": f"ipc://{tmp_path}/events", "kv_events_replay_endpoint": replay}
    config = make_config(feeds_router=True, **endpoints)
    loop = LoopUnderTest(context, tmp_path, config)
    subscriber = context.socket(zmq.SUB)
    subscriber.subscribe(TOPIC)
    subscriber.connect(router)
    loop.handshake()
    loop.client.send(make_request("a", list(range(10)), max_tokens=8, temperature=0.0))
    loop.until(lambda message: isinstance(message, StepOutputs) and bool(message.ended))
    assert subscriber.poll(WAIT_MS) and subscriber.recv_multipart()[0] == TOPIC
    found = []
    for address in (router_replay, replay):
        dealer = context.socket(zmq.DEALER)
        dealer.connect(address)
        found.append(batches_from(dealer, 0))
        dealer.close()
    assert found[0] == found[1] and len(found[0][0]) > 1
    subscriber.close()
    loop.stop()


def test_subscribers_of_the_user_may_get_events_in_the_format_of_vllm(
    context: "zmq.Context[Any]", tmp_path: Path
) -> None:
    """The router of the server gets those of Quire beside them."""
    replay = f"ipc://{tmp_path}/replay"
    endpoints = {"kv_events_endpoint": f"ipc://{tmp_path}/events", "kv_events_replay_endpoint": replay}
    config = make_config(feeds_router=True, kv_events_format="vllm", kv_events_topic="kv@a@b", **endpoints)
    loop = LoopUnderTest(context, tmp_path, config)
    loop.handshake()
    loop.client.send(make_request("a", list(range(10)), max_tokens=8, temperature=0.0))
    loop.until(lambda message: isinstance(message, StepOutputs) and bool(message.ended))
    dealer = context.socket(zmq.DEALER)
    dealer.connect(replay)
    dealer.send_multipart([b"", bytes(8)])
    follower = Follower()
    while dealer.poll(WAIT_MS) and (frames := dealer.recv_multipart())[3]:
        assert frames[:2] == [b"", b"kv@a@b"]
        follower.apply(frames[3])
    assert max((tokens for _, tokens in follower.prefixes.values()), key=len)[:10] == tuple(range(10))
    assert len(follower.of("GPU")) == 4
    dealer.close()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(kv_events_address(tmp_path, 1)[1])
    events = [event for batch in batches_from(dealer, 0)[0] for event in batch]
    assert sum(len(event.hashes) for event in events if isinstance(event, BlocksStored)) == 4
    dealer.close()
    loop.stop()


def test_without_prefix_caching_the_router_learns_that_nothing_is_cached(
    context: "zmq.Context[Any]", tmp_path: Path
) -> None:
    loop = LoopUnderTest(context, tmp_path, make_config(feeds_router=True, enable_prefix_caching=False))
    loop.handshake()
    loop.client.send(make_request("a", list(range(10)), max_tokens=8, temperature=0.0))
    loop.until(lambda message: isinstance(message, StepOutputs) and bool(message.ended))
    dealer = context.socket(zmq.DEALER)
    dealer.connect(kv_events_address(tmp_path, 1)[1])
    assert batches_from(dealer, 0) == ([[AllBlocksCleared()]], END)
    dealer.close()
    loop.stop()


def test_the_contents_of_a_disk_are_named_in_parts(context: "zmq.Context[Any]", tmp_path: Path) -> None:
    """In events, in the event log, and so in traces: none has more than CONTENTS_PER_MESSAGE; the oldest come first."""
    count, replay = 2 * CONTENTS_PER_MESSAGE + 5, f"ipc://{tmp_path}/replay"
    cache = {"ssd_cache_dir": str(tmp_path / "cache"), "ssd_cache_bytes": (count + 1) * 4096}
    config = make_config(kv_events_endpoint=f"ipc://{tmp_path}/events", kv_events_replay_endpoint=replay, **cache)
    loop = LoopUnderTest(context, tmp_path, config)
    loop.handshake()
    while not isinstance(message := loop._next(loop.worker), DiskPages):
        pass
    keys = [page.to_bytes(32, "big") for page in range(1, count + 1)]
    ids, generations = np.arange(1, count + 1, dtype=np.int32), np.arange(count, 0, -1)
    for part in DiskContents(message.first_page + ids, generations, b"".join(keys)).parts():
        loop.worker.send(part)
    statistics: list[Statistics] = []
    while not statistics or not statistics[-1].tiers[0].num_pages:
        loop.client.send(Control("statistics"))
        loop.until(lambda message: isinstance(message, Statistics) and not statistics.append(message))
    assert statistics[-1].tiers[0].num_cached == count
    dealer = context.socket(zmq.DEALER)
    dealer.connect(replay)
    batches: list[list[KVEvent]] = []
    kind = b""
    while kind != END:
        found, kind = batches_from(dealer, len(batches))
        batches += found
    stored = [event.hashes for batch in batches for event in batch if isinstance(event, BlocksStored)]
    assert [len(hashes) for hashes in stored] == [CONTENTS_PER_MESSAGE, CONTENTS_PER_MESSAGE, 5]
    assert [key for hashes in stored for key in hashes] == keys[::-1]
    assert max(len(batch) for batch in batches) <= 2
    dealer.close()
    loop.stop()
    assert max(len(frame) for record in loop.log for frame in record.frames) < 50 * CONTENTS_PER_MESSAGE
