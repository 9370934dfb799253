"""Data received on a socket: invalid messages are refused, counted, and have no effect."""

import contextlib
import random
import socket
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from hostile_frames import Frames, add_request, damaged, directions, frames_of, hostile, miscut, seal
from loop_under_test import LoopUnderTest
from scheduler_driver import expected_tokens, make_config, make_request
from tiers import thinned

from quire.protocol.errors import QuireError
from quire.protocol.wire.channel import Link
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import (
    Abort,
    Control,
    FrontEndToScheduler,
    SchedulerToFrontEnd,
    Statistics,
    StepOutputs,
)
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Hello, Refused, Welcome
from quire.protocol.wire.zmq_channel import ZmqChannel, ZmqHub, frontend_address, worker_address

DIRECTIONS = directions(make_config())
KNOWN_TAG = {
    "front end to scheduler": 11,
    "scheduler to front end": 21,
    "scheduler to worker": 31,
    "worker to scheduler": 42,
}
WAIT_MS = 10_000
HELLO = Hello(PROTOCOL_VERSION, "frontend", 0, 1)


class Receiver:
    """One end of a link that has received two messages and expects a third."""

    def __init__(self, direction: str, worker_epoch: int = 0) -> None:
        union, self.messages = DIRECTIONS[direction]
        self.link = Link(union, worker_epoch)
        for seq in (1, 2):
            self.link.incoming(frames_of(self.messages[0], seq, worker_epoch))

    def refuses(self, frames: Frames) -> str:
        """Check that the frames are refused; return the kind of error that is counted."""
        before = sum(self.link.refused.values())
        with pytest.raises(ProtocolError) as caught:
            self.link.incoming(frames)
        assert sum(self.link.refused.values()) == before + 1 == before + (caught.value.kind in self.link.refused)
        return caught.value.kind

    def accepts_next(self, worker_epoch: int = 0) -> None:
        """Check that the third message is accepted next."""
        assert type(self.link.incoming(frames_of(self.messages[-1], 3, worker_epoch)).message) is type(
            self.messages[-1]
        )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", thinned(hostile(11), keep=12))
def test_invalid_content_with_valid_checksums(direction: str, name: str) -> None:
    receiver = Receiver(direction)
    assert receiver.refuses(hostile(KNOWN_TAG[direction])[name]) in ("decode", "frames")
    receiver.accepts_next()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_wrong_number_or_size_of_frames(direction: str) -> None:
    receiver = Receiver(direction)
    for message in receiver.messages:
        for name, frames in miscut(frames_of(message, 3)).items():
            assert receiver.refuses(frames) in ("frames", "crc", "decode"), name
    receiver.accepts_next()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_random_damage_with_valid_checksums(direction: str) -> None:
    """The damage may result in another valid message of the receiver's types. No other exception is raised."""
    union, messages = DIRECTIONS[direction]
    rng, kinds = random.Random(2), set()
    for _ in range(1500):
        link = Link(union)
        frames = damaged(frames_of(rng.choice(messages)), rng, sealed=True)
        try:
            kinds.add(type(link.incoming(frames).message))
        except ProtocolError as error:
            kinds.add(error.kind)
    assert {"decode", "epoch", "gap"} <= kinds and kinds - {"decode", "epoch", "gap", "frames"} <= {
        type(x) for x in messages
    }


def test_duplicate_field_is_checked() -> None:
    """The last of two equal fields is decoded, and its value is checked."""

    def twice(first: bytes, second: bytes) -> Frames:
        sampling = b"\x82\xabtemperature" + first + b"\xabtemperature" + second
        return seal(b"\x93\x00\x03\x95\x0a\xa1r\x92\xa3<i4\xc4\x04\x01\x00\x00\x00" + sampling + b"\x07")

    half, nine = b"\xcb\x3f\xe0" + bytes(6), b"\xcb\x40\x22" + bytes(6)
    assert Receiver("front end to scheduler").refuses(twice(half, nine)) == "decode"
    taken = Receiver("front end to scheduler").link.incoming(twice(nine, half)).message
    assert taken.sampling.temperature == 0.5


def test_memory_of_a_refusal_is_bounded_by_the_message() -> None:
    """A length that exceeds the message is detected before anything is allocated for it."""
    for name, frames in {**hostile(11), **miscut(frames_of(add_request(), 3))}.items():
        receiver, size = Receiver("front end to scheduler"), sum(map(len, frames))
        tracemalloc.start()
        receiver.refuses(frames)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 100_000 + 2 * size, f"{name}: {peak} bytes for {size}"


# ---- sockets


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def hub(context: "zmq.Context[Any]", tmp_path: Path) -> Iterator[ZmqHub]:
    hub = ZmqHub(context, frontend_address(tmp_path), FrontEndToScheduler)
    yield hub
    hub.close()


def next_of(hub: ZmqHub) -> Any:
    assert hub.socket.poll(WAIT_MS)
    received = hub.receive()
    assert received is not None
    return received


def connect(context: "zmq.Context[Any]", tmp_path: Path) -> ZmqChannel:
    return ZmqChannel(context, zmq.DEALER, frontend_address(tmp_path), Link(SchedulerToFrontEnd), bind=False)


def test_garbage_of_one_peer_does_not_affect_another(context: "zmq.Context[Any]", hub: ZmqHub, tmp_path: Path) -> None:
    good, evil = connect(context, tmp_path), connect(context, tmp_path)
    good.send(HELLO)
    assert next_of(hub).message == HELLO
    attacks = [
        f for f in {**hostile(11), **miscut(frames_of(add_request()))}.values() if f and sum(map(len, f)) < 2**20
    ]
    for index, frames in enumerate(attacks):
        evil.socket.send_multipart(frames)
        assert isinstance(next_of(hub).message, ProtocolError)
        if index % 10 == 0:
            good.send(Abort([str(index)]))
            assert next_of(hub).message == Abort([str(index)])
    assert sum(hub.refused.values()) == len(attacks) > 80
    for channel in (good, evil):
        channel.close()


@pytest.mark.parametrize("direction", ["worker to scheduler", "scheduler to worker"])
def test_pair_channel_refuses_garbage(context: "zmq.Context[Any]", tmp_path: Path, direction: str) -> None:
    union, messages = DIRECTIONS[direction]
    address = worker_address(tmp_path, 1, 0)
    near = ZmqChannel(context, zmq.PAIR, address, Link(union, 1), bind=True)
    far = context.socket(zmq.PAIR)
    far.setsockopt(zmq.LINGER, 0)
    far.connect(address)
    attacks = [f for f in hostile(KNOWN_TAG[direction]).values() if sum(map(len, f)) < 2**20]
    attacks += [f for f in miscut(frames_of(messages[1], 1, 1)).values() if f]
    for frames in attacks:
        far.send_multipart(frames)
        with pytest.raises(ProtocolError):
            near.receive(WAIT_MS / 1000)
    far.send_multipart(frames_of(messages[1], 1, 1))
    received = near.receive(WAIT_MS / 1000)
    assert received is not None and type(received.message) is type(messages[1])
    far.close()
    near.close()


GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
RAW = {
    "a frame of 2 GiB": GREETING + READY + b"\x02" + (2**31).to_bytes(8, "big"),
    "a frame of 2**63 bytes": GREETING + READY + b"\x02" + (2**63).to_bytes(8, "big"),
    "a frame of all bytes": GREETING + READY + b"\x03" + b"\xff" * 8,
    "a command of 2 GiB": GREETING + b"\x06" + (2**31).to_bytes(8, "big"),
    "another mechanism": GREETING.replace(b"NULL\0", b"PLAIN") + READY,
    "no greeting": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64),
    "pickle for a greeting": b"\x80\x04\x95" + bytes(80),
    "invalid flags": GREETING + READY + b"\xff\x01x",
}


@pytest.mark.parametrize("sent", RAW.values(), ids=RAW)
def test_bytes_that_are_not_zmtp(context: "zmq.Context[Any]", hub: ZmqHub, tmp_path: Path, sent: bytes) -> None:
    """The connection is closed without any effect, and valid peers are still served."""
    with socket.socket(socket.AF_UNIX) as raw, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        raw.settimeout(WAIT_MS / 1000)
        raw.connect(frontend_address(tmp_path).removeprefix("ipc://"))
        raw.sendall(sent)
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(4096):
            pass  # the greeting of the server, then the end of the connection
    good = connect(context, tmp_path)
    good.send(HELLO)
    assert next_of(hub).message == HELLO
    assert not hub.refused
    good.close()


# ---- the scheduler's loop


def test_front_end_that_sends_garbage_is_disconnected(tmp_path: Path) -> None:
    """Disconnected at the first invalid message, because following messages may depend on the damaged one.

    Each attack comes from its own front end; another front end keeps receiving tokens.
    """
    with zmq.Context() as context:
        loop = LoopUnderTest(context, tmp_path, make_config())
        try:
            loop.handshake()
            prompt = [5, 6, 7]
            attacks = {**hostile(11), **miscut(frames_of(add_request(), 2))}
            chosen = [frames for frames in attacks.values() if frames and sum(map(len, frames)) < 2**18][::4]
            assert len(chosen) > 20
            for frames in chosen:
                evil = loop.another_client()
                loop.until(lambda message: isinstance(message, Welcome), evil)
                evil.send(make_request("evil", prompt, max_tokens=100))
                evil.socket.send_multipart(frames)
                loop.until(lambda message: isinstance(message, Refused), evil)
            loop.client.send(make_request("canary", prompt, max_tokens=5))
            tokens: list[int] = []

            def take(message: Any) -> bool:
                if not isinstance(message, StepOutputs):
                    return False
                tokens.extend([] if message.tokens is None else message.tokens.tolist())
                return bool(message.ended)

            loop.until(take)
            assert tokens == expected_tokens(prompt, 5)
            statistics: list[Statistics] = []
            loop.client.send(Control("statistics", 9))
            loop.until(lambda message: isinstance(message, Statistics) and statistics.append(message) is None)
            assert (statistics[0].num_running, statistics[0].num_waiting) == (0, 0), "requests have not ended"
            assert statistics[0].num_free_blocks == statistics[0].num_usable_blocks
            loop.stop()
        except BaseException:
            loop._loop.stop()
            raise
        assert not isinstance(loop.failure, QuireError)
