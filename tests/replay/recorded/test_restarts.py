"""A trace of several schedulers, each of which replaced one that died: it replays, and a request is one request."""

from pathlib import Path

import msgspec
import pytest
from scheduler_driver import Driver
from tiers import thinned
from traced_runs import write_trace

from quire.protocol.errors import ConfigError
from quire.replay.costs.fitted import timed_steps
from quire.replay.formats.options import LoadOptions
from quire.replay.formats.quire import load
from quire.replay.recorded.exact import replay_lines
from quire.replay.recorded.reader import TraceReader
from quire.replay.recorded.replay_trace import replay_trace
from quire.scheduler_proc.trace.lines import AnyLine, End, Header, Result

PROMPT = [3, 1, 4, 1, 5]
WALL = 1e9


def two_schedulers(folder: Path) -> Path:
    """Write the trace of two schedulers. "a" ends before the death of the first, "b" and "c" after it, "d" is new."""
    first, second = Driver(), Driver()
    for name, count in (("a", 2), ("b", 12), ("c", 9)):
        first.add(name, PROMPT, max_tokens=count)
    for _ in range(5):
        first.step()
    first.add("waiting", [7, 7], max_tokens=3)
    for name, count in (("b", 12), ("c", 9)):
        second.add(name, PROMPT, first.answers[name].tokens, max_tokens=count, resubmitted=True)
    second.add("waiting", [7, 7], max_tokens=3, resubmitted=True)
    second.add("d", PROMPT, max_tokens=4)
    second.run()
    header, *lines = timed(first.lines())
    assert isinstance(header, Header)
    write_trace(folder / "t.jsonl", [msgspec.structs.replace(header, crc=None, wall=WALL), *lines])
    write_second(folder, timed(second.lines()))
    return folder / "t.jsonl"


def timed(lines: list[AnyLine]) -> list[AnyLine]:
    """Let each step take 10 ms, and omit the end."""
    lines = [line for line in lines if not isinstance(line, End)]
    return [
        msgspec.structs.replace(line, crc=None, seconds=0.01) if isinstance(line, Result) else line for line in lines
    ]


def write_second(folder: Path, lines: list[AnyLine], *, part: int = 1, began: float = WALL) -> None:
    header, *rest = lines
    assert isinstance(header, Header)
    header = msgspec.structs.replace(header, crc=None, part=part, wall=WALL + 60, began=began, restarted=True)
    write_trace(folder / f"t.jsonl.{part}", [header, *rest])


def test_the_trace_replays_exactly(tmp_path: Path) -> None:
    path = two_schedulers(tmp_path)
    reader = TraceReader(path)
    assert replay_lines(reader, check=True) is None
    assert reader.notes[0] == f"the scheduler died at the end of {path}; a new one begins in {path}.1"
    assert replay_lines(TraceReader(tmp_path)) is None


def test_a_request_of_both_schedulers_is_one_request(tmp_path: Path) -> None:
    record = replay_trace(two_schedulers(tmp_path))
    assert record.decisions_equal is True
    runs = {run.request_id: run for run in record.requests}
    assert {name: run.num_output_tokens for name, run in runs.items()} == {
        "a": 2,
        "b": 12,
        "c": 9,
        "waiting": 3,
        "d": 4,
    }
    assert [run.num_preemptions for run in runs.values()] == [0, 1, 1, 0, 0]
    assert record.preemptions_by_reason == {"new_epoch": 2} and len(record.requests) == 5
    assert sum(count for _, count in record.itl) == sum(run.num_output_tokens - 1 for run in record.requests)


def test_a_what_if_run_has_each_request_once(tmp_path: Path) -> None:
    path = two_schedulers(tmp_path)
    calls = {call.request_id: call for call in load(path, LoadOptions()).calls}
    assert {name: call.num_output_tokens for name, call in calls.items()} == {
        "a": 2,
        "b": 12,
        "c": 9,
        "waiting": 3,
        "d": 4,
    }
    assert all(call.num_prompt_tokens == (2 if name == "waiting" else 5) for name, call in calls.items())


def test_the_steps_of_both_schedulers_can_be_fitted(tmp_path: Path) -> None:
    """Both have the same handles and step numbers for other requests."""
    path = two_schedulers(tmp_path)
    steps = timed_steps(TraceReader(path))
    assert len(steps) == sum(isinstance(entry.line, Result) for entry in TraceReader(path))
    assert max(step.shape.num_tokens for step in steps) <= 64


@pytest.mark.parametrize("cut", thinned(range(1, 120, 7), keep=4))
def test_a_line_that_the_dead_scheduler_did_not_finish_is_omitted(tmp_path: Path, cut: int) -> None:
    path = two_schedulers(tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    assert replay_lines(TraceReader(path)) is None


def test_damage_before_the_last_line_is_an_error(tmp_path: Path) -> None:
    path = two_schedulers(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], lines[3][:20] + b"\n", *lines[4:]]))
    with pytest.raises(ConfigError, match=r"t\.jsonl:4: the line is damaged"):
        replay_lines(TraceReader(path))


@pytest.mark.parametrize("fields", [{"began": WALL - 1}, {"part": 2}])
def test_a_part_of_another_trace_is_left_out(tmp_path: Path, fields: dict[str, float]) -> None:
    path = two_schedulers(tmp_path)
    second = [entry.line for entry in TraceReader(path)][-10:]
    (tmp_path / "t.jsonl.1").unlink()
    header = TraceReader(path).header
    write_second(tmp_path, [header, *second], **fields)  # type: ignore[arg-type]
    reader = TraceReader(path)
    assert replay_lines(reader) is None
    assert "has no end line" in reader.notes[0] and "belongs to another trace" in reader.notes[1]
