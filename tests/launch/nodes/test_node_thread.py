"""Links of the head machine to agents, over real sockets with keys."""

import contextlib
import queue
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from node_agents import agent_in_thread

from quire.launch.nodes import node_link, node_thread
from quire.launch.nodes.addresses import ReservedPort, parse_address
from quire.launch.nodes.keys import HEAD_SECRET, HeadKeys, load_head_keys, load_node_key, make_keys
from quire.launch.nodes.node_thread import NodeThread
from quire.protocol.wire import connection_limit
from quire.protocol.wire.channel import Link
from quire.protocol.wire.curve_keys import CurveEnd
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Refused
from quire.protocol.wire.node_messages import JoinNode, NodeInfo, NodeToHead, StartWorker
from quire.version import __version__

WAIT_S = 20.0


class Events:
    """A Handler that queues what happens."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def ready(self, address: str, info: NodeInfo) -> None:
        self._queue.put(("ready", info))

    def lost(self, address: str, reason: str, *, is_final: bool) -> None:
        self._queue.put(("final" if is_final else "lost", reason))

    def received(self, address: str, message: Any) -> None:
        self._queue.put(("received", message))

    def next(self) -> tuple[str, Any]:
        return self._queue.get(timeout=WAIT_S)


@contextlib.contextmanager
def connected(address: str, keys: HeadKeys, node_key: str) -> Iterator[tuple[NodeThread, Events]]:
    events = Events()
    thread = NodeThread(keys, events)
    try:
        thread.add(address, node_key)
        yield thread, events
    finally:
        thread.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of an agent, and the folder of the head's keys."""
    with agent_in_thread(tmp_path, devices=3) as found:
        yield found


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_link, "CONNECT_S", 1.0)
    monkeypatch.setattr(node_thread, "RETRY_S", 0.05)


def test_a_node_says_what_it_has_and_answers(agent: tuple[str, Path]) -> None:
    address, head = agent
    with connected(address, load_head_keys(head / HEAD_SECRET), load_node_key(head)) as (thread, events):
        kind, info = events.next()
        assert kind == "ready" and (info.host, info.num_devices) == (socket.gethostname(), 3)
        assert info.version == __version__ and 0 < info.rendezvous_port < 65536
        thread.send(address, JoinNode(PROTOCOL_VERSION, __version__, "", 0))  # a second one is not allowed
        kind, reason = events.next()
        assert kind == "lost" and "unexpected JoinNode" in reason
        assert events.next()[0] == "ready"  # by another connection


@pytest.mark.full
def test_a_key_that_is_not_allowed(agent: tuple[str, Path]) -> None:
    address, head = agent
    public, secret = (key.decode() for key in zmq.curve_keypair())
    with connected(address, HeadKeys(public, secret), load_node_key(head)) as (_, events):
        kind, reason = events.next()
        assert kind == "lost" and reason.startswith(f"the node {address} does not answer: it does not allow this key")


@pytest.mark.full
def test_another_key_of_the_node(agent: tuple[str, Path], tmp_path: Path) -> None:
    address, head = agent
    _, other = make_keys(tmp_path / "other")
    with connected(address, load_head_keys(head / HEAD_SECRET), load_node_key(other)) as (_, events):
        assert "the keys do not fit" in events.next()[1]


@pytest.mark.full
def test_a_closed_port(tmp_path: Path) -> None:
    port = ReservedPort("127.0.0.1")
    _, head = make_keys(tmp_path / "keys")
    with connected(f"tcp://127.0.0.1:{port.number}", load_head_keys(head / HEAD_SECRET), load_node_key(head)) as (
        _,
        events,
    ):
        assert "no connection: is `quire node` running there" in events.next()[1]
    port.close()


def test_an_address_that_cannot_be_used_leaves_the_other_links(agent: tuple[str, Path]) -> None:
    address, head = agent
    keys, node_key = load_head_keys(head / HEAD_SECRET), load_node_key(head)
    with connected("tcp://-a:7100", keys, node_key) as (thread, events):
        assert events.next() == (
            "lost",
            "the node tcp://-a:7100 cannot be connected: cannot use the address tcp://-a:7100: Invalid argument",
        )
        thread.add(address, node_key)
        while events.next()[0] != "ready":
            pass


def test_the_end_of_an_agent_is_noticed(tmp_path: Path) -> None:
    with agent_in_thread(tmp_path) as (address, head):
        keys, node_key = load_head_keys(head / HEAD_SECRET), load_node_key(head)
        thread = NodeThread(keys, events := Events())
        thread.add(address, node_key)
        assert events.next()[0] == "ready"
    kind, reason = events.next()
    assert kind == "lost" and reason == f"the node {address} refuses: the node {socket.gethostname()} stops"
    thread.close()


def test_a_call_after_the_end_has_no_effect(agent: tuple[str, Path], tmp_path: Path) -> None:
    """The lookup of a name may end later than the links."""
    address, head = agent
    keys, node_key = load_head_keys(head / HEAD_SECRET), load_node_key(head)
    thread = NodeThread(keys, Events())
    thread.close()
    with contextlib.ExitStack() as files:  # one of them gets the number of the thread's descriptor
        opened = [files.enter_context((tmp_path / f"file-{n}").open("wb")) for n in range(50)]
        thread.add(address, node_key)
        thread.remove(address)
        thread.close()
        assert opened and not any(file.stat().st_size for file in tmp_path.glob("file-*"))


def test_an_order_that_cannot_be_carried_out_ends_its_worker_only(agent: tuple[str, Path]) -> None:
    address, head = agent
    with connected(address, load_head_keys(head / HEAD_SECRET), load_node_key(head)) as (thread, events):
        assert events.next()[0] == "ready"
        thread.send(address, StartWorker(1, 0, True, log_level="\0"))
        kind, ended = events.next()
        assert kind == "received" and ended.worker == 1 and "embedded null byte" in ended.how


def test_damaged_messages_are_refused_and_others_accepted(agent: tuple[str, Path]) -> None:
    address, head = agent
    keys, node_key = load_head_keys(head / HEAD_SECRET), load_node_key(head)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    numbers = Link(NodeToHead)
    (good,) = numbers.outgoing(JoinNode(PROTOCOL_VERSION, __version__, "head", 1))
    damaged = [b"", b"x" * 4, b"x" * 100, bytes(good)[:-1], bytes(good)[:-1] + b"?", bytes(1 << 15)]
    for frame in damaged:
        with context.socket(zmq.DEALER) as peer:
            CurveEnd(keys.public, keys.secret, node_key).connect_with(peer)
            peer.linger = 0
            peer.connect(address)
            peer.send(frame)
            assert peer.poll(WAIT_S * 1000)
            refused = Link(NodeToHead).incoming(peer.recv_multipart()).message
            assert isinstance(refused, Refused) and "damaged or lost message" in refused.reason
    context.term()
    with connected(address, keys, node_key) as (_, events):
        assert events.next()[0] == "ready"


def test_a_long_message_without_a_key_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit, "HANDSHAKE_MS", 600_000)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    size = (1 << 20).to_bytes(8, "big")
    with agent_in_thread(tmp_path) as (address, _):
        host, port = parse_address(address, "")
        with socket.create_connection((host, port), WAIT_S) as peer, contextlib.suppress(ConnectionResetError):
            peer.sendall(greeting + b"\x06" + size)
            while peer.recv(100):
                pass
