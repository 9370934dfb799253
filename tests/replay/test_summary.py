"""The JSON of a run: its keys, and figures computed by hand."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from replay_runs import simulated_run

from quire.replay.report.figures import weighted_percentile
from quire.replay.report.summary import summary, tables
from quire.replay.run.run_record import RequestRun, RunRecord

CONTRACT = (
    *("requests", "rejected", "prefix_cache", "preemptions", "latency_ms", "virtual_s", "wall_s", "speedup", "steps"),
    *("decisions_equal", "first_difference"),
)


def ended(number: int, *, first: float, end: float, tokens: int, cached: int = 0) -> RequestRun:
    return RequestRun(
        *(str(number), float(number), 100),
        scheduled=number + 0.5,
        first_token=first,
        end=end,
        num_output_tokens=tokens,
        num_cached_tokens=cached,
        finish="length",
    )


@pytest.fixture
def record() -> RunRecord:
    made = RunRecord(title="t", block_size=16, virtual_s=10.0, wall_s=0.5)
    made.requests = [
        ended(0, first=1.0, end=3.0, tokens=5, cached=32),
        ended(1, first=4.0, end=4.0, tokens=1),
        RequestRun("2", 2.0, 5000, finish="rejected", finish_detail="it needs 313 KV blocks; the pool has 9", end=2.0),
        RequestRun("3", 2.5, 6000, finish="rejected", finish_detail="it needs 375 KV blocks; the pool has 9", end=2.5),
        RequestRun("4", 3.0, 100, scheduled=3.0, first_token=3.5, end=4.0, num_output_tokens=2, finish="abort"),
    ]
    made.requests[1].num_preemptions = 2
    made.preemptions_by_reason = {"out of blocks": 2}
    made.itl = [(10.0, 3), (500.0, 1)]
    for step in range(4):
        made.steps.begin.append(float(step))
        made.steps.end.append(step + 0.25)
    return made


def test_summary_has_contracted_keys(record: RunRecord) -> None:
    found = summary(record)
    assert not set(CONTRACT) - set(found)
    assert (found["requests"], found["rejected"], found["steps"], found["preemptions"]) == (5, 2, 4, 2)
    assert found["prefix_cache"] == {
        "hit_tokens": 32,
        "hit_blocks": 2,
        "requests_with_hit": 1,
        "input_tokens": 11300,
        "hit_rate": round(32 / 11300, 6),
    }
    assert (found["virtual_s"], found["wall_s"], found["speedup"]) == (10.0, 0.5, 20.0)
    assert found["decisions_equal"] is None and found["first_difference"] is None
    assert found["rejected_reasons"] == {"it needs N KV blocks; the pool has N": 2}
    rates = {"requests_per_s": 0.2, "output_tokens_per_s": 0.8, "total_tokens_per_s": 30.8}
    assert found["throughput"] == rates, "of what was answered"
    assert found["finish_reasons"] == {"abort": 1, "length": 2, "rejected": 2}


def test_latencies_cover_successful_requests(record: RunRecord) -> None:
    found = summary(record)["latency_ms"]
    assert found["ttft"] == {"mean": 2000.0, "p50": 1000.0, "p90": 3000.0, "p99": 3000.0}
    assert found["tpot"]["mean"] == 500.0
    assert found["e2e"]["p99"] == found["e2e"]["p50"] == 3000.0
    assert found["queue"]["mean"] == 500.0
    assert found["itl"] == {"mean": 132.5, "p50": 10.0, "p90": 500.0, "p99": 500.0}
    assert summary(record)["step_ms"]["p50"] == 250.0


def test_empty_run_has_no_nan() -> None:
    found = summary(RunRecord())
    decoded: dict[str, Any] = json.loads(json.dumps(found, allow_nan=False))
    assert decoded == found
    assert found["speedup"] is None and found["latency_ms"]["ttft"]["mean"] is None
    assert found["prefix_cache"]["hit_rate"] == 0.0
    assert found["steps"] is found["preemptions"] is found["prefix_cache"]["hit_blocks"] is None
    assert len(tables(found)) == 1  # no latencies


def test_extra_figures_do_not_override_keys(record: RunRecord) -> None:
    record.extra = {"errors": {"timeout": 1}, "requests": "mine"}
    found = summary(record)
    assert found["errors"] == {"timeout": 1} and found["requests"] == 5


def test_tables_equal_summary(record: RunRecord) -> None:
    latency, run = (table.text() for table in tables(summary(record)))
    assert "time to first token, ms    2,000  1,000  3,000  3,000" in latency
    lines = [line.split("  ") for line in run.splitlines()]
    figures = {line[0] or line[1].strip(): line[-1].strip() for line in lines}
    assert figures["requests"] == "5" and figures["rejected"] == "2" and figures["steps"] == "4"
    assert figures["prompt tokens from the prefix cache"] == "32 of 11,300 (0.28%)"
    assert run.index("rejected") < run.index("it needs N KV blocks") < run.index("prompt tokens")
    assert run.index("preemptions") < run.index("out of blocks") < run.index("steps")


def percentile(values: Iterable[float], q: float) -> float:
    return weighted_percentile([(value, 1) for value in values], q)


@pytest.mark.parametrize(("q", "value"), [(0, 1), (1, 1), (50, 5), (51, 6), (90, 9), (99, 10), (100, 10)])
def test_percentile_is_nearest_rank(q: float, value: float) -> None:
    assert percentile(range(1, 11), q) == value


def test_whole_rank_is_not_rounded_up() -> None:
    assert [percentile(range(1, n + 1), 99) for n in (100, 200, 700)] == [99, 198, 693]
    assert percentile(range(1, 1001), 99.9) == 999


@pytest.mark.parametrize("q", [0, 10, 50, 75, 76, 99, 100])
def test_weights_equal_repetitions(q: float) -> None:
    repeated = [1.0, 1.0, 1.0, 2.5, 4.0, 4.0, 4.0, 4.0]
    assert weighted_percentile([(1.0, 3), (2.5, 1), (4.0, 4)], q) == percentile(repeated, q)


def test_evictions_by_policy() -> None:
    found = summary(simulated_run(scheduling_policy="continuum"))
    assert sum(found["evicted_by_policy"].values()) == found["evicted_blocks"] > 0
    assert "blocks evicted, lru" in [label for label, _ in tables(found)[-1].rows]
    assert summary(simulated_run())["evicted_by_policy"] == {}
