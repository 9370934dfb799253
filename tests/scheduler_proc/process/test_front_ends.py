"""Who is connected, and as which client: over a hub that is two lists."""

from collections import deque
from typing import Any

import pytest
from scheduler_driver import make_config

from quire.protocol.wire.channel import Frames
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import Abort, EngineState, Rejected
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Heartbeat, Hello, Refused, Welcome
from quire.protocol.wire.worker_messages import Shutdown
from quire.protocol.wire.zmq_channel import PeerMessage
from quire.scheduler_proc.process.front_ends import FrontEnds

CONFIG = make_config(max_model_len=16)
WELCOME = Welcome(PROTOCOL_VERSION, CONFIG.digest, 16)
DAMAGED = ProtocolError("crc", "damaged")


class Lists:
    """Implements ``transport.Hub``.

    Attributes:
        sent: (peer, message) of everything that was taken.
        deaf: peers that take nothing.
    """

    def __init__(self) -> None:
        self.inbox: deque[PeerMessage] = deque()
        self.sent: list[tuple[bytes, Any]] = []
        self.deaf: set[bytes] = set()
        self.forgotten: list[bytes] = []

    def send(self, peer: bytes, message: Any) -> Frames | None:
        if peer in self.deaf:
            return None
        self.sent.append((peer, message))
        return []

    def receive(self) -> PeerMessage | None:
        return self.inbox.popleft() if self.inbox else None

    def forget(self, peer: bytes) -> None:
        self.forgotten.append(peer)


class House:
    """FrontEnds, and all that they were heard and told."""

    def __init__(self) -> None:
        self.hub = Lists()
        self.gone: list[int] = []
        self.front_ends = FrontEnds(self.hub, CONFIG, self.gone.append)

    def hear(self, peer: bytes, *messages: Any) -> list[tuple[int, Any]]:
        """(client, message) of what of it is for the engine."""
        self.hub.inbox.extend(PeerMessage(peer, message, []) for message in messages)
        heard = []
        while (come := self.front_ends.receive()) is not None:
            heard.append((come[0], come[1].message))
        return heard

    def told(self, peer: bytes) -> list[Any]:
        """Since the last call."""
        told = [message for to, message in self.hub.sent if to == peer]
        self.hub.sent = [(to, message) for to, message in self.hub.sent if to != peer]
        return told


def hello(pid: int = 7, index: int = 0, *, version: int = PROTOCOL_VERSION) -> Hello:
    return Hello(version, "frontend", index, pid)


@pytest.fixture
def house() -> House:
    return House()


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (None, ["loading"]),
        ("loading", ["loading"]),
        ("ready", ["ready"]),
        ("recovering", ["ready", "recovering"]),  # requests are taken, and wait
    ],
)
def test_a_new_front_end_receives_the_engine_state(house: House, state: str | None, told: list[str]) -> None:
    if state is not None:
        house.front_ends.announce(EngineState(state))
    assert house.hear(b"a", hello()) == []
    assert house.told(b"a") == [WELCOME, *map(EngineState, told)]


def test_client_numbers_are_never_reused(house: House) -> None:
    assert house.hear(b"a", hello(), Abort(["x"])) == [(0, Abort(["x"]))]
    assert house.hear(b"b", hello(8), Abort(["x"])) == [(1, Abort(["x"]))]
    house.front_ends.on_process_exit(7)
    assert house.gone == [0] and house.hub.forgotten == [b"a"]
    assert house.hear(b"a", hello(), Abort(["y"])) == [(2, Abort(["y"]))]


def test_process_exit_disconnects_all_its_clients(house: House) -> None:
    for index, (peer, pid) in enumerate(((b"a", 7), (b"b", 8), (b"c", 7))):
        house.hear(peer, hello(pid, index))
    house.front_ends.on_process_exit(7)
    house.front_ends.on_process_exit(7)
    assert house.gone == [0, 2]


def test_heartbeats_are_answered_and_not_passed_on(house: House) -> None:
    house.hear(b"a", hello())
    house.told(b"a")
    assert house.hear(b"a", Heartbeat(1.5)) == []
    assert house.told(b"a") == [Heartbeat(1.5)]


@pytest.mark.parametrize(
    "first",
    [hello(version=PROTOCOL_VERSION + 1), hello(version=0), Abort(["x"]), Heartbeat(0.0), DAMAGED],
    ids=["a later version", "an earlier one", "a request", "a heartbeat", "damaged"],
)
def test_an_invalid_first_message_is_refused(house: House, first: Any) -> None:
    assert house.hear(b"a", first) == []
    (refused,) = house.told(b"a")
    assert isinstance(refused, Refused) and house.hub.forgotten == [b"a"] and house.gone == []
    assert house.hear(b"a", hello(), Abort(["x"])) == [(0, Abort(["x"]))]


def test_the_refusal_names_both_versions(house: House) -> None:
    house.hear(b"a", hello(version=41))
    (refused,) = house.told(b"a")
    assert "41" in refused.reason and str(PROTOCOL_VERSION) in refused.reason


def test_a_corrupt_message_disconnects_only_its_front_end(house: House) -> None:
    house.hear(b"a", hello(7))
    house.hear(b"b", hello(8))
    assert house.hear(b"a", DAMAGED) == [] and house.gone == [0]
    assert isinstance(house.told(b"a")[-1], Refused)
    assert house.hear(b"b", Abort(["x"])) == [(1, Abort(["x"]))]


def test_a_front_end_that_does_not_read_is_disconnected_once(house: House) -> None:
    house.hear(b"a", hello(7))
    house.hear(b"b", hello(8))
    house.told(b"b")
    house.hub.deaf.add(b"a")
    refusal = Rejected("x", "code", "", "why")
    house.front_ends.send(0, refusal)
    house.front_ends.send(0, refusal)
    assert house.gone == [0] and house.hub.forgotten == [b"a"]
    house.front_ends.announce(EngineState("ready"))
    assert house.gone == [0] and house.told(b"b") == [EngineState("ready")]


def test_an_announcement_continues_after_failed_sends(house: House) -> None:
    for pid, peer in enumerate((b"a", b"b", b"c")):
        house.hear(peer, hello(pid))
        house.told(peer)
    house.hub.deaf |= {b"a", b"c"}
    house.front_ends.announce(EngineState("recovering"))
    assert house.gone == [0, 2] and house.told(b"b") == [EngineState("recovering")]


def test_other_messages_are_passed_to_the_engine(house: House) -> None:
    house.hear(b"a", hello())
    assert house.hear(b"a", hello(), Shutdown()) == [(0, hello()), (0, Shutdown())]


def test_a_reconnecting_front_end_replaces_its_old_client(house: House) -> None:
    """Its first connection was lost on its side, and nobody has said so."""
    house.hear(b"a", hello(1))
    house.hear(b"b", hello(1))
    assert house.gone == [0] and house.hub.forgotten == [b"a"]
    assert house.hear(b"b", Abort(["1"])) == [(1, Abort(["1"]))]
