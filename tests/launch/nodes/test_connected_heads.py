"""The agent's decisions, with processes, heads and a clock of the test."""

import random
from typing import Any

import msgspec
import pytest

from quire.launch.nodes.connected_heads import DEVICE_S, HEARTBEAT_S, KILL_S, SILENT_S, ConnectedHeads
from quire.launch.supervision.members import WatchedProcess
from quire.protocol.process.child import Command, Report
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Heartbeat, Refused
from quire.protocol.wire.node_messages import (
    JoinNode,
    KillWorker,
    LeaveNode,
    NodeInfo,
    OrderWorker,
    StartWorker,
    WorkerEnded,
    WorkerReport,
)

INFO = NodeInfo(PROTOCOL_VERSION, "1.0", "node-a", 2, 0)
JOIN = JoinNode(PROTOCOL_VERSION, "1.0", "head", 7)
PORT = 4321
HEAD, OTHER = b"head", b"other"


class FakeProcess(WatchedProcess):
    """A worker process; the test ends it."""

    pid = 1

    def __init__(self) -> None:
        self.watched: list[int] = []
        self.commands: list[Command] = []
        self.is_killed = False

    def send(self, command: Command) -> None:
        self.commands.append(command)


class FakeAgent:
    """Heads, and a Runner that records."""

    def __init__(self) -> None:
        self.heads = ConnectedHeads(INFO, self)
        self.sent: list[tuple[bytes, Any]] = []
        self.started: list[FakeProcess] = []
        self.open_heads: set[bytes] = set()
        self.cannot_start = False

    def send(self, head: bytes, message: Any) -> None:
        self.sent.append((head, message))

    def open(self, head: bytes) -> int:
        assert head not in self.open_heads
        self.open_heads.add(head)
        return PORT

    def start(self, head: bytes, order: StartWorker) -> WatchedProcess:
        assert head in self.open_heads
        if self.cannot_start:
            raise OSError(12, "Cannot allocate memory")
        self.started.append(FakeProcess())
        return self.started[-1]

    def kill(self, process: WatchedProcess) -> None:
        assert isinstance(process, FakeProcess) and not process.is_killed
        process.is_killed = True

    def forget(self, head: bytes) -> None:
        self.open_heads.discard(head)

    def take(self, head: bytes = HEAD) -> list[Any]:
        """Return the messages to a head since the last call."""
        found = [message for to, message in self.sent if to == head]
        self.sent = [each for each in self.sent if each[0] != head]
        return found


@pytest.fixture
def agent() -> FakeAgent:
    """An agent with one head."""
    agent = FakeAgent()
    agent.heads.received(HEAD, JOIN, 0.0)
    assert agent.take() == [msgspec.structs.replace(INFO, rendezvous_port=PORT)]
    return agent


def test_orders_reach_the_worker_and_its_reports_the_head(agent: FakeAgent) -> None:
    agent.heads.received(HEAD, StartWorker(1, 0, True), 0.0)
    (process,) = agent.started
    for command in (Command("join", worker_epoch=3), Command("stop")):
        agent.heads.received(HEAD, OrderWorker(1, command), 0.0)
    assert [command.kind for command in process.commands] == ["join", "stop"]
    agent.heads.reported(process, Report("started"), 0.0)
    agent.heads.ended(process, "the worker process was killed by SIGKILL", 0.0)
    end = WorkerEnded(1, "the worker process was killed by SIGKILL")
    assert agent.take() == [WorkerReport(1, Report("started")), end]
    assert not list(agent.heads.processes())


@pytest.mark.parametrize("device", [-5, 2, 10**9])
def test_a_device_that_the_node_does_not_have_is_refused(agent: FakeAgent, device: int) -> None:
    agent.heads.received(HEAD, StartWorker(1, device, True), 0.0)
    assert agent.take() == [WorkerEnded(1, f"the node node-a has no device {device}: its --devices is 2")]
    assert not agent.started


@pytest.mark.parametrize("field", ["protocol_version", "version"])
def test_another_version_is_refused_with_both_named(field: str) -> None:
    agent = FakeAgent()
    other = msgspec.structs.replace(JOIN, **{field: 99 if field == "protocol_version" else "0.9"})
    agent.heads.received(HEAD, other, 0.0)
    (refused,) = agent.take()
    assert isinstance(refused, Refused) and refused.final and not agent.open_heads
    assert f"runs Quire 1.0 (protocol {PROTOCOL_VERSION})" in refused.reason
    assert f"{other.version} (protocol {other.protocol_version})" in refused.reason


@pytest.mark.parametrize(
    "message",
    [
        ProtocolError("crc", "checksum does not match"),
        JOIN,
        OrderWorker(1, Command("drain")),
        OrderWorker(1, Command("engines")),
        NodeInfo(1, "", "", 1, 1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_damaged_or_foreign_message_ends_the_link_and_its_workers(agent: FakeAgent, message: Any) -> None:
    agent.heads.received(HEAD, StartWorker(1, 0, False), 0.0)
    agent.heads.received(HEAD, message, 0.0)
    assert isinstance(agent.take()[-1], Refused)
    assert agent.started[0].is_killed and not agent.open_heads


def test_a_message_before_the_first_one_is_refused() -> None:
    agent = FakeAgent()
    agent.heads.received(HEAD, StartWorker(1, 0, False), 0.0)
    assert isinstance(agent.take()[0], Refused) and not agent.started


def test_a_silent_head_loses_its_workers_and_no_other_does(agent: FakeAgent) -> None:
    agent.heads.received(OTHER, JOIN, 0.0)
    agent.heads.received(HEAD, StartWorker(1, 0, False), 0.0)
    agent.heads.received(OTHER, StartWorker(1, 1, False), 0.0)
    agent.heads.received(OTHER, Heartbeat(0.0), SILENT_S)
    agent.heads.tick(SILENT_S + 0.1)
    assert [process.is_killed for process in agent.started] == [True, False] and agent.open_heads == {OTHER}


def test_a_heartbeat_is_sent_when_nothing_else_is(agent: FakeAgent) -> None:
    agent.heads.tick(HEARTBEAT_S / 2)
    assert not agent.take()
    agent.heads.tick(HEARTBEAT_S)
    assert agent.take() == [Heartbeat(HEARTBEAT_S)]


def test_a_worker_starts_when_the_memory_of_killed_ones_is_free(agent: FakeAgent) -> None:
    agent.heads.received(HEAD, StartWorker(1, 0, False), 0.0)
    agent.heads.received(HEAD, KillWorker(1), 0.0)
    agent.heads.received(HEAD, StartWorker(2, 0, False), 0.0)
    agent.heads.received(HEAD, OrderWorker(2, Command("join", rank=1)), 0.0)
    assert len(agent.started) == 1
    agent.heads.ended(agent.started[0], "killed", 1.0)
    assert agent.started[1].commands == [Command("join", rank=1)]
    assert not [message for message in agent.take() if isinstance(message, WorkerEnded)]  # its head has killed it


def test_a_worker_waits_for_the_device_of_a_head_that_died(agent: FakeAgent) -> None:
    agent.heads.received(HEAD, StartWorker(1, 0, False), 0.0)
    agent.heads.received(OTHER, JOIN, 1.0)
    agent.heads.received(OTHER, StartWorker(1, 0, False), 1.0)
    agent.heads.received(OTHER, StartWorker(2, 1, False), 1.0)
    assert len(agent.started) == 2  # one of each head
    agent.heads.tick(SILENT_S + 0.1)
    assert agent.started[0].is_killed and len(agent.started) == 2
    agent.heads.ended(agent.started[0], "killed", SILENT_S + 0.2)
    assert len(agent.started) == 3


def test_a_device_that_another_head_keeps_is_one_line(agent: FakeAgent) -> None:
    agent.heads.received(HEAD, StartWorker(1, 0, False), 0.0)
    agent.heads.received(OTHER, JOIN, 0.0)
    agent.heads.received(OTHER, StartWorker(1, 0, False), 0.0)
    for now in (2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, DEVICE_S + 0.1):
        assert not [message for message in agent.take(OTHER) if isinstance(message, WorkerEnded)]
        for head in (HEAD, OTHER):
            agent.heads.received(head, Heartbeat(now), now)
        agent.heads.tick(now)
    ends = [message for message in agent.take(OTHER) if isinstance(message, WorkerEnded)]
    assert ends == [WorkerEnded(1, "device 0 of the node node-a is used by head process 7")]


def test_a_process_that_does_not_end_delays_others_for_a_limited_time(agent: FakeAgent) -> None:
    agent.heads.received(HEAD, StartWorker(1, 0, False), 0.0)
    agent.heads.received(HEAD, KillWorker(1), 0.0)
    agent.heads.received(HEAD, StartWorker(2, 0, False), 0.0)
    for now in (1.0, 2.0, KILL_S + 0.1):
        agent.heads.received(HEAD, Heartbeat(now), now)
        agent.heads.tick(now)
    assert len(agent.started) == 2 and len(list(agent.heads.processes())) == 2


def test_more_workers_than_devices_are_refused(agent: FakeAgent) -> None:
    for number in (1, 2, 3):
        agent.heads.received(HEAD, StartWorker(number, number % 2, False), 0.0)
    assert agent.take() == [WorkerEnded(3, "the node node-a runs at most 2 workers of an engine")]


def test_a_worker_that_cannot_start_has_ended(agent: FakeAgent) -> None:
    agent.cannot_start = True
    agent.heads.received(HEAD, StartWorker(1, 0, False), 0.0)
    assert agent.take() == [WorkerEnded(1, "a worker cannot be started: Cannot allocate memory")]


def test_the_end_of_the_agent_refuses_all_heads(agent: FakeAgent) -> None:
    agent.heads.received(HEAD, StartWorker(1, 0, False), 0.0)
    agent.heads.close(0.0)
    assert agent.take()[-1] == Refused("the node node-a stops") and agent.started[0].is_killed


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_events_keeps_the_invariants(seed: int) -> None:
    rng = random.Random(seed)
    agent, now = FakeAgent(), 0.0
    for _ in range(200):
        now += rng.choice((0.0, 0.01, 1.0))
        head = rng.choice((HEAD, OTHER))
        match rng.randrange(7):
            case 0:
                agent.heads.received(head, JOIN, now)
            case 1:
                agent.heads.received(head, StartWorker(rng.randrange(9), rng.randrange(2), False), now)
            case 2:
                agent.heads.received(head, KillWorker(rng.randrange(9)), now)
            case 3:
                agent.heads.received(head, OrderWorker(rng.randrange(9), Command("join")), now)
            case 4 if rng.random() < 0.2:
                agent.heads.received(head, LeaveNode(), now)
            case 5 if agent.started:
                process = rng.choice(agent.started)
                agent.started.remove(process)
                agent.heads.ended(process, "ended", now)
            case _:
                agent.heads.received(head, Heartbeat(now), now) if head in agent.open_heads else None
        agent.heads.tick(now)
        agent.heads.check()
    agent.heads.close(now)
    assert all(process.is_killed for process in agent.started) and not agent.open_heads
