"""A Scheduler that continues from a snapshot, taken at any moment, repeats the recorded decisions."""

import random
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from keyframed_runs import dump_of, keyframe_of
from lines_in_memory import numbered, record_log
from scheduler_driver import Driver, change
from tiers import thinned

from quire.replay.recorded.exact import replay_lines
from quire.replay.recorded.replay_trace import replay_trace
from quire.scheduler_proc.trace.event_log import EventLog, RecordKind
from quire.scheduler_proc.trace.lines import Keyframe
from quire.scheduler_proc.trace.snapshot import Column, Snapshot

SECRET = 777
POLICIES = ["fcfs", "priority", "program", "continuum"]


@lru_cache
def busy_run(policy: str) -> Driver:
    """A run that is never idle, whose ring has lost its beginning."""
    rng = random.Random(3)
    driver = Driver(60, async_scheduling=True, max_num_seqs=6, scheduling_policy=policy)
    driver.log = EventLog(140_000)
    for step in range(345):
        while len(driver.scheduler.table.requests) < 9:
            name, length = f"r{len(driver.answers)}", rng.randrange(1, 20)
            prompt = [SECRET, *(rng.randrange(3) for _ in range(length))]
            driver.add(name, prompt, max_tokens=rng.randrange(1, 20), job_id=f"j{step % 7}", priority=step % 3)
        driver.step()
        if driver.log.is_keyframe_due(idle=False):
            keyframe_of(driver)
    return driver


@pytest.mark.parametrize("policy", thinned(POLICIES, keep=1))
def test_a_crash_under_load_leaves_a_trace_that_replays(policy: str, tmp_path: Path) -> None:
    driver = busy_run(policy)
    assert driver.log.dropped > 200 and driver.log.complete
    recorded = sum(record.kind == RecordKind.PRODUCED for record in driver.log.readable())
    record = replay_trace(dump_of(driver, tmp_path))
    assert record.decisions_equal and recorded - 2 <= len(record.steps) <= recorded, "two steps may be in flight"
    assert len(record.steps) > 20 and len(record.requests) > 10


def snapshot_of(driver: Driver) -> tuple[list[Any], Snapshot]:
    lines = record_log(driver.header, driver.log.readable())
    assert isinstance(lines[1], Keyframe) and lines[1].snapshot is not None
    return lines, lines[1].snapshot


def test_a_keyframe_has_no_tokens() -> None:
    _, snapshot = snapshot_of(busy_run("fcfs"))
    columns = [column for table in snapshot.tables for column in table.columns]
    found = Counter(value for column in columns for value in column.values if isinstance(value, int))
    assert sum(found.values()) > 200 and not found[SECRET]
    assert max(len(data) for column in columns for data in column.data) <= 16 + 8 * 4


@pytest.mark.parametrize(
    "kind", ["quire.protocol.process.child.Child", "quire.scheduler_proc.core.nothing.Planner", "os.system", "list"]
)
def test_an_impossible_keyframe_is_a_difference(kind: str) -> None:
    """Its classes are those of a scheduler's state, which have no side effects."""
    (header, keyframe, *lines), snapshot = snapshot_of(busy_run("fcfs"))
    first, *more = snapshot.tables
    named = [change(table, name=kind) if table.name.endswith("Request") else table for table in snapshot.tables]
    for changed in (
        change(snapshot, tables=named),
        change(snapshot, tables=[change(first, fields=["kv"], columns=[Column([[10**6]])]), *more]),
        change(snapshot, pools=[]),
    ):
        trace = [header, change(keyframe, snapshot=changed, crc=None), *lines]
        found = replay_lines(numbered(trace))
        assert found is not None and (found.line, found.kind, found.field) == (2, "keyframe", "state")
