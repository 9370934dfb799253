"""Comparison of two runs: seconds by reason, queue heads, and parts that add up to the latency."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_workloads import AffineCost, random_calls
from scheduler_driver import make_config, make_layout

from quire.replay.report.compare import compare
from quire.replay.run.request_states import QueueHead, seconds_by_reason
from quire.replay.run.run_record import Moment, RequestRun, RunRecord
from quire.replay.simulate.setup import Setup
from quire.replay.simulate.simulator import Simulator
from quire.replay.workload.sources import OpenLoop
from quire.replay.workload.workload import Call


def ended(name: str, arrival: float, scheduled: float, first_token: float, end: float, **fields: object) -> RequestRun:
    run = RequestRun(name, arrival, 10, scheduled=scheduled, first_token=first_token, end=end, finish="length")
    run.num_output_tokens = 5
    for field, value in fields.items():
        setattr(run, field, value)
    return run


def test_seconds_by_reason_add_up_to_latency() -> None:
    moments = [
        Moment(1.0, "wait", "kv_blocks"),
        Moment(3.0, "wait", "max_num_seqs"),
        Moment(6.0, "preempt", "youngest", "other"),
        Moment(6.5, "wait", "kv_blocks"),
        Moment(8.0, "resume", ""),
    ]
    run = ended("a", 0.0, 3.5, 5.0, 10.0, moments=moments)
    assert seconds_by_reason(run) == {
        "queued": 1.0,
        "kv_blocks": 2.0 + 1.5,
        "max_num_seqs": 0.5,
        "prefill": 1.5,
        "decode": 1.0 + 2.0,
        "preempted": 0.5,
    }


def test_request_preempted_in_its_admission_step_keeps_waiting() -> None:
    moments = [Moment(2.0, "preempt", "itself", "a"), Moment(2.0, "wait", "kv_blocks"), Moment(5.0, "resume", "")]
    assert seconds_by_reason(ended("a", 0.0, 2.0, 3.0, 6.0, moments=moments)) == {
        "queued": 2.0,
        "kv_blocks": 3.0,
        "decode": 1.0,
    }


def test_request_behind_queue_head_has_its_wait_reason() -> None:
    first = ended("first", 0.0, 6.0, 7.0, 8.0)
    first.moments = [Moment(1.0, "wait", "kv_blocks"), Moment(4.0, "wait", "max_num_seqs")]
    second = ended("second", 2.0, 9.0, 9.5, 10.0, moments=[Moment(8.5, "wait", "kv_blocks")])
    head = QueueHead([second, first])
    assert seconds_by_reason(second, head) == {
        "queued (kv_blocks)": 2.0,
        "queued (max_num_seqs)": 2.0,
        "queued": 2.5,
        "kv_blocks": 0.5,
        "prefill": 0.5,
        "decode": 0.5,
    }
    assert head.seconds(0.0, 1.0) == {}
    assert head.seconds(0.5, 20.0) == {"kv_blocks": 3.5, "max_num_seqs": 2.0}
    assert QueueHead([]).seconds(0.0, 1.0) == {}


def test_slower_requests_have_a_reason() -> None:
    first = RunRecord(title="first", settings={"block_size": 16, "watermark": 0.0})
    second = RunRecord(title="second", settings={"block_size": 32, "watermark": 0.0})
    first.requests = [ended("a", 0, 0, 1, 2), ended("b", 0, 0.5, 1, 3, num_cached_tokens=64), ended("gone", 0, 0, 1, 2)]
    moments = [Moment(0.5, "wait", "kv_blocks"), Moment(5.0, "preempt", "youngest", "a"), Moment(5.5, "resume", "")]
    second.requests = [
        ended("a", 0, 0, 1, 2),
        ended("b", 0, 4.0, 4.5, 7.0, moments=moments, num_preemptions=1),
        ended("late", 0, 1, 2, 4.5),
        RequestRun("gone", 0.0, 10, finish="rejected", end=0.0),
    ]
    found = compare(first, second)
    assert [delta.request_id for delta in found.deltas] == ["b", "a"]
    worst = found.deltas[0]
    assert (worst.ttft, worst.queue, worst.e2e) == (3500.0, 3500.0, 4000.0)
    assert [(part.what, part.seconds) for part in worst.parts][:2] == [("kv_blocks", (0, 3.5)), ("preempted", (0, 0.5))]
    assert worst.behind == [("late", 3.0), ("a", 2.0)]
    assert worst.preempted_for == ["a"]
    for words in ("kv_blocks +3,500 ms", "behind late, a", "preempted +1 times (for a)", "-64 cached tokens"):
        assert words in worst.why
    assert (found.only_first, found.only_second) == (["gone"], ["late"])
    as_json = found.as_dict()
    assert (as_json["slower"], as_json["faster"], as_json["requests"]) == (1, 0, 2)
    assert as_json["settings"] == {"block_size": [16, 32]}
    assert as_json["seconds_by_reason"]["kv_blocks"] == [0.0, 3.5]
    assert json.loads(json.dumps(as_json)) == as_json
    assert "block_size: 16 -> 32" in found.text() and "behind late, a" in found.text()
    assert found.deltas[1].why == "nothing changed"


def test_compares_runs_without_common_requests() -> None:
    empty, one = RunRecord(title="empty"), RunRecord(title="one", requests=[ended("a", 0, 0, 1, 2)])
    found = compare(empty, one)
    assert (found.deltas, found.only_second) == ([], ["a"])
    assert found.as_dict()["mean_change_ms"] == {"ttft": None, "e2e": None, "queue": None}
    assert "0 requests finished in both" in found.text()


def test_matches_equal_ids_by_order() -> None:
    first = RunRecord(requests=[ended("a", 0, 0, 1, 2), ended("a", 5, 5, 6, 7)])
    second = RunRecord(requests=[ended("a", 0, 0, 1, 2), ended("a", 5, 5, 6, 9)])
    assert [delta.e2e for delta in compare(first, second).deltas] == [2000.0, 0.0]


@pytest.mark.full
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(("fcfs", "priority")))
@settings(max_examples=25)
def test_parts_add_up_to_end_to_end_latency(seed: int, policy: str) -> None:
    rng = random.Random(seed)
    calls = random_calls(rng, 10, span=1.0)
    runs = [_run(calls, num_blocks, policy) for num_blocks in (64, 31)]
    for record in runs:
        head = QueueHead(record.requests)
        for run in record.requests:
            assert sum(seconds_by_reason(run).values()) == pytest.approx(run.end - run.arrival)
            assert sum(seconds_by_reason(run, head).values()) == pytest.approx(run.end - run.arrival)
            assert min(seconds_by_reason(run, head).values()) > -1e-9
    found = compare(*runs)
    for delta in found.deltas:
        assert sum(part.change for part in delta.parts) * 1e3 == pytest.approx(delta.e2e, abs=1e-6)
    assert sum(part.change for part in found.parts) * 1e3 == pytest.approx(sum(d.e2e for d in found.deltas), abs=1e-6)


def _run(calls: list[Call], num_blocks: int, policy: str) -> RunRecord:
    config = make_config(async_scheduling=True, scheduling_policy=policy, max_num_seqs=4)
    setup = Setup(config, make_layout(config), num_blocks)
    return Simulator(setup, AffineCost(), OpenLoop(calls), RunRecord()).run()
