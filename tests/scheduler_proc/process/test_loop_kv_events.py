"""The scheduler's loop publishes the cache changes of each step and answers replay requests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from kv_event_ends import WAIT_MS, Mirror
from loop_under_test import LoopUnderTest
from scheduler_driver import make_config, make_request

from quire.protocol.wire.front_end_messages import Control, Statistics, StepOutputs
from quire.protocol.wire.kv_events import TOPIC, AllBlocksCleared, BlocksStored, KVEvent, KVEventBatch

pytestmark = pytest.mark.full


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    with zmq.Context() as context:
        yield context


def test_the_loop_publishes_events_and_answers_requests(context: "zmq.Context[Any]", tmp_path: Path) -> None:
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = make_config(kv_events_endpoint=events, kv_events_replay_endpoint=replay)
    loop = LoopUnderTest(context, tmp_path, config)
    loop.handshake()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(replay)

    def kept() -> list[KVEvent]:
        dealer.send(bytes(8))
        found: list[KVEvent] = []
        while True:
            assert dealer.poll(WAIT_MS)
            kind, _, payload = dealer.recv_multipart()
            if kind != TOPIC:
                return found
            found += msgspec.msgpack.decode(payload, type=KVEventBatch).events

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
