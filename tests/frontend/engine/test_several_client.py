"""The asyncio client of several engines over real sockets."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from scheduler_driver import make_config

from quire.frontend.engine.several_client import SeveralEnginesClient
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.routing import EnginePlace
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import (
    Abort,
    AddRequest,
    Control,
    Ended,
    EndReason,
    EngineState,
    FrontEndToScheduler,
    Introduced,
    Statistics,
    StepOutputs,
)
from quire.protocol.wire.link_messages import Hello, Message, Welcome
from quire.protocol.wire.router_messages import FrontEndToRouter, Progress, Route, Routed
from quire.protocol.wire.zmq_channel import ZmqHub, frontend_address, router_address

WAIT = 10.0


class Peer:
    """A scheduler or router of which the test sends each message."""

    def __init__(self, context: "zmq.Context[Any]", address: str, receives: Any) -> None:
        self.hub = ZmqHub(context, address, receives)
        self.peer = b""

    async def take(self, *skip: type[Message]) -> Any:
        """Return the next message that is no Hello, nor one of ``skip``."""
        while True:
            assert await asyncio.to_thread(self.hub.socket.poll, int(WAIT * 1000)), "no message received"
            received = self.hub.receive()
            assert received is not None and not isinstance(received.message, ProtocolError)
            self.peer = received.peer
            if not isinstance(received.message, (Hello, *skip)):
                return received.message
            if isinstance(received.message, Hello):
                return None

    def send(self, message: Message) -> None:
        self.hub.send(self.peer, message)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[list[Peer]]:
    """Two schedulers and a router."""
    with zmq.Context() as context, ExitStack() as stack:
        made = []
        for number in range(2):
            (tmp_path / f"engine-{number}.1").mkdir()
            address = frontend_address(tmp_path / f"engine-{number}.1", 1)
            made.append(Peer(context, address, FrontEndToScheduler))
        made.append(Peer(context, router_address(tmp_path, 1), FrontEndToRouter))
        for peer in made:
            stack.callback(peer.hub.close)
        yield made


def places(directory: Path, *states: str) -> list[EnginePlace]:
    return [
        EnginePlace(number, str(directory / f"engine-{number}.1"), 1, state, 16, 1)  # type: ignore[arg-type]
        for number, state in enumerate(states)
    ]


def test_a_stream_moves_and_questions_reach_all_engines(peers: list[Peer], tmp_path: Path, finish: Any) -> None:
    first, second, router = peers
    drained: list[int] = []

    async def talk() -> None:
        client = SeveralEnginesClient(make_config(feeds_router=True), tmp_path, 0, 10.0, drained.append)
        client.set_places(places(tmp_path, "starting", "starting"))
        await client.wait_state_known()
        client.connect_router(1)
        client.set_places(places(tmp_path, "serving", "serving"))
        for engine in (first, second):
            assert await engine.take() is None
            engine.send(EngineState("ready"))
        assert await router.take() is None
        router.send(Welcome(1, ""))
        await client.wait_ready()
        assert client.state == "ready" and [place.engine for place in client.places] == [0, 1]
        while not client._set._router.answers:
            await asyncio.sleep(0)
        updated = asyncio.Event()
        prompt = np.arange(40, dtype=np.int32)
        sequence = await client.add(AddRequest("one", prompt, SamplingParams(), 1), updated.set)
        route = await router.take()
        assert isinstance(route, Route) and (len(route.keys), route.num_tokens) == (16, 40)
        router.send(Routed(route.ticket, 1, "cached", 16))
        added = await second.take()
        assert isinstance(added, AddRequest)
        token = (np.array([7], np.int32), np.array([11], np.int32))
        second.send(StepOutputs([Introduced(7, "one", 16)], *token, []))
        await updated.wait()
        assert (await router.take()) == Progress([route.ticket], [])

        asked = asyncio.create_task(client.control("statistics"))
        for number, engine in enumerate((first, second)):
            question = await engine.take()
            assert isinstance(question, Control)
            engine.send(Statistics(question.query, num_running=number))
        assert (await asked).num_running == 1

        client.set_places(places(tmp_path, "serving", "stopped"))
        assert (await router.take()) == Progress([], [route.ticket])
        moved = await router.take()
        assert isinstance(moved, Route) and (moved.excluded, moved.num_tokens) == ([1], 41)
        router.send(Routed(moved.ticket, 0, "only"))
        added = await first.take()
        assert isinstance(added, AddRequest) and added.output_token_ids is not None
        assert added.output_token_ids.tolist() == [11]
        update = sequence.take()
        assert update is not None and update.token_ids == [11]
        updated.clear()
        first.send(StepOutputs([Introduced(3, "one", 0)], None, None, [Ended(3, int(EndReason.STOPPED), 1)]))
        await updated.wait()
        update = sequence.take()
        assert update is not None and update.ended is EndReason.STOPPED
        assert await client.wait_idle(WAIT)
        client.set_places(places(tmp_path, "draining", "stopped"))
        while drained != [0]:
            await asyncio.sleep(0.01)
        await client.close()

    finish(talk())


def test_requests_need_no_router(peers: list[Peer], tmp_path: Path, finish: Any) -> None:
    first, second, _ = peers

    async def talk() -> None:
        client = SeveralEnginesClient(make_config(), tmp_path, 0, 10.0, lambda engine: None)
        client.set_places(places(tmp_path, "serving", "serving"))
        for engine in (first, second):
            assert await engine.take() is None
            engine.send(EngineState("ready"))
        await client.wait_ready()
        while len(await asyncio.wait_for(answer_both(client, first, second), WAIT)) < 2:
            pass
        for name in ("one", "two"):
            await client.add(AddRequest(name, np.array([1, 2], np.int32), SamplingParams(), 1), lambda: None)
        taken = [await engine.take() for engine in (first, second)]
        assert [message.request_id for message in taken] == ["one", "two"]
        client.shut_down("the server stops")
        assert [await engine.take() for engine in (first, second)] == [Abort(["one"]), Abort(["two"])]
        await client.close()

    finish(talk())


async def answer_both(client: SeveralEnginesClient, *engines: Peer) -> dict[int, Statistics]:
    """Ask for statistics, which engines answer that are known to be ready."""
    asked = asyncio.create_task(client.statistics_by_engine())
    while not asked.done():
        await asyncio.sleep(0.001)
        for engine in engines:
            received = engine.hub.receive()
            if received is not None and isinstance(received.message, Control):
                engine.send(Statistics(received.message.query))
    return await asked
