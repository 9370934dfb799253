"""A trace replays to the recorded decisions; every change in it is detected and located."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lines_in_memory import numbered
from scheduler_driver import Driver, change
from tiers import thinned
from traced_runs import encoded, random_run, traced, write_trace

from quire.protocol.errors import ConfigError, InvalidRequest
from quire.protocol.wire.front_end_messages import Abort, EndReason, Stop
from quire.replay.recorded.difference import Difference
from quire.replay.recorded.exact import replay_lines
from quire.replay.recorded.reader import TraceReader
from quire.scheduler_proc.trace.lines import (
    AnyLine,
    Arrival,
    Event,
    Header,
    Line,
    Lost,
    PrefixCacheEvent,
    Result,
    StepDecision,
    StepSnapshot,
    Tick,
    WorkerEpoch,
)

SEEDS = range(8)
Path_ = tuple[str | int, ...]


@lru_cache
def recorded(seed: int) -> list[Line]:
    return traced(random_run(seed, events=25))


def replayed(lines: list[Any], *, check: bool = False) -> Difference | None:
    return replay_lines(numbered(lines), check=check)


def altered(lines: list[Line], at: int, **fields: Any) -> list[Any]:
    """Replace values of line ``at`` (from 0); the new line has no checksum."""
    return [*lines[:at], msgspec.structs.replace(lines[at], **fields), *lines[at + 1 :]]


def find_line(lines: list[Line], kind: type, matches: Any = lambda line: True) -> int:
    return next(at for at, line in enumerate(lines) if isinstance(line, kind) and matches(line))


@pytest.mark.parametrize("seed", thinned(SEEDS, keep=1))
def test_replays_every_decision(seed: int, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace", recorded(seed))
    assert replay_lines(TraceReader(path), check=True) is None


@pytest.mark.full
def test_random_runs_cover_all_kinds_of_events() -> None:
    kinds: Counter[str] = Counter()
    for line in (line for seed in SEEDS for line in recorded(seed)):
        kinds[type(line).__name__] += 1
        match line:
            case StepDecision():
                kinds["drafts"] += bool(line.drafts)
                kinds["grammars"] += line.awaits_sample_inputs
                kinds["parked"] += bool(line.parked)
                kinds["preempted"] += sum(reason.what == "preempt" for reason in line.reasons)
            case WorkerEpoch():
                kinds["budget_halved"] += line.budget_halved
            case Event():
                kinds[type(line.event).__name__] += 1
            case Result():
                kinds["bad"] += bool(line.bad)
                kinds["counts"] += line.counts is not None
    lacking = [name for name in ("drafts", "grammars", "parked", "budget_halved", "bad", "counts") if kinds[name] < 3]
    lacking += [name for name in ("Tick", "ClientDropped", "WorkerEpoch", "Fail", "Refuse", "Hold") if kinds[name] < 3]
    assert not lacking and kinds["preempted"] > 50 and kinds["StepDecision"] > 600, kinds


# ---- one number changed


def numbers_in(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Yield the paths of the numbers in a JSON value."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from numbers_in(child, (*path, key))


def bump(value: Any, path: Path_, by: int) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] += by


@pytest.mark.full
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_detects_any_changed_number_at_its_line(tmp_path: Path, data: st.DataObject) -> None:
    """At least the checksum detects it; a line with impossible values cannot be decoded."""
    raw = encoded(recorded(data.draw(st.sampled_from(SEEDS))))
    at = data.draw(st.integers(0, len(raw) - 1))
    line = json.loads(raw[at])
    path = data.draw(st.sampled_from(list(numbers_in(line))))
    bump(line, path, data.draw(st.sampled_from((1, -1, 7, -1000, 10**6, 2**31))))
    raw[at] = json.dumps(line).encode()
    file = tmp_path / "trace"
    file.write_bytes(b"\n".join(raw) + b"\n")
    try:
        found = replay_lines(TraceReader(file, keep_altered=True))
    except ConfigError as error:
        assert f"{file}:{at + 1}:" in str(error) or "version" in str(error)
    else:
        assert found is not None and found.line == at + 1, f"{path} of {raw[at]!r}"
    with pytest.raises(ConfigError, match=rf":{at + 1}:|version"):
        list(TraceReader(file))


DECIDED = (StepDecision, StepSnapshot, PrefixCacheEvent, Tick)


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_compares_every_number_of_a_decision(data: st.DataObject) -> None:
    """Even with a correct checksum, the new decision differs."""
    lines = recorded(data.draw(st.sampled_from(SEEDS)))
    at = data.draw(st.sampled_from([at for at, line in enumerate(lines) if isinstance(line, DECIDED)]))
    builtin = msgspec.to_builtins(lines[at])
    paths = [path for path in numbers_in(builtin) if path[0] not in ("now", "hashes")]
    if not paths:
        return
    path = data.draw(st.sampled_from(paths))
    bump(builtin, path, data.draw(st.sampled_from((1, -1, 1000))))
    changed: Line = msgspec.convert(builtin, type(lines[at]), strict=False)
    found = replayed([*lines[:at], changed, *lines[at + 1 :]])
    assert found is not None and found.line == at + 1 and found.recorded != found.decided
    if not isinstance(lines[at], PrefixCacheEvent):
        assert found.field.startswith(str(path[0]))


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_altered_events_and_results_raise_nothing_but_differences(data: st.DataObject) -> None:
    """Numbers that affect decisions are detected at their line or later."""
    lines = recorded(data.draw(st.sampled_from(SEEDS)))
    kinds = (Arrival, Result, Event, WorkerEpoch)
    at = data.draw(st.sampled_from([at for at, line in enumerate(lines) if isinstance(line, kinds)]))
    builtin = msgspec.to_builtins(lines[at], enc_hook=np.ndarray.tolist)
    path = data.draw(st.sampled_from([path for path in numbers_in(builtin) if path != ("event", 0)]))
    bump(builtin, path, data.draw(st.sampled_from((1, -1, 1000, 2**31, -(2**40)))))
    try:
        arrays = partial(np.array, dtype=np.int32)
        changed: Line = msgspec.convert(builtin, type(lines[at]), strict=False, dec_hook=lambda _, each: arrays(each))
    except (msgspec.ValidationError, InvalidRequest, OverflowError):
        return
    found = replayed([*lines[:at], changed, *lines[at + 1 :]])
    assert found is None or found.line >= at + 1


# ---- the reported difference


def small(**extra: Any) -> list[Any]:
    driver = Driver(async_scheduling=True, num_blocks=10, scheduling_policy="priority", **extra)
    for index in range(6):
        driver.add(f"r{index}", [index, 1, 2, 3, 4], max_tokens=9 + index, priority=index % 2)
        driver.step()
    driver.run()
    return driver.lines()


def test_difference_names_step_field_and_request() -> None:
    lines = small()
    at = find_line(lines, StepDecision, lambda line: line.counts)
    (handle, count), *rest = lines[at].counts
    found = replayed(altered(lines, at, counts=[(handle, count + 1), *rest]))
    assert found is not None and found.line == at + 1 and found.kind == "step_decision"
    assert (found.step, found.field, found.req_id) == (lines[at].step, "counts[0]", lines[at].new[0].req_id)
    assert (found.recorded, found.decided) == ((handle, count + 1), (handle, count))
    assert str(found).startswith(f"line {at + 1}: step_decision (step {found.step}), counts[0] of 'r0'")


def ending(**fields: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda line: {"ended": [msgspec.structs.replace(line.ended[0], **fields)]}


@pytest.mark.parametrize(
    ("kind", "has", "fields", "expected"),
    [
        (StepDecision, "block_ids", lambda line: {"block_ids": [*line.block_ids[:-1], 99]}, {"recorded": 99}),
        (StepDecision, "removed", lambda line: {"removed": []}, {"field": "removed[0]", "recorded": "nothing"}),
        (Result, "handles", lambda line: {"handles": [*line.handles, 77]}, {"field": "handles"}),
        (Result, "handles", lambda line: {"step": line.step + 1}, {"field": "step"}),
        (Result, "handles", lambda line: {"counts": [3] * len(line.handles)}, {"field": "counts"}),
        (Result, "handles", lambda line: {"drafts": [3] * len(line.handles)}, {"field": "drafts"}),
        (Result, "handles", lambda line: {"bad": [77]}, {"field": "bad"}),
        (Result, "step", lambda line: {"hashes": [(55, bytes(8))]}, {"field": "hashes", "recorded": 55}),
        (Result, "ended", ending(num_output_tokens=8), {}),
        (Result, "ended", ending(handle=77), {}),
        (Result, "ended", ending(reason=99), {}),
        (Result, "ended", lambda line: {"ended": []}, {"field": "ended[0]", "recorded": "nothing"}),
    ],
)
def test_altered_line_is_a_difference(kind: type, has: str, fields: Any, expected: dict[str, Any]) -> None:
    lines = small()
    at = find_line(lines, kind, lambda line: getattr(line, has))
    found = replayed(altered(lines, at, **fields(lines[at])))
    assert found is not None and found.line == at + 1
    assert {name: getattr(found, name) for name in expected} == expected


def test_detects_changed_priority_at_admission() -> None:
    lines = small()
    at = find_line(lines, Arrival, lambda line: line.req_id == "r2")
    found = replayed(altered(lines, at, request=msgspec.structs.replace(lines[at].request, priority=-5)))
    assert found is not None and found.line > at + 1 and found.req_id == "r2"


@pytest.mark.parametrize("by", [1, -1])
def test_detects_changed_count_of_a_result(by: int) -> None:
    lines = small(num_speculative_tokens=3)
    at = find_line(lines, Result, lambda line: line.counts and 2 in line.counts and max(line.drafts) >= 2)
    changed = list(lines[at].counts)
    changed[changed.index(2)] += by
    found = replayed(altered(lines, at, counts=changed))
    assert found is not None and found.line >= at + 1


def test_ending_by_length_before_the_length_is_a_difference() -> None:
    lines = small()
    (ended,) = lines[find_line(lines, Result, lambda line: line.ended)].ended
    assert ended.reason == EndReason.LENGTH
    at = find_line(lines, Result, lambda line: not line.ended and line.step > 3)
    handle = lines[find_line(lines, Result, lambda line: line.handles)].handles[0]
    early = msgspec.structs.replace(ended, handle=handle, num_output_tokens=3)
    found = replayed(altered(lines, at, ended=[early]))
    assert found is not None and found.line == at + 1


def test_missing_or_additional_decision_is_a_difference() -> None:
    lines = small()
    at = find_line(lines, StepDecision)
    tick = [*lines[:at], Tick(now=0.0), *lines[at + 1 :]]
    found = replayed([line for line in tick if not isinstance(line, PrefixCacheEvent | StepSnapshot)])
    assert found is not None and (found.kind, found.recorded, found.decided) == ("tick", "nothing", 1)
    late: list[AnyLine] = [*lines[:-1], StepDecision(step=1000, now=0.0)]
    found = replayed(late)
    assert found is not None and (found.field, found.recorded, found.decided) == ("step", 1000, "nothing")


def test_rejected_arrival_is_a_difference() -> None:
    lines = small()
    at = find_line(lines, Arrival)
    found = replayed(altered(lines, at, num_prompt_tokens=10**6))
    assert found is not None and found.line == at + 1 and "maximum context length" in found.decided
    again = [*lines[: at + 1], lines[at], *lines[at + 1 :]]
    found = replayed(again)
    assert found is not None and (found.line, found.field) == (at + 2, "req_id")


def test_detects_inserted_events() -> None:
    lines = small()
    at = find_line(lines, Result, lambda line: line.step == 3)
    for event in (Abort(["r1"]), Stop("r1", 1)):
        more = [*lines[: at + 1], Event(now=0.0, event=event), *lines[at + 1 :]]
        found = replayed(more)
        assert found is not None and found.line > at + 1


def test_worker_epoch_cannot_halve_the_smallest_budget() -> None:
    driver = Driver(max_num_seqs=4, max_num_batched_tokens=4)
    driver.add("a", [1, 2], max_tokens=3)
    driver.begin_worker_epoch()
    driver.run()
    lines = driver.lines()
    assert replayed(lines) is None
    at = find_line(lines, WorkerEpoch)
    found = replayed(altered(lines, at, budget_halved=True))
    assert found is not None and (found.line, found.field) == (at + 1, "budget_halved")


def test_later_header_must_match_the_first() -> None:
    lines = small()
    header = lines[0]
    assert isinstance(header, Header)
    assert replayed([*lines[:9], msgspec.structs.replace(header, part=1), *lines[9:]]) is None
    found = replayed([*lines[:9], msgspec.structs.replace(header, num_blocks=11), *lines[9:]])
    assert found is not None and (found.line, found.field, found.recorded, found.decided) == (10, "num_blocks", 11, 10)


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (lambda lines: lines[1:], "must begin with its header"),
        (lambda lines: [], "must begin with its header"),
        (lambda lines: [*lines[:5], Lost(lines=3), *lines[5:]], "3 lines are missing"),
        (lambda lines: altered(lines, 0, complete=False), "begins in the middle"),
        (lambda lines: altered(lines, 0, num_blocks=10**12), "num_blocks must be between 1 and"),
        (lambda lines: altered(lines, 0, config=change(lines[0].config, max_num_seqs=10**6)), "impossible engine"),
        (lambda lines: altered(lines, 0, kv_layout=change(lines[0].kv_layout, groups=[])), "impossible engine"),
    ],
)
def test_rejects_traces_that_cannot_be_replayed(broken: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        replayed(broken(small()))


def test_resubmitted_request_bypasses_full_queue_in_replay() -> None:
    driver = Driver(max_num_seqs=1, max_num_queued_reqs=1)
    for name in "abc":
        driver.add(name, [1, 2, 3], max_tokens=4)
        driver.schedule()
    assert driver.answers["c"].rejected is not None
    driver.add("d", [1, 2, 3], max_tokens=4, resubmitted=True)
    driver.run()
    assert driver.answers["d"].reason is EndReason.LENGTH
    assert driver.replay_lines() is None
