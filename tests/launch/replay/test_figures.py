"""Percentiles and latencies against values worked out by hand."""

from collections.abc import Iterable

import pytest

from quire.launch.replay.report import figures
from quire.launch.replay.run.run_record import RequestRun, RunRecord


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


def make_run(finish: str, num_output_tokens: int = 5) -> RequestRun:
    return RequestRun(
        "a", 1.0, 40, scheduled=1.25, first_token=1.5, end=3.5, num_output_tokens=num_output_tokens, finish=finish
    )


def test_latencies_are_milliseconds_from_the_arrival() -> None:
    assert figures.latency(make_run("stop")) == figures.Latency(ttft=500, tpot=500, e2e=2500, queue=250)
    assert figures.latency(make_run("length", num_output_tokens=1)) == (500, None, 2500, 250)


@pytest.mark.parametrize("finish", ["", "rejected", "abort", "error"])
def test_what_did_not_end_well_has_no_latency(finish: str) -> None:
    assert figures.latency(make_run(finish)) == (None, None, None, None)
    record = RunRecord(requests=[make_run(finish), make_run("stop")])
    assert figures.sorted_latencies(record)["e2e"] == [2500]


def test_spread_of_values() -> None:
    assert figures.spread([1, 2, 3, 10]) == {"mean": 4, "p50": 2, "p90": 10, "p99": 10}
    assert figures.spread([]) == {"mean": None, "p50": None, "p90": None, "p99": None}


def test_hits_are_counted_per_request() -> None:
    hit, miss = make_run("stop"), make_run("rejected")
    hit.num_cached_tokens = 32
    found = figures.prefix_cache(RunRecord(block_size=16, requests=[hit, miss]))
    assert found == (32, 2, 1, 80)
    assert found.hit_rate == 0.4
    assert figures.prefix_cache(RunRecord()).hit_rate == 0.0
