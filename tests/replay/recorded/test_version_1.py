"""Traces of format version 1, recorded before some fields got new names, replay exactly."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from quire.replay.recorded.older_versions import upgrade
from quire.replay.recorded.reader import TraceReader
from quire.replay.recorded.replay_trace import replay_trace
from quire.scheduler_proc.trace.lines import Arrival, WorkerEpoch

RECORDED = Path(__file__).parents[2] / "data/trace_version_1.jsonl.gz"


def lines_of(path: Path) -> list[Any]:
    return [each.line for each in TraceReader(path)]


def test_a_recorded_trace_replays_exactly(tmp_path: Path) -> None:
    """Up to step 54: the next one preempts a request that is no longer the victim."""
    lines = gzip.decompress(RECORDED.read_bytes()).splitlines(keepends=True)
    end = next(at for at, line in enumerate(lines) if json.loads(line).get("step", 0) > 54)
    beginning = tmp_path / "beginning.jsonl"
    beginning.write_bytes(b"".join(lines[:end]))
    record = replay_trace(beginning)
    assert record.decisions_equal and not record.first_difference


def test_renamed_fields_keep_their_values() -> None:
    lines = lines_of(RECORDED)
    epochs = [line for line in lines if isinstance(line, WorkerEpoch)]
    assert lines[0].version == 1 and [a.request.resubmitted for a in lines if isinstance(a, Arrival)].count(True) == 1
    old = [json.loads(line) for line in gzip.decompress(RECORDED.read_bytes()).splitlines()]
    expected = [(e.get("halved", False), e.get("fresh", False)) for e in old if e["kind"] == "epoch"]
    assert [(e.budget_halved, e.new_workers) for e in epochs] == expected
    assert any(halved for halved, _ in expected) and any(fresh for _, fresh in expected)


def test_an_altered_line_is_still_found(tmp_path: Path) -> None:
    raw = gzip.decompress(RECORDED.read_bytes())
    altered = tmp_path / "altered.jsonl"
    altered.write_bytes(raw.replace(b'"fresh":true', b'"fresh":false', 1))
    wrong = [each for each in TraceReader(altered, keep_altered=True) if not each.is_intact]
    assert len(wrong) == 1 and isinstance(wrong[0].line, WorkerEpoch)


@pytest.mark.parametrize("raw", [b'{"kind":"epoch"', b"[1]\n", b"\xff\n", b'{"kind":"tick","now":1.0}\n'])
def test_other_text_is_left_for_the_reader(raw: bytes) -> None:
    assert upgrade(raw, 1) == raw
