"""A Scheduler restored from a keyframe repeats the recorded decisions, so that the dump of an old engine replays."""

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from keyframed_runs import dump_of, keyframe_of, long_lived, tails
from lines_in_memory import numbered, record_log
from log_replay import replay
from loop_under_test import LoopUnderTest
from scheduler_driver import Driver, change, make_config, make_request

from quire.protocol.errors import ConfigError
from quire.protocol.process.child import Command
from quire.protocol.request.structured_outputs import RepetitionDetection
from quire.protocol.wire.front_end_messages import EndReason, StepOutputs
from quire.replay.recorded.exact import replay_lines
from quire.replay.recorded.reader import TraceReader
from quire.scheduler_proc.process import garbage_collection
from quire.scheduler_proc.process import loop as scheduler_loop
from quire.scheduler_proc.trace import journal
from quire.scheduler_proc.trace.event_log import KEYFRAMES_PER_RING, EventLog, Record, RecordKind
from quire.scheduler_proc.trace.lines import (
    AnyLine,
    Header,
    Keyframe,
    PrefixCacheEvent,
    Tick,
    decode_line,
    encode_line,
)


def as_file(driver: Driver, records: list[Record]) -> list[AnyLine]:
    return [decode_line(encode_line(line)) for line in record_log(driver.header, records)]


def test_lookup_order_of_duplicates_is_restored() -> None:
    """The duplicate that is hit leaves its own position in the queue."""
    driver = Driver(num_blocks=20, async_scheduling=True)
    for name in ("a", "b"):
        driver.add(name, [1, 2, 3, 4], max_tokens=2)  # the last token of a prompt is never taken from the cache
    driver.run()
    keyframe_of(driver)
    driver.add("c", [1, 2, 3, 4, 6], max_tokens=2)
    driver.run()
    (records,) = tails(driver)
    assert replay(driver.header, records) is None
    header, keyframe, *lines = record_log(driver.header, records)
    (pool,) = keyframe.snapshot.pools
    assert len(pool.duplicates) == 2
    pools = [change(pool, duplicates=pool.duplicates[::-1])]
    other = change(keyframe, snapshot=change(keyframe.snapshot, pools=pools))
    assert replay_lines(numbered([header, keyframe, *lines])) is None
    assert replay_lines(numbered([header, other, *lines])) is not None


def test_a_repetition_that_began_before_the_keyframe_is_found() -> None:
    driver = Driver()
    driver.worker.forced |= {("a", index): 7 + index % 2 for index in range(30)}
    detection = RepetitionDetection(max_pattern_size=3, min_count=4)
    driver.add("a", [1, 2, 3], max_tokens=30, repetition_detection=detection)
    driver.add("b", [9], max_tokens=20)
    driver.step(5)
    keyframe_of(driver)
    driver.run()
    assert driver.answers["a"].reason is EndReason.REPETITION
    assert [replay(driver.header, records) for records in tails(driver)] == [None]


# ---- the ring


@pytest.mark.full
def test_a_ring_without_its_beginning_leaves_a_dump_that_replays(tmp_path: Path) -> None:
    driver = long_lived(90_000)
    kept = sum(record.kind == RecordKind.KEYFRAME for record in driver.log)
    assert driver.log.dropped > 1000 and driver.log.complete and 2 <= kept <= KEYFRAMES_PER_RING
    path = dump_of(driver, tmp_path)
    first, second, *lines = [entry.line for entry in TraceReader(path)]
    assert isinstance(first, Header) and not first.complete and isinstance(second, Keyframe)
    assert len(lines) > 100 and not any(isinstance(line, Keyframe) for line in lines)
    assert {len(key) for pool in second.snapshot.pools for key in pool.keys if key} == {first.hash_bytes}
    assert replay_lines(TraceReader(path), check=True) is None


def test_a_complete_ring_is_dumped_from_its_beginning(tmp_path: Path) -> None:
    driver = long_lived(90_000, bursts=6)
    assert not driver.log.dropped and any(record.kind == RecordKind.KEYFRAME for record in driver.log)
    first, second, *_ = [entry.line for entry in TraceReader(dump_of(driver, tmp_path))]
    assert isinstance(first, Header) and first.complete and not isinstance(second, Keyframe)
    assert replay_lines(TraceReader(tmp_path)) is None


def test_a_ring_without_a_keyframe_is_incomplete() -> None:
    """A keyframe larger than a quarter of the ring is dropped, and the next is due after another quarter."""
    driver = long_lived(2_000, bursts=6)
    assert not any(record.kind == RecordKind.KEYFRAME for record in driver.log)
    assert not driver.log.complete and driver.log.readable() == list(driver.log)
    driver.run()
    assert driver.log.is_keyframe_due(idle=True)
    keyframe_of(driver)
    assert not driver.log.is_keyframe_due(idle=True) and not driver.log.complete


def test_a_quarter_of_the_ring_lies_between_keyframes() -> None:
    log, scheduler = EventLog(max_bytes=800_000), Driver(9).scheduler
    taken = []
    for index in range(1000):
        log.consumed(float(index), 0, [bytes(1840)])
        if log.is_keyframe_due(idle=True):
            log.keyframe(float(index), scheduler)
            taken.append(index)
    assert taken == list(range(99, 1000, 100))
    assert log.readable()[0].now in taken and log.readable()[0].now <= 700


# ---- invalid lines


@pytest.mark.full
def test_keyframes_are_only_valid_at_the_beginning() -> None:
    driver = long_lived(90_000)
    header, keyframe, *lines = as_file(driver, driver.log.readable())
    for trace in ([header, *lines[:1], keyframe], [header, Tick(now=1.0), *lines], [header]):
        with pytest.raises(ConfigError, match="begins in the middle"):
            replay_lines(numbered(trace))
    complete = msgspec.structs.replace(header, complete=True)
    for trace in ([complete, keyframe], [header, keyframe, keyframe]):
        with pytest.raises(ConfigError, match="unexpected keyframe"):
            replay_lines(numbered(trace))


# ---- the loop


@pytest.fixture(params=[90_000])
def quick_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[LoopUnderTest]:
    """Return a loop that often looks at its clock, and has a small ring."""
    monkeypatch.setattr(scheduler_loop, "IDLE_MS", 5)
    monkeypatch.setattr(journal, "RING_BYTES", request.param)
    with zmq.Context() as context:
        config = make_config(async_scheduling=True, crash_dump_dir=str(tmp_path / "dumps"))
        loop = LoopUnderTest(context, tmp_path, config)
        loop.handshake()
        yield loop
        loop.close()


@pytest.mark.full
def test_a_late_failure_leaves_a_dump_that_replays(
    quick_loop: LoopUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, idle = quick_loop, threading.Event()
    collector = loop._loop._collector
    maintain = collector._maintain
    monkeypatch.setattr(collector, "_maintain", lambda: (maintain(), idle.set()))
    for index in range(12):
        loop.client.send(make_request(f"r{index}", [index % 3, 1, 4, 1, 5], max_tokens=40))
        loop.until(lambda message: isinstance(message, StepOutputs) and bool(message.ended))
        for _ in range(2):  # the first time may be before the last message is sent
            idle.clear()
            loop.now += garbage_collection.IDLE_SECONDS
            assert idle.wait(60)
    loop.spoil = lambda result: change(result, handles=np.array([77], np.int32), tokens=np.array([1], np.int32))
    loop.client.send(make_request("last", [0, 1, 4, 1, 5], max_tokens=9))
    loop.until(lambda message: isinstance(message, StepOutputs) and bool(message.ended))
    loop.child.put(Command("stop", text="the workers died too often"))
    loop.join()
    assert loop.log.dropped and loop.log.complete
    (path,) = (tmp_path / "dumps").iterdir()
    _, second, *lines = [entry.line for entry in TraceReader(path)]
    assert isinstance(second, Keyframe) and not second.num_requests
    assert any(isinstance(line, PrefixCacheEvent) and line.local_hit_tokens for line in lines)
    assert replay_lines(TraceReader(path), check=True) is None


@pytest.mark.full
@pytest.mark.parametrize("quick_loop", [120_000], indirect=True)
def test_a_failure_under_load_leaves_a_dump_that_replays(quick_loop: LoopUnderTest, tmp_path: Path) -> None:
    loop = quick_loop
    for index in range(60):
        loop.client.send(make_request(f"r{index}", [index % 3, 1, 4, 1, 5], max_tokens=20 + index % 5))
        if index > 3:  # the others still run
            loop.until(lambda message: isinstance(message, StepOutputs) and bool(message.ended))
    loop.child.put(Command("stop", text="the workers died too often"))
    loop.join()
    assert loop.log.dropped
    (path,) = (tmp_path / "dumps").iterdir()
    _, second, *lines = [entry.line for entry in TraceReader(path)]
    assert isinstance(second, Keyframe) and second.num_requests and len(lines) > 40
    assert replay_lines(TraceReader(path), check=True) is None
