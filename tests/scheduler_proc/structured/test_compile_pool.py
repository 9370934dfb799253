"""The order of compilations: hard grammars have their own queue, and owners take turns."""

import select
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.protocol.request.grammar_checks import GrammarRefused
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.scheduler_proc.structured.backend import GrammarTooSlow
from quire.scheduler_proc.structured.compile_pool import CompilePool
from quire.scheduler_proc.structured.fair_queue import FairQueue
from quire.scheduler_proc.structured.guard import COMPILE_SECONDS


class Checks:
    """Replaces the guards. Expressions with an h are hard, those with an x fail; each lane waits for its semaphore."""

    def __init__(self) -> None:
        self.quick, self.hard = threading.Semaphore(0), threading.Semaphore(0)
        self.tried: list[tuple[str, bool]] = []
        """(expression, whether in the lane for hard grammars)."""

    def start(self) -> None: ...

    def close(self) -> None: ...

    def check(self, wanted: StructuredOutputs, cpu_seconds: float) -> int:
        hard = cpu_seconds == COMPILE_SECONDS
        (self.hard if hard else self.quick).acquire()
        regex = str(wanted.regex)
        self.tried.append((regex, hard))
        if "h" in regex and (not hard or "x" in regex):
            raise GrammarTooSlow(cpu_seconds)
        return 1


class Case:
    def __init__(self) -> None:
        self.checks = Checks()
        self.pool = CompilePool(lambda: self.checks)
        self.outcomes: dict[str, Any] = {}

    def submit(self, regex: str, owner: int = 0) -> None:
        self.pool.submit(("regex", regex), StructuredOutputs(regex=regex), owner)

    def wait_for(self, count: int) -> None:
        while len(self.outcomes) < count:
            assert select.select([self.pool], [], [], 60)[0], "no outcome"
            self.outcomes |= {source[1]: outcome for source, outcome in self.pool.take()}

    def close(self) -> None:
        for gate in (self.checks.quick, self.checks.hard):
            gate.release(10_000)
        self.pool.close()


@pytest.fixture
def case() -> Iterator[Case]:
    case = Case()
    yield case
    case.close()


def test_easy_grammars_overtake_hard_ones(case: Case) -> None:
    for name in (*(f"h{i}" for i in range(5)), *(f"e{i}" for i in range(5))):
        case.submit(name)
    case.checks.quick.release(10)
    case.wait_for(5)
    assert set(case.outcomes) == {f"e{i}" for i in range(5)}, "the hard grammars have not had their second try"
    case.checks.hard.release(5)
    case.wait_for(10)
    assert case.outcomes["h3"].wanted.regex == "h3"
    assert [regex for regex, hard in case.checks.tried if hard] == [f"h{i}" for i in range(5)]


def test_grammars_that_are_too_hard_are_refused(case: Case) -> None:
    case.submit("hx")
    case.checks.quick.release()
    case.checks.hard.release()
    case.wait_for(1)
    assert isinstance(case.outcomes["hx"], GrammarTooSlow) and len(case.checks.tried) == 2


def test_an_owner_of_many_grammars_does_not_delay_others(case: Case) -> None:
    for i in range(500):
        case.submit(f"a{i}", owner=1)
    case.submit("b", owner=2)
    case.submit("c", owner=3)
    case.checks.quick.release(4)
    case.wait_for(4)
    assert {"b", "c"} <= set(case.outcomes)


def test_a_bad_grammar_is_refused_as_bad_behind_any_number_of_others(case: Case) -> None:
    for name in (*(f"e{i}" for i in range(1200)), *(f"h{i}" for i in range(30)), "hx"):
        case.submit(name)
    case.checks.quick.release(1231)
    case.checks.hard.release(31)
    case.wait_for(1231)
    refused = {name: outcome for name, outcome in case.outcomes.items() if isinstance(outcome, GrammarRefused)}
    assert refused.keys() == {"hx"} and isinstance(refused["hx"], GrammarTooSlow)


def test_withdrawn_grammars_are_not_compiled(case: Case) -> None:
    for name in ("first", "second", "last"):
        case.submit(name)
    assert case.pool.withdraw(("regex", "second")) and not case.pool.withdraw(("regex", "second"))
    case.checks.quick.release(3)
    case.wait_for(2)
    assert set(case.outcomes) == {"first", "last"}
    case.submit("second")
    case.wait_for(3)


def test_a_crash_refuses_only_its_grammar(case: Case) -> None:
    def crash(wanted: StructuredOutputs, cpu_seconds: float) -> None:
        case.checks.check = type(case.checks).check.__get__(case.checks)  # type: ignore[method-assign]
        raise SystemError("a library's words")

    case.checks.check = crash  # type: ignore[method-assign]
    case.submit("one")
    case.wait_for(1)
    assert isinstance(case.outcomes["one"], GrammarRefused) and "library" not in str(case.outcomes["one"])
    case.submit("two")
    case.checks.quick.release()
    case.wait_for(2)
    assert case.outcomes["two"].wanted.regex == "two"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers()), max_size=60))
@settings(max_examples=100, deadline=None)
def test_owners_take_turns_and_keep_their_order(items: list[tuple[int, int]]) -> None:
    queue: FairQueue[int] = FairQueue()
    for owner, item in items:
        queue.put(owner, item)
    assert len(queue) == len(items)
    popped = list(iter(queue.pop, None))
    remaining = {owner: sum(o == owner for o, _ in items) for owner, _ in items}
    for owner in remaining:
        assert [item for o, item in popped if o == owner] == [item for o, item in items if o == owner]
    while popped:  # each round serves every owner with items once
        served = [owner for owner, _ in popped[: len(remaining)]]
        assert set(served) == set(remaining) and len(served) == len(remaining)
        popped = popped[len(remaining) :]
        remaining = {owner: count - 1 for owner, count in remaining.items() if count > 1}
