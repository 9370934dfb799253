"""Scheduler traces of three record kinds: requests inferred from decisions."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from quire.protocol.errors import ConfigError
from quire.replay.formats.detect import load_workload
from quire.replay.formats.options import LoadOptions
from quire.replay.formats.sched_trace import KIND_KEYS
from quire.replay.workload.workload import SHORT_HASH_BYTES, Workload, block_names


def snapshot(step: int, **more: Any) -> dict[str, Any]:
    fields = {"event": "step_snapshot", "step": step, "ts": step / 10, "running": 1, "waiting": 0, "free_blocks": 50}
    return {**fields, "total_blocks": 101, "max_num_running_reqs": 8, "max_num_scheduled_tokens": 512, **more}


def hit(step: int, name: str, prompt: int, **more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"event": "prefix_cache_event", "step": step, "ts": step / 10, "req_id": name}
    fields |= {"job_id": None, "local_hit_tokens": 0, "external_hit_tokens": 0, "total_prompt_tokens": prompt}
    return {**fields, "num_tokens": prompt, "connector_name": None, "load_kv_async": False, **more}


def decision(step: int, counts: dict[str, int], preempted: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "event": "step_decision",
        "step": step,
        "ts": step / 10,
        "scheduled_new_req_ids": [],
        "scheduled_resumed_req_ids": [],
        "scheduled_running_req_ids": list(counts),
        "preempted_req_ids": list(preempted),
        "num_scheduled_tokens": counts,
        "total_scheduled_tokens": sum(counts.values()),
    }


TRACE = [
    snapshot(0),
    hit(0, "a", 100, job_id="j"),
    decision(0, {"a": 64}),
    snapshot(1, waiting=["b"]),
    decision(1, {"a": 36}),  # the first token
    hit(2, "b", 20),
    decision(2, {"a": 1, "b": 20}),
    decision(3, {"a": 1, "b": 1}),
    decision(4, {"a": 1}, preempted=("b",)),  # b has 2 tokens; a is done with 4
    hit(5, "b", 20, num_tokens=22, local_hit_tokens=16),
    decision(5, {"b": 6}),
    hit(9, "c", 128, job_id="j", local_hit_tokens=96),
    decision(9, {"b": 1, "c": 32}),
]


def load(path: Path, *records: Any, **options: Any) -> Workload:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return load_workload(path, "auto", LoadOptions(**options))


class TestRequests:
    def test_infers_lengths_times_and_settings(self, tmp_path: Path) -> None:
        workload = load(tmp_path / "a", *TRACE)
        assert workload.format == "sched-trace"
        calls = [(c.request_id, c.arrival, c.num_prompt_tokens, c.num_output_tokens) for c in workload.calls]
        assert calls == [("a", 0, 100, 4), ("b", 0.1, 20, 4), ("c", 0.9, 128, 1)]
        expected = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "num_usable_blocks": 100, "block_size": 16}
        assert workload.settings == expected
        assert any("2 requests were running in the last step" in note for note in workload.notes)

    def test_jobs_are_conversations(self, tmp_path: Path) -> None:
        first, other, second = load(tmp_path / "a", *TRACE).calls
        assert (first.conversation, other.conversation, second.conversation) == ("j", "", "j")
        assert (second.after, second.pause) == (0, pytest.approx(0.5))
        assert (first.is_last_step, second.is_last_step) == (False, True)

    def test_requests_of_a_job_share_their_hits(self, tmp_path: Path) -> None:
        first, other, second = (block_names(c, 16, reuse_answers=True) for c in load(tmp_path / "a", *TRACE).calls)
        found = 96 // 16 * SHORT_HASH_BYTES
        assert first[:found] == second[:found]
        assert len(first) == found, "the answer's four tokens fill no block"
        assert first[:SHORT_HASH_BYTES] != other[:SHORT_HASH_BYTES]

    def test_skips_requests_without_beginning(self, tmp_path: Path) -> None:
        workload = load(tmp_path / "a", *TRACE[4:])
        assert [call.request_id for call in workload.calls] == ["b", "c"]
        assert any("1 requests are skipped" in note for note in workload.notes)


def write_recorded_engine(rng: random.Random, lengths: dict[str, tuple[int, int]]) -> list[dict[str, Any]]:
    """Write a trace with chunked prefill, hits, preemptions, and lookups of requests that were not admitted."""
    records: list[dict[str, Any]] = []
    computed = dict.fromkeys(lengths, 0)
    known = {name: prompt for name, (prompt, _) in lengths.items()}
    waiting, running = list(lengths), list[str]()
    for step in itertools.count():
        records.append(snapshot(step))
        preempted = [running.pop()] if len(running) > 1 and rng.random() < 0.1 else []
        waiting = preempted + waiting
        while waiting and len(running) < 4 and rng.random() < 0.7:
            name = waiting[0]
            computed[name] = rng.randrange(-(-known[name] // 16)) * 16
            prompt = lengths[name][0]
            records.append(hit(step, name, prompt, num_tokens=known[name], local_hit_tokens=computed[name]))
            if rng.random() < 0.2:
                break  # not enough blocks
            running.append(waiting.pop(0))
        budget, counts = 48, {}
        for name in running:
            count = min(budget, known[name] - computed[name])
            if count:
                counts[name] = count
            budget -= count
        records.append(decision(step, counts, tuple(preempted)))
        for name, count in counts.items():
            computed[name] += count
            if computed[name] == known[name]:
                known[name] += 1
                if known[name] == sum(lengths[name]):
                    running.remove(name)
        if not waiting and not running:
            return records
    raise AssertionError


@pytest.mark.parametrize("seed", range(20))
def test_recovers_lengths_of_a_recorded_engine(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    lengths = {f"r{i}": (rng.randrange(1, 150), rng.randrange(1, 30)) for i in range(12)}
    workload = load(tmp_path / "a", *write_recorded_engine(rng, lengths))
    assert {c.request_id: (c.num_prompt_tokens, c.num_output_tokens) for c in workload.calls} == lengths


class TestKeys:
    @pytest.mark.parametrize("key", [*KIND_KEYS, ""])
    def test_recognizes_keys_of_the_record_kind(self, key: str, tmp_path: Path) -> None:
        records = [{key if name == "event" else name: value for name, value in r.items()} for r in TRACE]
        for record in records:
            record.pop("", None)
        assert repr(load(tmp_path / "a", *records).calls) == repr(load(tmp_path / "b", *TRACE).calls)

    @pytest.mark.parametrize(
        ("key", "scale", "start"),
        [
            ("time", 1, 0),
            ("now", 1, 7e8),
            ("timestamp", 1, 1.7e9),
            ("t", 1e3, 1.7e12),
            ("ts_ms", 1e3, 0),
            ("time_ns", 1e9, 5),
        ],
    )
    def test_recognizes_keys_and_units_of_time(self, key: str, scale: float, start: float, tmp_path: Path) -> None:
        records = [{**{k: v for k, v in r.items() if k != "ts"}, key: start + r["ts"] * scale} for r in TRACE]
        arrivals = [call.arrival for call in load(tmp_path / "a", *records).calls]
        assert arrivals == pytest.approx([0, 0.1, 0.9], abs=1e-6)

    def test_counts_records_of_other_kinds(self, tmp_path: Path) -> None:
        workload = load(tmp_path / "a", {"event": "start", "version": 3}, *TRACE)
        assert len(workload.calls) == 3
        assert "1 records of unknown kinds are ignored" in workload.notes

    def test_uses_step_numbers_without_times(self, tmp_path: Path) -> None:
        records = [{name: value for name, value in record.items() if name != "ts"} for record in TRACE]
        workload = load(tmp_path / "a", *records)
        assert [call.arrival for call in workload.calls] == pytest.approx([0, 0.02, 0.18])
        assert any("a step is assumed to take 20 ms" in note for note in workload.notes)


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({"event": "step_decision", "step": 1, "ts": 1}, "`num_scheduled_tokens` must be an object"),
        (decision(1, {"a": -1}), "`a` must be a whole number from 0"),
        (hit(1, "a", 0), "`total_prompt_tokens` must be a whole number from 1"),
        (hit(1, "a", 2**40), "`total_prompt_tokens` must be a whole number from 1"),
        (hit(1, "a", 20, num_tokens=19), ", less than the "),
        (hit(1, "a", 20, local_hit_tokens=21), ", less than the "),
        (hit(1, "a", 20, req_id=None), "`req_id` must be a request id"),
        ({k: v for k, v in hit(1, "a", 20).items() if k != "local_hit_tokens"}, "`local_hit_tokens` is missing"),
        (snapshot(1, ts=-1.0), "the time must be between 0 and 1e15 (got -1"),
    ],
)
def test_rejects_bad_records(bad: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "a", *TRACE[:3], bad)
    assert str(caught.value).startswith(f"{tmp_path / 'a'}:4: ") and expected in str(caught.value)
    workload = load(tmp_path / "a", *TRACE[:3], bad, *TRACE[3:], lenient=True)
    assert [call.num_output_tokens for call in workload.calls] == [4, 4, 1]
    assert any("1 bad line was skipped" in note for note in workload.notes)
