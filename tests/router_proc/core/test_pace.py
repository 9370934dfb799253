"""Paces: engines are compared by like steps of the same seconds, and old seconds and hiccups count little."""

import pytest

from quire.protocol.wire.front_end_messages import Histogram, Statistics
from quire.router_proc.core.pace import Pace, compare


def statistics(num_steps: int, num_tokens: float, seconds: float) -> Statistics:
    return Statistics(
        1,
        num_steps=num_steps,
        step_tokens=Histogram([], [num_steps], num_tokens),
        step_worker=Histogram([], [num_steps], seconds),
    )


def busy(pace: Pace, factor: float = 1.0, num_tokens: int = 1000, times: int = 100) -> Pace:
    """Let seconds pass that are full of steps of this size, of 10 ms and 0.1 ms per token on the usual device."""
    num_steps = 1.0 / (factor * (0.01 + 1e-4 * num_tokens))
    for _ in range(times):
        pace.add(1.0, 1.0, num_steps * num_tokens, num_steps)
    return pace


def mean_of(pace: Pace) -> float:
    return sum(pace.seconds) / (sum(pace.tokens) or 1)


def test_measures_steps_from_one_second_to_the_next() -> None:
    pace = Pace()
    for each in (Statistics(1), statistics(9000, 9e6, 9000.0), statistics(9000, 9e6, 9000.0)):
        pace.update(each)
        assert mean_of(pace) == 0.0, "what came before the router's begin"
    pace.update(statistics(9010, 9e6 + 1000, 9000.5))
    assert mean_of(pace) == 5e-4
    pace.update(statistics(1, 1000, 0.1))  # a new scheduler
    assert mean_of(pace) == pytest.approx(5e-4)
    for second in range(2, 200):
        pace.update(statistics(second, 1000 * second, 0.1 * second))
    assert mean_of(pace) == pytest.approx(1e-4, rel=0.01), "the old measurement is forgotten"


def test_a_slower_device_is_found_by_like_steps_only() -> None:
    one, other = compare([busy(Pace()), busy(Pace(), 3.0)])
    assert 2.3 < other / one < 3.0
    assert compare([busy(Pace(), num_tokens=4000), busy(Pace(), num_tokens=40)]) == pytest.approx([1.0, 1.0])
    mixed = [busy(busy(Pace(), factor, 4000, 9), factor, 40) for factor in (1.0, 3.0)]
    busy(mixed[0], 1.0, 4000, 9)
    assert 2.0 < compare(mixed)[1] / compare(mixed)[0] < 3.0


def test_an_engine_without_requests_returns_to_the_mean() -> None:
    one, other = busy(Pace()), busy(Pace(), 3.0)
    for _ in range(180):
        busy(one, times=1)
        other.add(1.0, 0.0, 0.0, 0)
    assert compare([one, other]) == pytest.approx([1.0, 1.0], abs=0.02)


def test_a_hiccup_counts_as_one_second() -> None:
    paces = [busy(Pace()), busy(Pace())]
    paces[0].add(1.0, 30.0, 1000.0, 1)
    assert max(compare(paces)) < 1.05
