"""Percentiles and latencies against values worked out by hand."""

from collections.abc import Iterable

import pytest

from quire.launch.replay.report import figures


def percentile(values: Iterable[float], q: float) -> float:
    return figures.weighted_percentile([(value, 1) for value in values], q)


@pytest.mark.parametrize(("q", "value"), [(0, 1), (1, 1), (50, 5), (51, 6), (90, 9), (99, 10), (100, 10)])
def test_percentile_is_the_nearest_rank(q: float, value: float) -> None:
    assert percentile(range(1, 11), q) == value


def test_a_rank_that_is_whole_is_not_rounded_up() -> None:
    assert [percentile(range(1, n + 1), 99) for n in (100, 200, 700)] == [99, 198, 693]
    assert percentile(range(1, 1001), 99.9) == 999


@pytest.mark.parametrize("q", [0, 10, 50, 75, 76, 99, 100])
def test_weights_are_repetitions(q: float) -> None:
    repeated = [1.0, 1.0, 1.0, 2.5, 4.0, 4.0, 4.0, 4.0]
    assert figures.weighted_percentile([(1.0, 3), (2.5, 1), (4.0, 4)], q) == percentile(repeated, q)
