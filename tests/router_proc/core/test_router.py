"""The Router: which engine gets a request under each policy, and that its totals are those of its requests."""

from collections import Counter
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.protocol.routing import EnginePlace, RoutingConfig, RoutingPolicy
from quire.protocol.wire.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored
from quire.protocol.wire.router_messages import Placed, Progress, Route, Routed
from quire.router_proc.core.events import (
    CacheChanged,
    CacheForgotten,
    EngineMeasured,
    EnginesKnown,
    FrontEndDropped,
    RouterEvent,
)
from quire.router_proc.core.router import Router

BLOCK = 16


def place(
    engine: int, state: Any = "serving", num_starts: int = 1, incarnation: int = 1, device: str = ""
) -> EnginePlace:
    directory = f"/engine-{engine}.{num_starts}"
    return EnginePlace(engine, directory, incarnation, state, BLOCK, num_starts, device=device)


def hashes(text: str, length: int) -> list[bytes]:
    """Return the hashes of a prompt of this many blocks. Texts with a common beginning have common first hashes."""
    words = (text + "." * length)[:length]
    return [sha256(words[: end + 1].encode()).digest() for end in range(length)]


def keys(text: str, length: int) -> bytes:
    return b"".join(each[:8] for each in hashes(text, length))


def make(num_engines: int = 3, policy: RoutingPolicy = "cache", max_loras: int = 0, devices: str = "") -> Router:
    """``devices``: a letter per engine."""
    router = Router(RoutingConfig(policy=policy, max_loras=max_loras))
    known = [place(engine, device=devices[engine : engine + 1]) for engine in range(num_engines)]
    router.consume(EnginesKnown(known))
    return router


def ask(router: Router, ticket: int, text: str = "", length: int = 8, **fields: Any) -> Routed:
    router.consume(Route(ticket, length * BLOCK, keys(text, length) if text else b"", **fields), client=1)
    router.check()
    [(client, routed)] = router.take_messages()
    assert client == 1 and routed.ticket == ticket
    return routed


def store(router: Router, engine: int, text: str, length: int = 8, medium: str = "device") -> None:
    router.consume(CacheChanged(engine, [BlocksStored(hashes(text, length), BLOCK, 0, medium)]))


def test_a_request_goes_where_most_of_it_is_cached() -> None:
    router = make()
    store(router, 1, "abcdefgh", 4)
    store(router, 2, "abcdefgh", 6)
    assert ask(router, 1, "abcdefgh") == Routed(1, 2, "cached", 6 * BLOCK)
    assert ask(router, 2, "xyz").reason == "load"


def test_a_long_queue_outweighs_cached_tokens() -> None:
    router = make(2)
    store(router, 1, "abcdefgh", 4)
    router.consume(Placed(1, 1, num_tokens=10_000), client=1)
    assert ask(router, 2, "abcdefgh") == Routed(2, 0, "load", 0)
    router.consume(Progress([1], []), client=1)  # its prompt is computed
    assert ask(router, 3, "abcdefgh", excluded=[0]).engine == 1
    router.consume(Progress([], [1, 2, 3]), client=1)
    assert ask(router, 4, "abcdefgh") == Routed(4, 1, "cached", 4 * BLOCK)


def test_running_requests_count() -> None:
    router = make(2)
    for ticket in range(50):
        router.consume(Placed(ticket, 0, 100, has_started=True), client=2)
    assert [ask(router, ticket).engine for ticket in range(4)] == [1] * 4


def test_equal_prompts_that_arrive_together_go_to_one_engine() -> None:
    router = make()
    first = ask(router, 1, "abcdefgh").engine
    assert ask(router, 2, "abcdefghijkl", 12) == Routed(2, first, "cached", 8 * BLOCK)
    assert ask(router, 3, "something").engine != first
    router.consume(Progress([], [1, 2]), client=1)  # aborted: nothing will be cached
    assert ask(router, 4, "abcdefgh").num_cached_tokens == 0


def test_cached_tokens_of_a_slower_medium_count_less() -> None:
    router = make(2)
    store(router, 0, "abcdefgh", 8, "disk")
    store(router, 1, "abcdefgh", 7)
    assert ask(router, 1, "abcdefgh").engine == 1
    store(router, 0, "ABCDEFGH", 8, "host")
    store(router, 1, "ABCDEFGH", 1)
    assert ask(router, 2, "ABCDEFGH").engine == 0


def test_blocks_of_several_hashes_are_found_by_their_last_one() -> None:
    router = make(2)
    blocks = hashes("abcdefgh", 8)[1::2]
    router.consume(CacheChanged(1, [BlocksStored(blocks[:3], 2 * BLOCK)]))
    assert ask(router, 1, "abcdefgh") == Routed(1, 1, "cached", 6 * BLOCK)


def test_a_tie_is_broken_by_the_job_then_by_the_number_of_requests_then_by_turn() -> None:
    router = make()
    assert [ask(router, ticket, f"{ticket}").engine for ticket in range(3)] == [0, 1, 2]
    router.consume(Progress([], [0, 1, 2]), client=1)
    assert ask(router, 3, "abc", job_id="job").engine == 0
    router.consume(Progress([], [3]), client=1)
    assert ask(router, 4, "other", job_id="job") == Routed(4, 0, "session")
    router.consume(Progress([], [4]), client=1)
    assert ask(router, 5, "third", job_id="job", tenant=2).engine == 1  # a job of another tenant


def test_a_request_goes_where_its_adapter_is_loaded() -> None:
    router = make(max_loras=2)
    assert ask(router, 1, "abc", adapter=b"A").engine == 0
    router.consume(Progress([], [1]), client=1)
    assert ask(router, 2, "xyz", adapter=b"A") == Routed(2, 0, "adapter")
    for ticket, adapter in ((3, b"B"), (4, b"C")):  # A is evicted from engine 0
        router.consume(Progress([], [2, 3]), client=1)
        assert ask(router, ticket, excluded=[1, 2], adapter=adapter).reason == "only"
    router.consume(Progress([], [3, 4]), client=1)
    assert ask(router, 5, "xyz", adapter=b"A").reason == "load"


def test_many_requests_of_one_adapter_use_several_engines() -> None:
    router = make(2, max_loras=2)
    for ticket in range(40):
        ask(router, ticket, length=1, adapter=b"A")
        router.consume(Progress([ticket], []), client=1)
    counts = Counter(routed_to for routed_to, _, number in router.figures().choices for _ in range(number))
    assert min(counts[0], counts[1]) >= 12


def test_only_serving_engines_get_requests() -> None:
    router = make()
    states = ["starting", "draining", "serving", "drained", "stopped", "failed"]
    router.consume(EnginesKnown([place(engine, state) for engine, state in enumerate(states)]))
    store(router, 1, "abcdefgh")
    assert ask(router, 1, "abcdefgh") == Routed(1, 2, "only")
    assert ask(router, 2, "abcdefgh", excluded=[2]) == Routed(2, 2, "only", 128)  # there is no other
    router.consume(EnginesKnown([place(0, "draining")]))
    assert ask(router, 3) == Routed(3, -1, "")
    assert router.figures().num_unplaced == 1


def test_an_engine_that_is_replaced_has_no_requests_and_no_contents() -> None:
    router = make(2)
    store(router, 0, "abcdefgh")
    ask(router, 1, "abcdefgh")
    router.consume(EnginesKnown([place(0, num_starts=2), place(1)]))
    router.check()
    assert router.figures().indexed_blocks == {0: 0, 1: 0}
    router.consume(Progress([1], []), client=1)  # of the engine before
    store(router, 1, "abcdefgh")
    router.consume(EnginesKnown([place(0, num_starts=2), place(1, incarnation=2)]))
    assert ask(router, 2, "abcdefgh").num_cached_tokens == 0


def test_round_robin_takes_turns() -> None:
    router = make(3, "round-robin")
    assert [ask(router, ticket).engine for ticket in range(5)] == [0, 1, 2, 0, 1]
    router.consume(EnginesKnown([place(0), place(2)]))
    assert [ask(router, ticket) for ticket in (5, 6)] == [Routed(5, 2, "turn"), Routed(6, 0, "turn")]


def test_session_follows_the_job() -> None:
    router = make(3, "session")
    first = ask(router, 1, job_id="job")
    assert first.reason == "load"
    for ticket in range(2, 6):
        assert ask(router, ticket, length=100, job_id="job") == Routed(ticket, first.engine, "session")
    assert ask(router, 6).engine != first.engine
    assert ask(router, 7, job_id="job", excluded=[first.engine]).engine != first.engine


def test_least_load_goes_to_the_shortest_queue() -> None:
    router = make(2, "least-load")
    assert ask(router, 1, length=10).engine == 0
    assert [ask(router, ticket, length=4).engine for ticket in (2, 3)] == [1, 1]
    assert ask(router, 4, length=4).engine == 1  # 8 blocks wait there, and 10 on engine 0


def num_chosen(router: Router, paces: list[float]) -> list[int]:
    """Return how many of 400 requests each engine gets, of which 16 compute and 16 decode at any time."""
    counts = [0] * len(paces)
    for engine, pace in enumerate(paces):
        router.consume(EngineMeasured(engine, pace))
    for ticket in range(400):
        counts[ask(router, ticket).engine] += 1
        router.consume(Progress([ticket - 16], [ticket - 32]), client=1)
    return counts


@pytest.mark.parametrize("policy", ["cache", "least-load"])
@pytest.mark.parametrize(
    ("devices", "paces", "least", "most"),
    [
        ("", [2.0, 1.0], 1.0, 1.05),  # equal devices
        ("AA", [0.3, 6.0], 1.0, 1.05),
        ("AB", [1.2, 1.0], 1.0, 1.05),  # by chance
        ("AB", [2.0, 1.0], 1.5, 4.0),
        ("AB", [1e9, 1.0], 4.0, 30.0),  # bounded
    ],
)
def test_pace_decides_only_between_unlike_devices(
    policy: RoutingPolicy, devices: str, paces: list[float], least: float, most: float
) -> None:
    one, other = num_chosen(make(2, policy, devices=devices), paces)
    assert least <= other / one <= most


def test_equal_devices_share_their_pace() -> None:
    counts = num_chosen(make(3, devices="AAB"), [1.0, 5.0, 1.0])
    assert abs(counts[0] - counts[1]) < 10 and counts[2] > 1.5 * counts[0]


def test_an_engine_that_reports_more_than_its_pool_holds_is_noted_until_it_is_forgotten() -> None:
    router = make(2)
    router.consume(EngineMeasured(0, max_blocks=10))
    store(router, 0, "abcdefghijklmno", 15)
    ask(router, 1, "z")
    assert router.index.overfull == {0}
    router.consume(CacheForgotten(0))
    assert not router.index.overfull and ask(router, 2, "abcdefgh").num_cached_tokens == 0


def test_a_front_end_that_disconnects_takes_its_requests_along() -> None:
    router = make(2)
    router.consume(Route(1, 1000), client=1)
    router.consume(FrontEndDropped(1))
    router.check()
    assert router.take_messages() == []
    assert [ask(router, ticket, length=1).engine for ticket in (2, 3)] == [1, 0]


TEXTS = st.text("ab", max_size=6)
ROUTES = st.builds(
    lambda ticket, text, length, job, excluded, adapter: Route(
        ticket, length * BLOCK + 3, keys(text, length), job, 0, adapter, excluded
    ),
    st.integers(0, 9),
    TEXTS,
    st.integers(0, 8),
    st.sampled_from(["", "job 1", "job 2"]),
    st.lists(st.integers(0, 3), max_size=2),
    st.sampled_from([b"", b"A", b"B"]),
)
TICKETS = st.lists(st.integers(0, 9), max_size=4)
ENGINE = st.integers(0, 3)
CHANGE = st.one_of(
    st.builds(lambda text, length: BlocksStored(hashes(text, length), BLOCK), TEXTS, st.integers(0, 8)),
    st.builds(lambda text, length: BlocksRemoved(hashes(text, length)[-2:]), TEXTS, st.integers(0, 8)),
    st.just(AllBlocksCleared()),
)
PLACES = st.lists(st.sampled_from(["serving", "draining", "failed"]), min_size=1, max_size=4)
EVENTS = st.one_of(
    ROUTES,
    st.builds(Progress, TICKETS, TICKETS),
    st.builds(Placed, st.integers(0, 9), ENGINE, st.integers(0, 500), has_started=st.booleans()),
    st.builds(CacheChanged, ENGINE, st.lists(CHANGE, max_size=3)),
    st.builds(CacheForgotten, ENGINE),
    st.builds(EngineMeasured, ENGINE, st.sampled_from([0.0, 1e-4, 3e-4]), st.sampled_from([0, 12])),
    st.builds(
        lambda states, starts: EnginesKnown([place(e, s, starts) for e, s in enumerate(states)]),
        PLACES,
        st.integers(1, 2),
    ),
    st.builds(FrontEndDropped, st.integers(0, 1)),
)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(EVENTS, st.integers(0, 1)), max_size=40),
    st.sampled_from(["cache", "least-load", "round-robin", "session"]),
)
def test_each_question_has_one_answer_that_is_always_the_same(
    events: list[tuple[RouterEvent, int]], policy: RoutingPolicy
) -> None:
    config = RoutingConfig(policy=policy, max_loras=1)
    one, other = Router(config), Router(config)
    serving: set[int] = set()
    for event, client in events:
        if isinstance(event, EnginesKnown):
            serving = {each.engine for each in event.engines if each.state == "serving"}
        one.consume(event, client)
        one.check()
        copy = msgspec.json.decode(msgspec.json.encode(event), type=RouterEvent)
        other.consume(copy, client)
        answers = one.take_messages()
        assert answers == other.take_messages()
        if not isinstance(event, Route):
            assert not answers
            continue
        [(to, routed)] = answers
        assert (to, routed.ticket) == (client, event.ticket)
        assert routed.engine in serving or (routed.engine == -1 and not serving)
        if serving - set(event.excluded):
            assert routed.engine not in event.excluded
        assert 0 <= routed.num_cached_tokens <= event.num_tokens
