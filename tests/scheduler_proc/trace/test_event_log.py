"""The event log of an asynchronous run replays to the same decisions, with its tokens or as a trace without them."""

import tracemalloc
from collections.abc import Callable
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
from log_replay import replay
from scheduler_driver import Driver, change
from tiers import thinned
from traced_runs import random_run

from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.protocol.wire.codec import Codec
from quire.protocol.wire.front_end_messages import AddRequest
from quire.protocol.wire.worker_messages import ModelRunnerOutput, SchedulerOutput
from quire.scheduler_proc.requests.events import Consumed
from quire.scheduler_proc.trace.event_log import EventLog, Record, RecordKind
from quire.scheduler_proc.trace.lines import Arrival, Result

SECRET = [7, 77, 777]
CONSUMED: Codec[Any] = Codec(Consumed)
PRODUCED: Codec[Any] = Codec(SchedulerOutput)


def copied(driver: Driver) -> list[Record]:
    """Return the records after encoding and decoding."""
    data = msgspec.msgpack.encode(list(driver.log))
    return msgspec.msgpack.decode(data, type=list[Record])


@pytest.mark.parametrize(("per_token", "asynchronous"), thinned(product([0.01, 0.1], [True, False]), keep=1))
def test_adaptive_drafts_and_grammars_replay(asynchronous: bool, per_token: float) -> None:
    """The numbers of drafts depend on times and acceptance, which the log has."""
    driver = Driver(num_blocks=120, async_scheduling=asynchronous, num_speculative_tokens=4, adaptive=True)
    driver.worker.step_seconds = lambda tokens, drafts: 1.0 + per_token * tokens + 0.1 * (drafts > 0)
    driver.worker.draft_quality = 0.8
    for index in range(5):
        grammar = StructuredOutputs(regex="a*") if index == 2 else None
        driver.add(f"r{index}", [index, 1, 2], max_tokens=60 + index, structured_outputs=grammar, prompt_logprobs=1)
        driver.step()
    driver.run()
    asked = {number for diff in driver.diffs for _, number in diff.drafts}
    assert len(asked) > 2, "the numbers of drafts must vary"
    assert any(diff.awaits_sample_inputs for diff in driver.diffs)
    records = copied(driver)
    assert replay(driver.header, records, check=True) is None
    assert driver.replay_lines() is None
    results = [line for line in driver.lines() if isinstance(line, Result)]
    assert len(results) == len(driver.diffs) and all(r.seconds > 0 for r in results)
    slower = [changed(r, CONSUMED, slowed) if r.kind == RecordKind.CONSUMED else r for r in records]
    assert replay(driver.header, slower) is not None, "times must affect decisions"


def slowed(event: Any) -> Any:
    """Return a result with 30 times the duration if its step had drafts."""
    if not isinstance(event, ModelRunnerOutput) or event.tokens is None:
        return event
    return change(event, seconds=event.seconds * (30.0 if event.drafts is not None else 1.0))


def test_lines_have_lengths_hashes_and_endings() -> None:
    driver = Driver()
    driver.add("a", [1, 2, 3, 4, 5], max_tokens=4)
    driver.run()
    arrival, *results = [line for line in driver.lines() if isinstance(line, Arrival | Result)]
    assert isinstance(arrival, Arrival) and arrival.num_prompt_tokens == 5 and len(arrival.block_hashes) == 8
    assert [r.handles for r in results if isinstance(r, Result)] == [[0], None, None, None]
    assert [[e.num_output_tokens for e in r.ended] for r in results if isinstance(r, Result)] == [[], [], [], [4]]
    named = [handle for line in driver.lines() for handle, _ in getattr(line, "hashes", [])]
    assert named == [0], "the second block, when it becomes full"


def changed(record: Record, codec: Codec[Any], edit: Callable[[Any], Any]) -> Record:
    frames = [bytes(f) for f in codec.encode(0, 0, edit(codec.decode(record.frames).message))]
    return Record(record.kind, record.now, record.client, frames)


@pytest.mark.parametrize("position", thinned([0.5, 0.1, 0.9], keep=1))
def test_a_different_decision_is_located(position: float) -> None:
    records = copied(random_run(1))
    index = [i for i, r in enumerate(records) if r.kind == RecordKind.PRODUCED][int(position * 50)]
    records[index] = changed(records[index], PRODUCED, lambda diff: change(diff, removed=[*diff.removed, 999]))
    found = replay(random_run(1).header, records)
    assert found is not None and found.record == index
    assert found.step == PRODUCED.decode(records[index].frames).message.step
    assert "999" in found.recorded and "999" not in found.decided


def test_an_additional_decision_is_located() -> None:
    driver = Driver()
    driver.add("a", [1, 2], max_tokens=2)
    driver.run()
    records = list(driver.log)
    first = next(i for i, r in enumerate(records) if r.kind == RecordKind.PRODUCED)
    records[first] = Record(RecordKind.TICK, 0.0)
    found = replay(driver.header, records)
    assert found is not None and (found.record, found.recorded) == (first, "nothing")


def test_one_changed_number_of_an_arrival_is_located() -> None:
    driver = Driver(async_scheduling=True)
    for index in range(4):
        driver.add(f"r{index}", [index, 1, 2], max_tokens=5 + index)
        driver.step()
    driver.run()
    records = list(driver.log)
    consumed = [i for i, r in enumerate(records) if r.kind == RecordKind.CONSUMED]
    third = [i for i in consumed if isinstance(CONSUMED.decode(records[i].frames).message, AddRequest)][2]
    records[third] = changed(
        records[third], CONSUMED, lambda event: change(event, prompt_token_ids=np.arange(9, dtype=np.int32))
    )
    found = replay(driver.header, records)
    assert found is not None and found.record > third and found.recorded != found.decided


def test_one_changed_token_of_a_result_is_located_when_it_decides_something() -> None:
    driver = Driver(eos=[500])
    driver.add("a", [1, 2], max_tokens=9)
    driver.run()
    records = list(driver.log)
    result = [i for i, r in enumerate(records) if r.kind == RecordKind.CONSUMED][3]
    records[result] = changed(records[result], CONSUMED, lambda event: change(event, tokens=np.array([500], np.int32)))
    found = replay(driver.header, records)
    assert found is not None and found.record == result + 1 and found.decided == "nothing"


def test_the_ring_is_bounded_and_counts_dropped_records() -> None:
    log = EventLog(max_bytes=20_000)
    for index in range(1000):
        log.consumed(float(index), 0, [bytes(40)])
        assert len(log) <= 100
    assert log.dropped == 900 and not log.complete
    assert [r.now for r in log] == [float(i) for i in range(900, 1000)]
    log.consumed(0.0, 0, [bytes(20_000)])
    assert len(log) <= 1, "a message larger than the ring is dropped"


def test_the_bytes_of_the_ring_are_those_that_it_takes() -> None:
    """Arrays are copied: their objects take more than the few bytes of most of them. Python rounds up, uncounted."""
    tracemalloc.start()
    try:
        log = EventLog(max_bytes=500_000)
        for index in range(3000):
            log.tick(index / 8)
            log.consumed(index / 8, 0, [bytes(index % 99), memoryview(np.zeros(index % 31, np.int32)).cast("B")])
            log.produced(index / 8, [bytes(index % 99)])
        assert log.dropped and 0.8 < tracemalloc.get_traced_memory()[0] / 500_000 < 1.02
    finally:
        tracemalloc.stop()


def test_a_ring_that_dropped_nothing_is_complete() -> None:
    log = EventLog()
    log.tick(1.0)
    log.client_dropped(2.0, 5)
    assert log.complete and [(r.kind, r.client) for r in log] == [(RecordKind.TICK, 0), (RecordKind.CLIENT_DROPPED, 5)]
