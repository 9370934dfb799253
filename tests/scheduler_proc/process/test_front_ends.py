"""FrontEnds over a hub of two lists: connected front ends and their client numbers."""

from collections import deque
from typing import Any

import pytest
from scheduler_driver import make_config

from quire.protocol.wire.channel import Frames
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import Abort, EngineState, Rejected, TenantService
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Heartbeat, Hello, Refused, Welcome
from quire.protocol.wire.worker_messages import Shutdown
from quire.protocol.wire.zmq_channel import PeerMessage
from quire.scheduler_proc.process.front_ends import FrontEnds

CONFIG = make_config(max_model_len=16)
WELCOME = Welcome(PROTOCOL_VERSION, CONFIG.digest, 16)
DAMAGED = ProtocolError("crc", "damaged")


class Lists:
    """Implements ``clients.Hub``.

    Attributes:
        sent: (peer, message) of each successful send.
        not_reading: peers to which sends fail.
    """

    def __init__(self) -> None:
        self.inbox: deque[PeerMessage] = deque()
        self.sent: list[tuple[bytes, Any]] = []
        self.not_reading: set[bytes] = set()
        self.forgotten: list[bytes] = []

    def send(self, peer: bytes, message: Any) -> Frames | None:
        if peer in self.not_reading:
            return None
        self.sent.append((peer, message))
        return []

    def receive(self) -> PeerMessage | None:
        return self.inbox.popleft() if self.inbox else None

    def forget(self, peer: bytes) -> None:
        self.forgotten.append(peer)


class Case:
    """FrontEnds with a hub of lists, and the disconnected clients."""

    def __init__(self) -> None:
        self.hub = Lists()
        self.disconnected: list[int] = []
        self.front_ends = FrontEnds(self.hub, CONFIG, self.disconnected.append)

    def deliver(self, peer: bytes, *messages: Any) -> list[tuple[int, Any]]:
        """Deliver messages from a peer. Returns (client, message) of those passed on to the engine."""
        self.hub.inbox.extend(PeerMessage(peer, message, []) for message in messages)
        passed_on = []
        while (received := self.front_ends.receive()) is not None:
            passed_on.append((received[0], received[1].message))
        return passed_on

    def sent_to(self, peer: bytes) -> list[Any]:
        """Return the messages sent to a peer since the last call."""
        found = [message for to, message in self.hub.sent if to == peer]
        self.hub.sent = [(to, message) for to, message in self.hub.sent if to != peer]
        return found


def hello(pid: int = 7, index: int = 0, *, version: int = PROTOCOL_VERSION, role: str = "frontend") -> Hello:
    return Hello(version, role, index, pid)


@pytest.fixture
def case() -> Case:
    return Case()


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (None, ["loading"]),
        ("loading", ["loading"]),
        ("ready", ["ready"]),
        ("recovering", ["ready", "recovering"]),  # requests are accepted, and wait
    ],
)
def test_a_new_front_end_receives_the_engine_state(case: Case, state: str | None, expected: list[str]) -> None:
    if state is not None:
        case.front_ends.announce(EngineState(state))
    assert case.deliver(b"a", hello()) == []
    assert case.sent_to(b"a") == [WELCOME, *map(EngineState, expected)]


def test_client_numbers_are_never_reused(case: Case) -> None:
    assert case.deliver(b"a", hello(), Abort(["x"])) == [(0, Abort(["x"]))]
    assert case.deliver(b"b", hello(8), Abort(["x"])) == [(1, Abort(["x"]))]
    case.front_ends.on_process_exit(7)
    assert case.disconnected == [0] and case.hub.forgotten == [b"a"]
    assert case.deliver(b"a", hello(), Abort(["y"])) == [(2, Abort(["y"]))]


def test_process_exit_disconnects_all_its_clients(case: Case) -> None:
    for index, (peer, pid) in enumerate(((b"a", 7), (b"b", 8), (b"c", 7))):
        case.deliver(peer, hello(pid, index))
    case.front_ends.on_process_exit(7)
    case.front_ends.on_process_exit(7)
    assert case.disconnected == [0, 2]


def test_heartbeats_are_answered_and_not_passed_on(case: Case) -> None:
    case.deliver(b"a", hello())
    case.sent_to(b"a")
    assert case.deliver(b"a", Heartbeat(1.5)) == []
    assert case.sent_to(b"a") == [Heartbeat(1.5)]


@pytest.mark.parametrize(
    "first",
    [hello(version=PROTOCOL_VERSION + 1), hello(version=0), Abort(["x"]), Heartbeat(0.0), DAMAGED],
    ids=["newer version", "older version", "request", "heartbeat", "corrupt"],
)
def test_an_invalid_first_message_is_refused(case: Case, first: Any) -> None:
    assert case.deliver(b"a", first) == []
    (refused,) = case.sent_to(b"a")
    assert isinstance(refused, Refused) and case.hub.forgotten == [b"a"] and case.disconnected == []
    assert case.deliver(b"a", hello(), Abort(["x"])) == [(0, Abort(["x"]))]


def test_the_refusal_names_both_versions(case: Case) -> None:
    case.deliver(b"a", hello(version=41))
    (refused,) = case.sent_to(b"a")
    assert "41" in refused.reason and str(PROTOCOL_VERSION) in refused.reason


def test_a_corrupt_message_disconnects_only_its_front_end(case: Case) -> None:
    case.deliver(b"a", hello(7))
    case.deliver(b"b", hello(8))
    assert case.deliver(b"a", DAMAGED) == [] and case.disconnected == [0]
    assert isinstance(case.sent_to(b"a")[-1], Refused)
    assert case.deliver(b"b", Abort(["x"])) == [(1, Abort(["x"]))]


def test_a_front_end_that_does_not_read_is_disconnected_once(case: Case) -> None:
    case.deliver(b"a", hello(7))
    case.deliver(b"b", hello(8))
    case.sent_to(b"b")
    case.hub.not_reading.add(b"a")
    refusal = Rejected("x", "code", "", "why")
    case.front_ends.send(0, refusal)
    case.front_ends.send(0, refusal)
    assert case.disconnected == [0] and case.hub.forgotten == [b"a"]
    case.front_ends.announce(EngineState("ready"))
    assert case.disconnected == [0] and case.sent_to(b"b") == [EngineState("ready")]


def test_an_announcement_continues_after_failed_sends(case: Case) -> None:
    for pid, peer in enumerate((b"a", b"b", b"c")):
        case.deliver(peer, hello(pid))
        case.sent_to(peer)
    case.hub.not_reading |= {b"a", b"c"}
    case.front_ends.announce(EngineState("recovering"))
    assert case.disconnected == [0, 2] and case.sent_to(b"b") == [EngineState("recovering")]


def test_other_messages_are_passed_to_the_engine(case: Case) -> None:
    case.deliver(b"a", hello())
    assert case.deliver(b"a", hello(), Shutdown()) == [(0, hello()), (0, Shutdown())]


def test_a_reconnecting_front_end_replaces_its_old_client(case: Case) -> None:
    """Its first connection was lost unnoticed."""
    case.deliver(b"a", hello(1))
    case.deliver(b"b", hello(1))
    assert case.disconnected == [0] and case.hub.forgotten == [b"a"]
    assert case.deliver(b"b", Abort(["1"])) == [(1, Abort(["1"]))]


def test_only_the_router_may_report_service_of_tenants(case: Case) -> None:
    served = TenantService([(1, 10)])
    case.deliver(b"a", hello(7))
    assert case.deliver(b"r", hello(8, role="router"), served) == [(1, served)]
    assert case.sent_to(b"r") == [WELCOME, EngineState("loading")]
    assert case.deliver(b"a", served) == [] and case.disconnected == [0]
    assert case.sent_to(b"a")[-1] == Refused("only the router may send TenantService")


def test_a_new_router_replaces_the_previous_one_and_no_front_end(case: Case) -> None:
    """The supervisor of an engine does not know when the router of the server ends."""
    case.deliver(b"a", hello(7))
    for number in range(3):
        case.deliver(b"r%d" % number, hello(10 + number, role="router"))
    assert case.disconnected == [1, 2] and case.hub.forgotten == [b"r0", b"r1"]
    assert case.deliver(b"a", hello(9), Abort(["x"])) == [(0, hello(9)), (0, Abort(["x"]))]
