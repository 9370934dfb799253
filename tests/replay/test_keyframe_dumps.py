"""A crash dump that begins at a keyframe: replayed exactly, loaded as a workload, and used to fit a cost model."""

from pathlib import Path

import pytest
from keyframed_runs import dump_of, long_lived
from scheduler_driver import change
from traced_runs import write_trace

from quire.protocol.errors import ConfigError
from quire.replay.costs.fitted import fit
from quire.replay.formats.options import LoadOptions
from quire.replay.formats.quire import load
from quire.replay.recorded.reader import TraceReader
from quire.replay.recorded.replay_trace import replay_trace
from quire.scheduler_proc.trace.lines import Arrival, Keyframe, Result, StepDecision
from quire.scheduler_proc.trace.snapshot import Column

pytestmark = pytest.mark.full


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return dump_of(long_lived(90_000), tmp_path)


def test_dump_replays_exactly(dump: Path) -> None:
    lines = [entry.line for entry in TraceReader(dump)]
    record = replay_trace(dump)
    assert record.decisions_equal
    assert len(record.requests) == sum(isinstance(line, Arrival) for line in lines) > 20
    assert len(record.steps) == sum(isinstance(line, Result) for line in lines) > 50
    assert any("middle of a run" in note for note in record.notes)


def test_altered_keyframe_is_a_difference(dump: Path) -> None:
    header, keyframe, *lines = [entry.line for entry in TraceReader(dump)]
    assert isinstance(keyframe, Keyframe)
    tables = [
        change(table, columns=[table.columns[0], Column(numbers=table.columns[1].numbers[::-1])])
        if table.name == "queue"
        else table
        for table in keyframe.snapshot.tables
    ]
    write_trace(dump, [header, change(keyframe, snapshot=change(keyframe.snapshot, tables=tables)), *lines])
    assert replay_trace(dump).decisions_equal is False


def test_workload_notes_missing_state(dump: Path) -> None:
    workload = load(dump, LoadOptions())
    assert len(workload.calls) > 20 and any("empty cache" in note for note in workload.notes)
    assert not any("too short" in note for note in workload.notes)


def test_rejects_keyframe_elsewhere(dump: Path) -> None:
    header, keyframe, *lines = [entry.line for entry in TraceReader(dump)]
    write_trace(dump, [header, keyframe, *lines[:9], keyframe, *lines[9:]])
    for use in (lambda: load(dump, LoadOptions()), lambda: replay_trace(dump)):
        with pytest.raises(ConfigError, match=r":12: unexpected keyframe"):
            use()


def test_fits_cost_to_dump(dump: Path) -> None:
    """The dump's first step removes a row from before its beginning."""
    lines = [entry.line for entry in TraceReader(dump)]
    first = next(line for line in lines if isinstance(line, StepDecision))
    assert first.removed and isinstance(lines[1], Keyframe) and lines[1].removed == first.removed
    assert len(fit(dump).errors) >= 50


def test_refuses_keyframe_of_an_earlier_version(dump: Path) -> None:
    """It has another form under another name, which is no longer read."""
    header, keyframe, *lines = [entry.line for entry in TraceReader(dump)]
    write_trace(dump, [header, Keyframe(now=keyframe.now), *lines])
    for use in (lambda: load(dump, LoadOptions(lenient=True)), lambda: replay_trace(dump), lambda: fit(dump)):
        with pytest.raises(ConfigError, match=r":2: .* keyframe of a Quire from before 2026-11-28"):
            use()
