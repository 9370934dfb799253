"""Open sessions: what they keep, what a piece changes, when they end, and what an idle one costs."""

import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from quire.frontend.sessions import session_store
from quire.frontend.sessions.open_session import ANSWER, TEXT, OpenSession, Piece
from quire.frontend.sessions.session_store import SessionStore
from quire.protocol.errors import InvalidRequest

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=6)


def add(
    store: SessionStore, session_id: str, tokens: list[int], answer: list[int], reason: str = "stop", tenant: int = 0
) -> None:
    session = store.get(tenant, session_id)

    def ended(grown: int | None) -> None:
        store.piece_ended(session_id, grown, close=False)

    with Piece(session_id, session, tokens, 10_000, on_end=ended) as piece:
        piece.add(answer[:1], None)
        piece.add(answer[1:], reason)


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(TOKENS, TOKENS, st.sampled_from(["stop", "length", "repetition", "abort", "error"]))))
def test_a_session_has_exactly_the_tokens_of_its_pieces_and_answers(pieces: Any) -> None:
    store = SessionStore()
    session_id, want, number = store.open(0), [], 0
    for tokens, answer, reason in pieces:
        if not want and not tokens:
            with pytest.raises(InvalidRequest, match="from 1 to 9999"):
                add(store, session_id, tokens, answer, reason)
            continue
        add(store, session_id, tokens, answer, reason)
        if reason not in ("abort", "error"):
            want, number = want + tokens + answer, number + 1
        session = store.get(0, session_id)
        assert session.token_ids.tolist() == want and store.num_bytes == 4 * len(want)
        assert (session.num_pieces, session.is_busy) == (number, False)
    store.close(0, session_id)
    assert store.num_bytes == store.num_open == 0


def test_a_piece_is_refused_while_another_one_is_in_flight_and_when_one_was_meanwhile() -> None:
    session = OpenSession(0, 0.0)
    late, other = (Piece("s", session, [5], 10) for _ in range(2))
    with Piece("s", session, [1], 10) as piece:
        with pytest.raises(InvalidRequest, match="session s is busy with piece 0"), other:
            pass
        piece.add([2], "stop")
    with pytest.raises(InvalidRequest, match="session s is busy with piece 1") as caught, late:
        pass
    assert caught.value.code == "session_busy" and session.token_ids.tolist() == [1, 2] and not session.is_busy


@pytest.mark.parametrize(("end", "answer", "want"), [(TEXT, [2], TEXT), ("user", [2], ANSWER), ("user", [], "user")])
def test_what_a_session_ends_with(end: str, answer: list[int], want: str) -> None:
    session = OpenSession(0, 0.0)
    with Piece("s", session, [1], 10, end=end) as piece:
        piece.add(answer, "length")
    assert session.end == want


def test_idle_sessions_end_in_time_and_busy_ones_do_not() -> None:
    now = 0.0
    store = SessionStore(timeout_s=10.0, now=lambda: now)
    busy, idle, used = (store.open(0) for _ in range(3))
    with Piece(busy, store.get(0, busy), [1], 10):
        now = 9.0
        store.use(0, used)
        store.get(0, idle)
        now = 11.0
        store.expire()
        assert (store.num_open, store.num_idle) == (2, 1)
        with pytest.raises(InvalidRequest, match=f"session '{idle}' not found"):
            store.get(0, idle)
    now = 21.5
    store.expire()
    assert store.num_open == 0


def test_a_session_that_ended_during_its_answer_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_store, "MAX_BYTES", 8)
    store = SessionStore()
    first, second = store.open(0), store.open(0)
    session = store.get(0, first)
    with Piece(first, session, [1, 2], 10, on_end=lambda grown: store.piece_ended(first, grown, close=True)) as piece:
        store.close(0, first)
        piece.add([3], "stop")
    assert store.num_bytes == 0
    add(store, second, [1], [])
    store.require_room(0)
    add(store, second, [1], [2])
    with pytest.raises(InvalidRequest, match=r"12 bytes \(limit 8\)"):
        store.require_room(0)


def test_a_tenant_with_fewer_sessions_gets_those_of_the_one_with_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_store, "MAX_BYTES", 40)
    store = SessionStore(max_sessions=5)
    busy, *others = [store.open(1) for _ in range(5)]
    with pytest.raises(InvalidRequest, match="--max-sessions is 5"):
        store.open(1)
    with Piece(busy, store.get(1, busy), [1], 10):
        store.open(2), store.open(2)
    with pytest.raises(InvalidRequest, match="--max-sessions is 5"):
        store.open(2)  # it would have the most
    for session_id in others[:2]:
        with pytest.raises(InvalidRequest, match="made room for another"):
            store.get(1, session_id)
    add(store, others[2], [1, 2, 3], [4, 5], tenant=1)
    add(store, others[3], [1, 2, 3], [4, 5], tenant=1)
    with pytest.raises(InvalidRequest, match=r"40 bytes \(limit 40\)"):
        store.require_room(1)
    store.require_room(2)
    assert store.num_bytes == 20 and store.get(1, busy)  # to end an empty one would free nothing


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.full)])
def test_10_000_idle_sessions_take_less_than_4_mb(count: int) -> None:
    store = SessionStore()
    add(store, store.open(0), [1], [2])  # imports and caches
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(count - 1):
            add(store, store.open(0), list(range(number, number + 24)), [5] * 8)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert store.num_open == store.num_idle == count and store.num_bytes == 4 * (2 + 32 * (count - 1))
    assert after - before < 400 * count + 5_000  # tables of few entries are emptier
