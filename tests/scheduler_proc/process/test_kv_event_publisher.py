"""KV cache events over real sockets: a subscriber that misses messages still ends with the keys of the pool's map."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from curve_files import make_keys
from kv_event_ends import Engine, Subscriber, keys_of
from waits import wait_for

from quire.protocol.errors import ConfigError
from quire.protocol.wire.kv_events import END, GONE, MORE
from quire.scheduler_proc.process.kv_event_feeds import KVEventFeeds
from quire.scheduler_proc.process.kv_event_publisher import KVEventPublisher


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def engine(context: "zmq.Context[Any]", tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(context, tmp_path)
    yield engine
    engine.publisher.close()


@pytest.fixture
def subscriber(context: "zmq.Context[Any]", engine: Engine) -> Iterator[Subscriber]:
    subscriber = Subscriber(context, engine)
    yield subscriber
    subscriber.close()


@pytest.mark.full
def test_a_subscriber_that_loses_messages_ends_with_the_pools_keys(engine: Engine, subscriber: Subscriber) -> None:
    """It subscribes late, and then every third message is lost."""
    wait_for(lambda: subscriber.sub.poll(20) or engine.step())  # type: ignore[func-returns-value]
    filled = 0
    for _ in range(20):
        engine.run(15)
        filled += subscriber.read(loses=lambda sequence: sequence % 3 == 0, timeout_ms=20)
    engine.step()
    subscriber.read(timeout_ms=200)
    subscriber.ask()
    assert filled >= 15 and subscriber.num_gone == 0
    assert subscriber.next == engine.publisher.next_sequence > 300
    assert subscriber.mirror.keys == keys_of(engine.pool) and subscriber.mirror.keys


def test_a_late_subscriber_receives_everything_in_parts(engine: Engine, subscriber: Subscriber) -> None:
    engine.run(80)
    kinds = []
    while not kinds or kinds[-1] != END:
        kinds.append(subscriber.ask_once())
    assert kinds == [MORE, MORE, END]
    assert subscriber.mirror.keys == keys_of(engine.pool) and subscriber.mirror.keys


def test_a_step_without_events_sends_nothing(engine: Engine) -> None:
    engine.feeds.publish(0.0)
    engine.feeds.publish(1.0)
    assert engine.publisher.next_sequence == 1  # the one with AllBlocksCleared


def test_large_batches_are_sent_in_small_answers(engine: Engine, subscriber: Subscriber) -> None:
    assert engine.pool.events is not None
    for step in range(4):
        engine.pool.events.stored([i.to_bytes(32, "big") for i in range(step * 9000, step * 9000 + 9000)], "device")
        engine.feeds.publish(0.0)
    kinds = [subscriber.ask_once() for _ in range(4)]
    assert kinds == [MORE, MORE, MORE, END] and len(subscriber.mirror.keys) == 36_000


def test_dropped_batches_are_reported_as_gone(context: "zmq.Context[Any]", tmp_path: Path) -> None:
    engine = Engine(context, tmp_path, kept_batches=10)
    subscriber = Subscriber(context, engine)
    engine.run(30)
    subscriber.ask()
    assert subscriber.num_gone == 1 and subscriber.next == engine.publisher.next_sequence
    assert subscriber.mirror.keys <= keys_of(engine.pool)  # never reports content that is not cached
    subscriber.next -= 9
    subscriber.ask()
    assert subscriber.num_gone == 1
    subscriber.close()
    engine.publisher.close()


def test_kept_batches_are_bounded_in_bytes_but_never_empty(context: "zmq.Context[Any]", tmp_path: Path) -> None:
    for kept_bytes, most in ((2000, 60), (1, 1)):
        engine = Engine(context, tmp_path, kept_bytes=kept_bytes)
        subscriber = Subscriber(context, engine)
        engine.run(100)
        subscriber.dealer.send(bytes(8))
        engine.answer()
        kind, oldest, incarnation = subscriber.receive()
        kept = engine.publisher.next_sequence - int.from_bytes(oldest, "big")
        assert kind == GONE and 1 <= kept <= most and incarnation == (1).to_bytes(8, "big")
        subscriber.close()
        engine.publisher.close()


def test_malformed_requests_are_ignored(engine: Engine, subscriber: Subscriber) -> None:
    engine.run(3)
    wrong = [[b""], [b"1234567"], [b"123456789"], [b"", bytes(8)], [bytes(8), bytes(8)], [b"\x80\x04." + bytes(40)]]
    for frames in wrong:
        subscriber.dealer.send_multipart(frames)
        engine.answer()
    assert subscriber.dealer.poll(50) == 0
    subscriber.ask()
    assert subscriber.mirror.keys == keys_of(engine.pool)


def test_a_request_beyond_the_newest_batch_returns_the_end(engine: Engine, subscriber: Subscriber) -> None:
    engine.run(3)
    subscriber.dealer.send(b"\xff" * 8)
    engine.answer()
    kind, sequence, _ = subscriber.receive()
    assert kind == END and int.from_bytes(sequence, "big") == engine.publisher.next_sequence


def test_a_restarted_engine_is_detected(context: "zmq.Context[Any]", tmp_path: Path) -> None:
    """Also when the sequence number of the new engine is higher."""
    for steps in (2, 90):
        first = Engine(context, tmp_path, incarnation=1)
        subscriber = Subscriber(context, first)
        first.run(20)
        subscriber.ask()
        first.publisher.close()
        subscriber.close()
        second = Engine(context, tmp_path, incarnation=2)
        second.run(steps)
        again = Subscriber(context, second)
        again.mirror, again.next, again.incarnation = subscriber.mirror, subscriber.next, subscriber.incarnation
        again.ask()
        assert again.incarnation == 2 and again.mirror.keys == keys_of(second.pool)
        again.close()
        second.publisher.close()


def test_subscribers_that_do_not_read_do_not_block_the_engine(
    context: "zmq.Context[Any]", engine: Engine, subscriber: Subscriber
) -> None:
    lazy = Subscriber(context, engine)
    wait_for(lambda: lazy.sub.poll(20) or engine.step())  # type: ignore[func-returns-value]
    engine.run(100)
    for _ in range(200):
        lazy.dealer.send(bytes(8))
        engine.answer()  # 32 batches each, far more than a socket buffers
    engine.run(3000)
    lazy.close()
    engine.step()
    subscriber.ask()
    assert subscriber.mirror.keys == keys_of(engine.pool)


def test_endpoints_are_checked_and_bound(context: "zmq.Context[Any]", engine: Engine, tmp_path: Path) -> None:
    keys = str(make_keys(tmp_path / "keys"))
    with pytest.raises(ConfigError, match="must be ipc"):
        KVEventPublisher(context, "tcp://*:5557", "", 1, curve_dir=keys)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        taken = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        for endpoint, replay in ((taken, ""), (f"ipc://{tmp_path}/other", taken)):
            with pytest.raises(ConfigError, match=f"cannot publish KV events at {taken}: Address already in use"):
                KVEventPublisher(context, endpoint, replay, 1, curve_dir=keys)


def test_answer_does_nothing_without_a_replay_endpoint(context: "zmq.Context[Any]", tmp_path: Path) -> None:
    publisher = KVEventPublisher(context, f"ipc://{tmp_path}/events", "", 1)
    publisher.answer()
    KVEventFeeds([publisher], 1).publish(0.0)
    assert publisher.replay_socket is None and publisher.next_sequence == 0
    publisher.close()
