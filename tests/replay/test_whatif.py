"""What-if runs: open and closed loops, over-long calls, reuse of answers, and the record's notes."""

import pytest
from replay_workloads import AffineCost, workload

from quire.protocol.errors import ConfigError
from quire.replay.report.summary import summary, tables
from quire.replay.run.run_record import RunRecord
from quire.replay.simulate.setup import make_setup
from quire.replay.simulate.whatif import prepare, run_workload
from quire.replay.workload.workload import Call, ContentIds

SMALL = {"block_size": "16", "num_usable_blocks": "64", "max_model_len": "256"}


def run(calls: list[Call], given: dict[str, str] | None = None, **options: object) -> RunRecord:
    noted = workload(calls, notes=["a note of the trace"])
    setup = make_setup(noted, SMALL | (given or {}), None)
    return run_workload(noted, setup, AffineCost(), **options)  # type: ignore[arg-type]


def turns() -> list[Call]:
    """Return a conversation of two turns; the second contains the first one's answer."""
    ids = list(range(12))
    first = Call(0, "c/0", 0.0, 48, 40, ContentIds(ids[:3], 16), "c", answer=ContentIds(ids, 16))
    second = Call(1, "c/1", 0.5, 120, 10, ContentIds(ids[:7], 16), "c", after=0, pause=2.0)
    return [first, second]


def test_record_describes_the_run() -> None:
    record = run(turns())
    assert (record.block_size, record.num_usable_blocks, record.max_num_batched_tokens) == (16, 64, 8192)
    assert record.settings["block_size"] == 16
    assert (record.source, record.cost, record.title) == ("nowhere", "affine", "test: open loop")
    assert record.notes[0] == "a note of the trace"
    assert [run.request_id for run in record.requests] == ["c/0", "c/1"]
    assert [run.conversation for run in record.requests] == ["c", "c"]
    assert record.virtual_s > 0


def test_open_loop_closed_loop_and_concurrency() -> None:
    open_loop, closed = run(turns()), run(turns(), closed_loop=True)
    assert [run.arrival for run in open_loop.requests] == [0.0, 0.5]
    assert closed.requests[1].arrival == pytest.approx(closed.requests[0].end + 2.0)
    one = run(turns(), concurrency=1)
    assert one.requests[1].arrival == one.requests[0].end
    assert one.title == "test: concurrency 1"


def test_reports_both_bounds_of_answer_reuse() -> None:
    own, reused = run(turns(), closed_loop=True), run(turns(), closed_loop=True, reuse_answers=True)
    assert own.requests[1].num_cached_tokens == 48
    assert reused.requests[1].num_cached_tokens == 80  # its last token's KV was never computed
    assert own.extra["generated"] == {"mode": "own", "other_bound_tokens": 32}
    assert reused.extra["generated"] == {"mode": "reused", "other_bound_tokens": 32}
    assert any("at most 32 more" in note for note in own.notes)
    assert any("at most 32 fewer" in note for note in reused.notes)


def test_without_hints_the_scheduler_finds_the_turns_of_each_conversation() -> None:
    calls = turns()
    calls += [Call(2, "d/0", 1.0, 64, 4, ContentIds([50, 51, 52, 53], 16), "d")]
    calls += [Call(3, "c/2", 1.0, 60, 4, ContentIds([70, 71, 72], 16), "c", after=1, agent="helper")]
    calls += [Call(4, "d/1", 1.0, 64, 4, ContentIds([90, 91, 92, 93], 16), "d", after=2)]
    record = run(calls, {"scheduling_policy": "program"}, closed_loop=True, no_hints=True)
    right = {"turns": 4, "right": 3, "split": 1, "merged": 0}
    of_agents = {"subagent_turns": 1, "subagent_right": 1, "subagent_split": 0, "subagent_merged": 0}
    assert record.extra["programs"] == right | of_agents
    assert any(row[0] == "turns in the right program" for row in tables(summary(record))[-1].rows)
    with pytest.raises(ConfigError, match="--no-hints needs --set scheduling_policy=program"):
        run(calls, no_hints=True)


def test_overlong_calls_are_rejected_clipped_or_dropped() -> None:
    calls = turns()
    calls += [Call(2, "c/2", 1.0, 300, 20, ContentIds(list(range(19)), 16), "c", after=1, pause=3.0)]
    calls += [Call(3, "c/3", 2.0, 100, 10, None, "c", after=2, pause=4.0)]
    refused = run(calls, closed_loop=True)
    assert [run.finish for run in refused.requests] == ["length", "length", "rejected", "length"]
    clipped = run(calls, closed_loop=True, overlong="clip")
    assert [run.num_prompt_tokens for run in clipped.requests] == [48, 120, 236, 100]
    assert clipped.requests[2].num_cached_tokens == 112
    dropped = run(calls, closed_loop=True, overlong="drop")
    assert [run.request_id for run in dropped.requests] == ["c/0", "c/1", "c/3"]
    assert dropped.requests[2].arrival == pytest.approx(dropped.requests[1].end + 7.0)
    for record, policy in ((refused, "refuse"), (clipped, "clip"), (dropped, "drop")):
        assert record.extra["overlong"] == {"calls": 1, "policy": policy}
        assert any(note.startswith("1 calls longer than max_model_len (256)") for note in record.notes)
    assert calls[2].num_prompt_tokens == 300  # the workload itself is unchanged


def test_conversation_starts_after_its_dropped_calls() -> None:
    calls = [Call(0, "0", 0.0, 300, 1), Call(1, "1", 5.0, 30, 2, after=0, pause=1.0)]
    record = run(calls, closed_loop=True, overlong="drop")
    assert [(run.request_id, run.arrival) for run in record.requests] == [("1", 5.0)]


def test_clip_rejects_answer_longer_than_context() -> None:
    record = run([Call(0, "0", 0.0, 10, 300)], overlong="clip")
    assert record.requests[0].finish == "rejected"


def test_notes_default_machine() -> None:
    setup, cost = prepare(workload(turns()), SMALL, None)
    assert cost.describe().endswith("on h200")
    assert any("no --cost" in note for note in setup.notes)
    assert prepare(workload(turns()), SMALL, "constant:3")[1].describe() == "constant: 3 ms per step"
    with pytest.raises(ConfigError, match="magic"):
        prepare(workload(turns()), SMALL, "magic:1")


def test_runs_without_calls() -> None:
    record = run([])
    assert (record.virtual_s, record.requests, len(record.steps)) == (0.0, [], 0)


def test_turn_without_predecessor_arrives_at_its_own_time() -> None:
    calls = [Call(4, "4", 2.0, 30, 2, after=1, pause=1.0), Call(5, "5", 2.5, 30, 2, after=4, pause=1.0)]
    record, closed = run(calls), run(calls, closed_loop=True)
    assert [each.arrival for each in record.requests] == [2.0, 2.5]
    assert closed.requests[0].arrival == 2.0
    assert closed.requests[1].arrival == pytest.approx(closed.requests[0].end + 1.0)
