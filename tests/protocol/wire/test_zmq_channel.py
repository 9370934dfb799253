"""Links over real sockets in a private directory."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from quire.protocol.errors import EngineError
from quire.protocol.wire.channel import Link
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import Abort, EngineState, FrontEndToScheduler, SchedulerToFrontEnd
from quire.protocol.wire.link_messages import Heartbeat, Hello
from quire.protocol.wire.worker_messages import SchedulerToWorker, Shutdown, WorkerToScheduler
from quire.protocol.wire.zmq_channel import (
    AsyncZmqChannel,
    PeerMessage,
    ZmqChannel,
    ZmqHub,
    frontend_address,
    worker_address,
)

WAIT = 10.0
HELLO = Hello(1, "frontend", 0, 1)


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def hub(context: "zmq.Context[Any]", tmp_path: Path) -> Iterator[ZmqHub]:
    hub = ZmqHub(context, frontend_address(tmp_path), FrontEndToScheduler)
    yield hub
    hub.close()


def connect(context: "zmq.Context[Any]", tmp_path: Path) -> ZmqChannel:
    return ZmqChannel(context, zmq.DEALER, frontend_address(tmp_path), Link(SchedulerToFrontEnd), bind=False)


def next_of(hub: ZmqHub) -> PeerMessage:
    assert hub.socket.poll(WAIT * 1000)
    received = hub.receive()
    assert received is not None
    return received


def test_pair_of_sockets_carries_both_directions(context: "zmq.Context[Any]", tmp_path: Path) -> None:
    address = worker_address(tmp_path, 1, 0)
    scheduler = ZmqChannel(context, zmq.PAIR, address, Link(WorkerToScheduler, 1), bind=True)
    worker = ZmqChannel(context, zmq.PAIR, address, Link(SchedulerToWorker, 1), bind=False)
    assert worker.receive() is None and worker.receive(0.01) is None
    worker.send(Heartbeat(2.0))
    answer = scheduler.receive(None)  # after it, both ends are connected
    frames = scheduler.send(Shutdown())
    got = worker.receive(WAIT)
    assert got is not None and got.message == Shutdown() and [bytes(f) for f in got.frames] == frames
    assert answer is not None and answer.message == Heartbeat(2.0)
    scheduler.close()
    worker.close()


def test_message_of_an_old_epoch_is_refused(context: "zmq.Context[Any]", tmp_path: Path) -> None:
    address = worker_address(tmp_path, 2, 0)
    scheduler = ZmqChannel(context, zmq.PAIR, address, Link(WorkerToScheduler, 2), bind=True)
    worker = ZmqChannel(context, zmq.PAIR, address, Link(SchedulerToWorker, 1), bind=False)
    worker.send(Heartbeat(2.0))
    with pytest.raises(ProtocolError, match="epoch 1 in epoch 2"):
        scheduler.receive(WAIT)
    scheduler.close()
    worker.close()


def test_send_fails_when_the_peer_never_reads(context: "zmq.Context[Any]", tmp_path: Path) -> None:
    lonely = ZmqChannel(context, zmq.PAIR, worker_address(tmp_path, 1, 0), Link(SchedulerToWorker), bind=True)
    lonely.socket.setsockopt(zmq.LINGER, 0)
    with pytest.raises(EngineError, match="does not accept messages"):
        for _ in range(10_000):
            lonely.send(Shutdown())
    lonely.close()


def test_each_peer_of_a_hub_has_its_own_numbering(context: "zmq.Context[Any]", hub: ZmqHub, tmp_path: Path) -> None:
    peers = [connect(context, tmp_path) for _ in range(3)]
    names = []
    for index, peer in enumerate(peers):
        peer.send(HELLO)
        names.append(next_of(hub).peer)
        peer.send(Abort([str(index)]))
        assert next_of(hub).message == Abort([str(index)])
    assert len(set(names)) == 3
    for index in (2, 0, 1):
        assert hub.send(names[index], EngineState("ready", str(index))) is not None
        got = peers[index].receive(WAIT)
        assert got is not None and got.message == EngineState("ready", str(index))
    for peer in peers:
        peer.close()


def test_send_to_unknown_disconnected_or_forgotten_peer_returns_none(
    context: "zmq.Context[Any]", hub: ZmqHub, tmp_path: Path
) -> None:
    assert hub.send(b"unknown", EngineState("ready")) is None
    peer = connect(context, tmp_path)
    peer.send(HELLO)
    name = next_of(hub).peer
    peer.close()
    deadline = time.monotonic() + WAIT
    while hub.send(name, EngineState("ready")) is not None:
        assert time.monotonic() < deadline, "the hub did not notice the disconnect"
    hub.forget(name)
    assert hub.send(name, EngineState("ready")) is None


def test_message_to_a_dead_scheduler_does_not_reach_a_later_one(context: "zmq.Context[Any]", tmp_path: Path) -> None:
    """The socket keeps the message and would send it to any process bound to the old path, so each incarnation has its
    own path.
    """
    dead = ZmqHub(context, frontend_address(tmp_path, 1), FrontEndToScheduler)
    front_end = connect(context, tmp_path)
    front_end.send(HELLO)
    assert next_of(dead).message == HELLO
    dead.close()
    stale = front_end.send(Abort(["a"]))
    hub = ZmqHub(context, frontend_address(tmp_path, 2), FrontEndToScheduler)
    at_old_path = ZmqHub(context, frontend_address(tmp_path, 1), FrontEndToScheduler)
    for _ in range(100):  # messages sent before the socket notices the broken connection are lost
        if at_old_path.socket.poll(WAIT * 10):
            break
        front_end.send(Abort(["a"]))
    assert isinstance(next_of(at_old_path).message, ProtocolError)  # a scheduler there would refuse it as a gap
    link = Link(SchedulerToFrontEnd)
    newcomer = ZmqChannel(context, zmq.DEALER, frontend_address(tmp_path, 2), link, bind=False)
    newcomer.send(HELLO)
    assert next_of(hub).message == HELLO
    assert hub.receive() is None and not hub.refused
    copy = ZmqChannel(context, zmq.DEALER, frontend_address(tmp_path, 2), Link(SchedulerToFrontEnd), bind=False)
    copy.socket.send_multipart(stale)
    assert isinstance(next_of(hub).message, ProtocolError)
    assert hub.refused == at_old_path.refused == {"gap": 1}
    for end in (front_end, newcomer, copy, hub, at_old_path):
        end.close()


def test_asyncio_channel_exchanges_messages_with_the_hub(
    context: "zmq.Context[Any]", hub: ZmqHub, tmp_path: Path
) -> None:
    async def talk() -> None:
        own = zmq.asyncio.Context()
        channel = AsyncZmqChannel(own, frontend_address(tmp_path), Link(SchedulerToFrontEnd))
        for index in range(20):
            channel.post(Abort([str(index)]))
        loop = asyncio.get_running_loop()
        names = [await loop.run_in_executor(None, next_of, hub) for _ in range(20)]
        assert [n.message.request_ids for n in names] == [[str(i)] for i in range(20)]
        hub.send(names[0].peer, EngineState("ready"))
        assert await asyncio.wait_for(channel.receive(), WAIT) == EngineState("ready")
        channel.close()
        own.term()

    asyncio.run(talk())
