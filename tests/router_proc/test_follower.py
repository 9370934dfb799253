"""The Follower: after any losses it has exactly what the engine has, and damage never stays in the index."""

from collections import deque
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.protocol.model.kv_layout import KVGroup, KVLayout
from quire.protocol.wire.kv_events import (
    END,
    GONE,
    MORE,
    TOPIC,
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KVEvent,
    KVEventBatch,
)
from quire.router_proc import follower
from quire.router_proc.core.events import CacheChanged, CacheForgotten
from quire.router_proc.follower import ANSWER_TIMEOUT_S, BACKOFF_S, FORGIVEN_S, MAX_FUTILE, Follower, Frames

LAYOUT = KVLayout([KVGroup("sliding_window", 16, [0]), KVGroup("full_attention", 16, [1])], 1, 8, "float32")
GROUP = 1
KEPT = 6
ANSWER_BATCHES = 3


def number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def name(value: int) -> bytes:
    return bytes([value]) * 16


class FakeEngine:
    """Publishes batches and answers requests as docs/kv_events.md says, over queues from which messages can be lost."""

    def __init__(self) -> None:
        self.incarnation = 0
        self.published: deque[Frames] = deque()
        self.answers: deque[Frames] = deque()
        self.requests: deque[int] = deque()
        self.restart()

    def restart(self) -> None:
        self.incarnation += 1
        self.batches: list[bytes] = []
        self.contents: set[bytes] = set()
        self.answers.clear()
        self.publish([AllBlocksCleared()])

    def publish(self, events: list[KVEvent]) -> None:
        for event in events:
            match event:
                case BlocksStored(group=1):
                    self.contents |= set(event.hashes)
                case BlocksRemoved(group=1):
                    self.contents -= set(event.hashes)
                case AllBlocksCleared():
                    self.contents = set()
        payload = msgspec.msgpack.encode(KVEventBatch(0.0, events, self.incarnation))
        self.published.append([TOPIC, number(len(self.batches)), payload])
        self.batches.append(payload)

    def answer(self) -> None:
        if not self.requests:
            return
        start, end = self.requests.popleft(), len(self.batches)
        oldest = max(0, end - KEPT)
        if start < oldest:
            self.answers.append([GONE, number(oldest), number(self.incarnation)])
            start = oldest
        last = min(max(start, 0) + ANSWER_BATCHES, end)
        self.answers.extend([TOPIC, number(n), self.batches[n]] for n in range(start, last))
        self.answers.append([END if last >= end else MORE, number(min(last, end)), number(self.incarnation)])


class Case:
    """A follower of a fake engine, and the contents that it reports."""

    def __init__(self) -> None:
        self.now = 0.0
        self.engine = FakeEngine()
        self.contents: set[bytes] = set()
        self.num_forgotten = 0
        self.follower = Follower(3, LAYOUT, 16, self.consume, self.engine.requests.append)

    def consume(self, event: CacheChanged | CacheForgotten) -> None:
        assert event.engine == 3
        if isinstance(event, CacheForgotten):
            self.contents = set()
            self.num_forgotten += 1
            return
        for change in event.events:
            match change:
                case BlocksStored(group=1):
                    self.contents |= set(change.hashes)
                case BlocksRemoved(group=1):
                    self.contents -= set(change.hashes)
                case AllBlocksCleared():
                    self.contents = set()
                case _:
                    raise AssertionError("an event of a group that does not count")

    def act(self, action: str, value: int) -> None:
        engine = self.engine
        match action:
            case "store":
                engine.publish([BlocksStored([name(value)], 16, GROUP), BlocksStored([name(value + 100)], 16, 0)])
            case "remove":
                engine.publish([BlocksRemoved([name(value)], GROUP)])
            case "restart":
                engine.restart()
            case "lose":
                (engine.published if value % 2 else engine.answers).clear()
            case "lose a request":
                engine.requests.clear()
            case "answer":
                engine.answer()
            case "wait":
                self.now += 1.0
                self.follower.tick(self.now)
            case "deliver":
                if engine.published:
                    self.follower.published(engine.published.popleft(), self.now)
            case "deliver an answer":
                if engine.answers:
                    self.follower.answered(engine.answers.popleft(), self.now)

    def settle(self) -> None:
        """Deliver everything, until nothing is on its way."""
        for _ in range(2):
            self.now += ANSWER_TIMEOUT_S
            self.follower.tick(self.now)
            for _ in range(2000):
                if not (self.engine.published or self.engine.answers or self.engine.requests):
                    break
                for action in ("deliver", "answer", "deliver an answer"):
                    self.act(action, 0)
            else:
                raise AssertionError("it requests without end")


ACTIONS = [
    *("store", "store", "store", "remove", "deliver", "deliver", "answer", "deliver an answer", "deliver an answer"),
    *("restart", "lose", "lose a request", "wait", "wait"),
]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9)), max_size=60), st.sampled_from([0, 200, 10**6]))
def test_follows_an_engine_through_losses_and_restarts(actions: list[tuple[str, int]], max_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follower, "MAX_QUEUED_BYTES", max_bytes)
        follow(actions)


def follow(actions: list[tuple[str, int]]) -> None:
    case = Case()
    case.act("wait", 0)
    for action, value in actions:
        case.act(action, value)
    case.act("store", 50)
    case.settle()
    assert case.follower.num_damaged == 0 and not case.follower.not_indexed
    if len(case.engine.batches) <= KEPT:
        assert case.contents == case.engine.contents
    else:
        assert name(50) in case.contents <= case.engine.contents  # what was stored before the oldest batch may miss


def followed() -> Case:
    """Return a case that has applied two batches of the engine."""
    case = Case()
    case.act("store", 1)
    case.act("wait", 0)
    case.settle()
    assert case.contents == {name(1)}
    return case


def batch(*events: Any, incarnation: int = 1) -> bytes:
    return msgspec.msgpack.encode([0.0, list(events), incarnation])


DAMAGED: list[tuple[Frames, str]] = [
    ([], "frames of"),
    ([TOPIC], "frames of 2 bytes"),
    ([TOPIC, b"1234567", b""], "frames of 2, 7, 0 bytes"),
    ([b"other", number(2), batch()], "topic b'other'"),
    ([TOPIC, number(2), b"\xc1"], "batch 2 is damaged"),
    ([TOPIC, number(2), batch([49, []])], "batch 2 is damaged"),
    ([TOPIC, number(2), batch([50, [b"short"], 16, GROUP])], "not of 16 bytes"),
    ([TOPIC, number(2), batch([50, [name(1)], 32, GROUP])], "blocks of 32 tokens"),
    ([TOPIC, number(2), batch([51, [name(1)], 2])], "group 2: it must be below 2"),
    ([TOPIC, number(2), batch([51, [name(1)], -1])], "group -1"),
    ([TOPIC, number(2), batch([51, [name(1)], GROUP, "tape"])], "medium 'tape'"),
]


@pytest.mark.parametrize(("frames", "reason"), DAMAGED)
def test_damage_drops_all_contents_until_they_are_replayed(frames: Frames, reason: str) -> None:
    case = followed()
    case.follower.published(frames, case.now)
    assert case.contents == set() and reason in case.follower.not_indexed
    case.act("store", 2)
    case.act("deliver", 0)  # ignored for a while
    assert case.contents == set() and not case.engine.requests
    case.now += BACKOFF_S[0]
    case.settle()
    assert case.contents == {name(1), name(2)} and case.follower.not_indexed == ""


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"what", number(2), number(1)], "replay message b'what'"),
        ([END, number(2), b"1"], "with 1 bytes"),
    ],
)
def test_a_false_answer_drops_all_contents(frames: Frames, reason: str) -> None:
    case = followed()
    case.follower.published([TOPIC, number(4), batch()], case.now)  # a gap
    assert list(case.engine.requests) == [2] and case.follower.num_gaps == 1
    case.follower.answered(frames, case.now)
    assert case.contents == set() and reason in case.follower.not_indexed


def test_a_batch_that_is_published_and_never_replayed_is_damage() -> None:
    case = followed()
    case.follower.published([TOPIC, number(4), batch()], case.now)
    case.settle()
    assert case.follower.num_damaged == 1 and case.num_forgotten == 3
    assert case.contents == {name(1)}


def test_answers_to_repeated_requests_are_continued_once() -> None:
    case = Case()
    for value in range(KEPT - 1):
        case.act("store", value)
    case.engine.published.clear()
    for _ in range(10):
        case.follower.tick(case.now)
        case.now += ANSWER_TIMEOUT_S
    answered = []
    while case.engine.requests or case.engine.answers:
        answered += list(case.engine.requests)[:1]
        case.act("answer", 0)
        case.act("deliver an answer", 0)
    assert answered == [0] * 10 + [ANSWER_BATCHES]
    assert case.contents == case.engine.contents


def test_answers_that_always_end_too_early_are_damage() -> None:
    case = followed()
    case.follower.published([TOPIC, number(4), batch()], case.now)  # a gap
    for _ in range(MAX_FUTILE - 1):
        case.follower.answered([END, number(1), number(1)], case.now)
        case.now += ANSWER_TIMEOUT_S
        case.follower.tick(case.now)
    assert case.contents == {name(1)} and case.follower.num_damaged == 0
    case.follower.answered([END, number(1), number(1)], case.now)
    assert case.contents == set() and "batch 2 is missing" in case.follower.not_indexed


def test_late_answers_to_many_requests_do_not_count_as_damage() -> None:
    case = Case()
    for _ in range(10):  # while the engine loads
        case.follower.tick(case.now)
        case.now += ANSWER_TIMEOUT_S
    late = [[TOPIC, number(0), case.engine.batches[0]], [END, number(1), number(1)]]
    for frames in late:
        case.follower.answered(frames, case.now)
    case.engine.published.clear()
    case.act("store", 7)
    case.act("deliver", 0)
    case.act("store", 8)
    case.engine.published.clear()  # lost
    case.act("store", 9)
    case.act("deliver", 0)
    assert case.follower.num_gaps == 1
    for frames in late * 9:
        case.follower.answered(frames, case.now)
    case.settle()
    assert case.contents == {name(7), name(8), name(9)} and case.follower.num_damaged == 0


def test_repeated_damage_ends_the_indexing_and_damage_long_ago_is_forgiven() -> None:
    case = followed()
    for pause in (*BACKOFF_S[:3], FORGIVEN_S):
        case.follower.published([], case.now)
        assert not case.follower.has_given_up
        case.now += pause
        case.settle()
        assert case.contents == {name(1)}
    for pause in BACKOFF_S:
        case.follower.published([], case.now)
        case.now += pause
        case.settle()
    assert case.contents == {name(1)}
    case.follower.published([], case.now)
    assert case.follower.has_given_up
    case.now += 10 * FORGIVEN_S
    case.settle()
    assert case.contents == set() and case.follower.not_indexed


def test_requests_once_more_until_the_engine_answers() -> None:
    case = Case()
    case.follower.tick(0.0)
    case.follower.tick(1.0)
    assert list(case.engine.requests) == [0]
    case.follower.tick(ANSWER_TIMEOUT_S)
    assert list(case.engine.requests) == [0, 0]
    case.act("store", 7)
    case.settle()  # both requests are answered
    assert case.contents == {name(7)} and case.num_forgotten == 1
