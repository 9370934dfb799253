"""The asyncio client over a real socket: the fields of a request, and a refusal."""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from quire.frontend.engine.client import ZmqEngineClient
from quire.protocol.errors import InvalidRequest
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.adapter_messages import AdapterRef, UnloadAdapter
from quire.protocol.wire.front_end_messages import (
    AddRequest,
    Control,
    EngineState,
    FrontEndToScheduler,
    Rejected,
    Statistics,
)
from quire.protocol.wire.link_messages import Hello
from quire.protocol.wire.zmq_channel import PeerMessage, ZmqHub, frontend_address

WAIT = 10.0


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ZmqHub]:
    with zmq.Context() as context:
        hub = ZmqHub(context, frontend_address(tmp_path), FrontEndToScheduler)
        yield hub
        hub.close()


def next_of(hub: ZmqHub) -> PeerMessage:
    assert hub.socket.poll(int(WAIT * 1000)), "no message received"
    received = hub.receive()
    assert received is not None
    return received


def test_priority_and_salt_are_sent_and_a_full_queue_is_reported(hub: ZmqHub, tmp_path: Path, finish: Any) -> None:
    async def talk() -> None:
        client = ZmqEngineClient(tmp_path, 64, 300)
        client.connect()
        hello = await asyncio.to_thread(next_of, hub)
        assert isinstance(hello.message, Hello)
        hub.send(hello.peer, EngineState("ready"))
        updated = asyncio.Event()
        params = SamplingParams(max_tokens=4)
        request = AddRequest("one", np.array([5, 6], np.int32), params, 11, priority=-(2**31), cache_salt="mine")
        sequence = await client.add(request, updated.set)
        added = (await asyncio.to_thread(next_of, hub)).message
        assert isinstance(added, AddRequest)
        assert (added.request_id, added.priority, added.cache_salt, added.seed) == ("one", -(2**31), "mine", 11)
        hub.send(hello.peer, Rejected("one", "queue_full", "", "2 requests wait already"))
        await updated.wait()
        with pytest.raises(InvalidRequest) as caught:
            sequence.take()
        assert (caught.value.code, caught.value.param) == ("queue_full", None)
        assert await client.wait_idle(WAIT)
        sequence.abort()  # the sequence has ended, so nothing is sent
        await client.close()
        assert hub.receive() is None

    finish(talk())


def test_an_adapter_is_sent_with_a_request_and_unloaded(hub: ZmqHub, tmp_path: Path, finish: Any) -> None:
    async def talk() -> None:
        client, adapter = ZmqEngineClient(tmp_path, 64, 300), AdapterRef("sql", bytes(range(32)), "/sql")
        client.connect()
        hello = await asyncio.to_thread(next_of, hub)
        hub.send(hello.peer, EngineState("ready"))
        await client.wait_state_known()
        params = SamplingParams(max_tokens=4)
        request = AddRequest("one", np.array([5], np.int32), params, 1, adapter=adapter)
        sequence = await client.add(request, lambda: None)
        added = (await asyncio.to_thread(next_of, hub)).message
        assert isinstance(added, AddRequest)
        assert added.adapter == adapter
        question = partial(UnloadAdapter, adapter.name, adapter.digest, True)
        unloading = asyncio.create_task(client.ask(question, lambda request: request.adapter == adapter))
        sent = (await asyncio.to_thread(next_of, hub)).message
        assert isinstance(sent, UnloadAdapter)
        assert (sent.name, sent.digest, sent.force) == ("sql", adapter.digest, True)
        hub.send(hello.peer, Statistics(sent.query, done=False))
        assert not (await unloading).done
        sequence.abort()
        await client.close()

    finish(talk())


def test_statistics_are_those_of_a_scheduler_never_zeros_in_place_of_them(
    hub: ZmqHub, tmp_path: Path, finish: Any
) -> None:
    """Zeros while workers are replaced would be a reset of all counters, after which they jump."""

    async def talk() -> None:
        client = ZmqEngineClient(tmp_path, 64, 300)
        client.connect()
        hello = await asyncio.to_thread(next_of, hub)
        assert await client.statistics_by_engine() == {}
        for state in ("ready", "recovering"):
            hub.send(hello.peer, EngineState(state))
            while client.state != state:
                await asyncio.sleep(0)
            asked = asyncio.create_task(client.statistics_by_engine())
            control = (await asyncio.to_thread(next_of, hub)).message
            assert isinstance(control, Control) and control.kind == "statistics"
            hub.send(hello.peer, Statistics(control.query, num_steps=7))
            statistics = await asked
            assert statistics[0].num_steps == 7
        await client.close()

    finish(talk())
