"""A Scheduler restored from a keyframe repeats the recorded decisions, so that the dump of an old engine replays."""

import random
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from keyframed_runs import dump_of, keyframe_of, long_lived
from kv_cases import full, layout_of, sliding
from lines_in_memory import numbered, record_log
from log_replay import replay
from loop_under_test import LoopUnderTest
from scheduler_driver import Driver, change, make_config, make_request
from scheduler_load import Load, random_settings
from tiers import thinned

from quire.launch.replay.recorded.exact import replay_lines
from quire.launch.replay.recorded.reader import TraceReader
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import KVGroup
from quire.protocol.process.child import Command
from quire.protocol.wire.front_end_messages import StepOutputs
from quire.scheduler_proc.process import garbage_collection
from quire.scheduler_proc.process import loop as scheduler_loop
from quire.scheduler_proc.trace import journal
from quire.scheduler_proc.trace.event_log import KEYFRAMES_PER_RING, EventLog, Record, RecordKind
from quire.scheduler_proc.trace.keyframe import IdleState, decode_state, encode_state, idle_state, restore
from quire.scheduler_proc.trace.lines import (
    AnyLine,
    Header,
    Keyframe,
    PrefixCacheEvent,
    Tick,
    decode_line,
    encode_line,
)

SEEDS = range(24)
EVENTS = 22


def go_idle(load: Load, rng: random.Random) -> None:
    """Go idle; sometimes with leftovers: a pause, a halved budget, results of an earlier worker epoch."""
    driver = load.driver
    alive = list(driver.scheduler.table.requests)
    if rng.random() < 0.5:
        for client, request_id in alive:
            driver.abort(request_id, client=client)
        if rng.random() < 0.5:
            if driver.config.enable_chunked_prefill and driver.scheduler.halve_token_budget():
                driver.log.token_budget_halved(0.0)
            driver.begin_worker_epoch()
    else:
        driver.control("resume")
        for client, request_id in alive:
            driver.release(request_id, client)
    driver.run()
    if rng.random() < 0.3:
        driver.control(rng.choice(("pause", "pause_new")))


@lru_cache
def idle_run(seed: int) -> Driver:
    """Run a random load that goes idle twice, each time with a keyframe."""
    rng = random.Random(seed)
    load = Load(rng, Driver(**random_settings(rng, drafts=False)))
    load.fixed_budget = True
    for _ in range(2):
        for _ in range(EVENTS):
            load.random_event()
        load.held.clear()
        go_idle(load, rng)
        keyframe_of(load.driver)
    for _ in range(EVENTS):
        load.random_event()
    return load.driver


def tails(driver: Driver) -> list[list[Record]]:
    """Return the log from each keyframe on."""
    records = list(driver.log)
    return [records[at:] for at, record in enumerate(records) if record.kind == RecordKind.KEYFRAME]


def as_file(driver: Driver, records: list[Record]) -> list[AnyLine]:
    return [decode_line(encode_line(line)) for line in record_log(driver.header, records)]


def altered(records: list[Record], **fields: Any) -> list[Record]:
    state = msgspec.structs.replace(decode_state(records[0].frames[0]), **fields)
    return [change(records[0], frames=[encode_state(state)]), *records[1:]]


@pytest.mark.parametrize("seed", thinned(SEEDS, keep=3))
def test_replay_from_a_keyframe_repeats_all_decisions(seed: int) -> None:
    """With tokens, and as a trace with short hashes. The second keyframe lies within the first tail."""
    driver = idle_run(seed)
    assert replay(driver.header, list(driver.log), check=True) is None
    assert len(tails(driver)) == 2
    for records in tails(driver):
        assert replay(driver.header, records, check=True) is None
        lines = as_file(driver, records)
        assert isinstance(lines[0], Header) and not lines[0].complete and isinstance(lines[1], Keyframe)
        assert replay_lines(numbered(lines), check=True) is None


@pytest.mark.parametrize("seed", SEEDS)
def test_restoring_a_keyframe_restores_its_state(seed: int) -> None:
    driver = idle_run(seed)
    for records in tails(driver):
        scheduler = driver.header.make_scheduler()
        state = decode_state(records[0].frames[0])
        restore(scheduler, state)
        scheduler.check()
        assert idle_state(scheduler) == state
        statistics, known = scheduler.statistics(), state.cached
        assert statistics.num_cached_blocks == len(known) and statistics.num_free_blocks == driver.header.num_blocks - 1


@pytest.mark.full
def test_every_field_of_a_keyframe_affects_decisions() -> None:
    """A field without effect would not be needed, and a run without effect would prove nothing."""
    reached: Counter[str] = Counter()
    for seed in SEEDS:
        driver = idle_run(seed)
        for records in tails(driver):
            state = decode_state(records[0].frames[0])
            states = {
                "cached": {"cached": []},
                "free_blocks": {"free_blocks": state.free_blocks[::-1]},
                "left over": {"removed": [], "retired": []},
                "step": {"step": state.step + 1},
                "halved": {"max_num_batched_tokens": driver.config.max_num_batched_tokens},
                "pause": {"pause": ""},
            }
            for name, fields in states.items():
                reached[name] += noticed(driver, altered(records, **fields))
            lines = as_file(driver, records)
            reached["hits"] += sum(isinstance(line, PrefixCacheEvent) and line.local_hit_tokens > 0 for line in lines)
            reached["stale"] += state.stale_until == state.step
            reached["caching off"] += not driver.config.enable_prefix_caching
            reached["groups"] += len(driver.header.kv_layout.groups) > 1 and bool(state.cached)
            reached["priority"] += driver.config.scheduling_policy == "priority"
    assert min(reached.values()) >= 2 and reached["hits"] > 20, reached


def noticed(driver: Driver, records: list[Record]) -> bool:
    try:
        return replay(driver.header, records) is not None
    except (AssertionError, KeyError):
        return True  # a request that never ran is sampled


@pytest.mark.full
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(
    "groups",
    [
        [full()],
        [full(), sliding(6)],
        [sliding(6), full(8)],
    ],
    ids=lambda groups: "+".join(group.kind for group in groups),
)
def test_cached_contents_are_found_after_a_restore(groups: list[KVGroup], policy: str) -> None:
    """Contents cached before the keyframe are hit, and evicted after it in the same order."""
    driver = Driver(num_blocks=90, layout=layout_of(*groups), scheduling_policy=policy, async_scheduling=True)
    prompts = [[*range(start, start + 24), start] for start in range(12)]
    for round_, starts in enumerate(([0, 1, 2, 3, 1], [0, 1, 2, 3, *range(4, 12), 5])):
        for index, prompt in enumerate(prompts[start] for start in starts):
            driver.add(f"{round_}-{index}", prompt, max_tokens=8, priority=index % 2)
        driver.run()
        if round_ == 0:
            assert keyframe_of(driver).cached
    (records,) = tails(driver)
    assert replay(driver.header, records, check=True) is None
    lines = as_file(driver, records)
    assert replay_lines(numbered(lines), check=True) is None
    hits = [line.local_hit_tokens for line in lines if isinstance(line, PrefixCacheEvent)]
    assert max(hits[:4]) >= 16 and driver.scheduler.statistics().num_evicted_blocks > 0
    assert noticed(driver, altered(records, cached=[]))


def test_lookup_order_of_duplicates_is_restored() -> None:
    """The duplicate that is hit leaves its own position in the queue."""
    driver = Driver(num_blocks=20, async_scheduling=True)
    for name in ("a", "b"):
        driver.add(name, [1, 2, 3, 4], max_tokens=2)  # the last token of a prompt is never taken from the cache
    driver.run()
    first, second = (block for block, key in keyframe_of(driver).cached)
    driver.add("c", [1, 2, 3, 4, 6], max_tokens=2)
    driver.run()
    (records,) = tails(driver)
    assert replay(driver.header, records) is None
    key = decode_state(records[0].frames[0]).cached[0][1]
    assert replay(driver.header, altered(records, cached=[(second, key), (first, key)])) is not None


def test_owners_of_host_pages_are_restored() -> None:
    """Pages are evicted from the tenant that has the most, also after the restore."""
    driver = Driver(61, num_host_pages=129, num_tenants=2)
    requests = [(1, at) for at in range(10)] + [(2, at) for at in range(8)]
    for tenant, at in [*requests, *[(2, at) for at in range(8, 16)], (1, 5)]:
        if (tenant, at) == (2, 8):
            driver.settle()
            pages = keyframe_of(driver).tiers.pages[0]
        driver.add(f"{tenant}-{at}-{len(driver.answers)}", [100 * tenant + at] * 41, max_tokens=2, tenant=tenant)
        driver.run()
    (records,) = tails(driver)
    assert replay(driver.header, records, check=True) is None
    assert [tenant for tenant, _, _ in pages.tenants] == [1, 2]
    tiers = decode_state(records[0].frames[0]).tiers
    one = msgspec.structs.replace(pages, tenants=[(1, 0, sum(count for _, _, count in pages.tenants))])
    assert noticed(driver, altered(records, tiers=msgspec.structs.replace(tiers, pages=[one])))


def test_keyframes_need_an_idle_scheduler_without_drafts() -> None:
    driver = Driver(async_scheduling=True)
    assert idle_state(driver.scheduler) is not None
    driver.add("a", [1, 2, 3], max_tokens=2)
    assert idle_state(driver.scheduler) is None
    driver.schedule()
    driver.abort("a")
    assert idle_state(driver.scheduler) is None, "a step is in flight"
    driver.run()
    assert idle_state(driver.scheduler) is not None
    assert idle_state(Driver(num_speculative_tokens=2).scheduler) is None


# ---- the ring


@pytest.mark.full
def test_a_ring_without_its_beginning_leaves_a_dump_that_replays(tmp_path: Path) -> None:
    driver = long_lived(50_000)
    kept = sum(record.kind == RecordKind.KEYFRAME for record in driver.log)
    assert driver.log.dropped > 1000 and driver.log.complete and 2 <= kept <= KEYFRAMES_PER_RING
    path = dump_of(driver, tmp_path)
    first, second, *lines = [entry.line for entry in TraceReader(path)]
    assert isinstance(first, Header) and not first.complete and isinstance(second, Keyframe)
    assert len(lines) > 100 and not any(isinstance(line, Keyframe) for line in lines)
    assert {len(key) for _, key in second.state.cached} == {first.hash_bytes}
    assert replay_lines(TraceReader(path), check=True) is None


def test_a_complete_ring_is_dumped_from_its_beginning(tmp_path: Path) -> None:
    driver = long_lived(50_000, bursts=5)
    assert not driver.log.dropped and any(record.kind == RecordKind.KEYFRAME for record in driver.log)
    first, second, *_ = [entry.line for entry in TraceReader(dump_of(driver, tmp_path))]
    assert isinstance(first, Header) and first.complete and not isinstance(second, Keyframe)
    assert replay_lines(TraceReader(tmp_path)) is None


def test_a_ring_without_a_keyframe_is_incomplete() -> None:
    """A keyframe larger than a quarter of the ring is dropped, and the next is due after another quarter."""
    driver = long_lived(2_000)
    assert not any(record.kind == RecordKind.KEYFRAME for record in driver.log)
    assert not driver.log.complete and driver.log.readable() == list(driver.log)
    driver.run()
    assert driver.log.is_keyframe_due and len(encode_state(keyframe_of(driver))) > 500
    assert not driver.log.is_keyframe_due and not driver.log.complete


def test_a_quarter_of_the_ring_lies_between_keyframes() -> None:
    log, state = EventLog(max_bytes=80_000), IdleState(step=0, stale_until=-1, max_num_batched_tokens=1, free_blocks=[])
    taken = []
    for index in range(1000):
        log.consumed(float(index), 0, [bytes(40)])
        if log.is_keyframe_due:
            log.keyframe(float(index), state)
            taken.append(index)
    assert taken == list(range(99, 1000, 100))
    assert log.readable()[0].now in taken and log.readable()[0].now <= 700


# ---- invalid lines


@lru_cache
def dumped() -> tuple[list[AnyLine], int]:
    driver = long_lived(50_000)
    return as_file(driver, driver.log.readable()), driver.header.num_blocks


@pytest.mark.full
def test_keyframes_are_only_valid_at_the_beginning() -> None:
    (header, keyframe, *lines), _ = dumped()
    for trace in ([header, *lines[:1], keyframe], [header, Tick(now=1.0), *lines], [header]):
        with pytest.raises(ConfigError, match="begins in the middle"):
            replay_lines(numbered(trace))
    complete = msgspec.structs.replace(header, complete=True)
    for trace in ([complete, keyframe], [header, keyframe, keyframe]):
        with pytest.raises(ConfigError, match="unexpected keyframe"):
            replay_lines(numbered(trace))


@pytest.mark.parametrize(
    "fields",
    [
        {"step": -5},
        {"stale_until": 10**9},
        {"max_num_batched_tokens": 0},
        {"max_num_batched_tokens": 10**9},
        {"pause": "for ever"},
        {"rows": [2**40]},
        {"retired": [-1]},
        {"retired": [2**60]},
        {"retired": [1, 1]},
        {"removed": [77]},
        {"free_blocks": []},
        {"free_blocks": [1] * 23},
        {"free_blocks": list(range(23))},
        {"cached": [(0, b"a")]},
        {"cached": [(24, b"a")]},
        {"cached": [(-1, b"a")]},
        {"cached": [(1, b"a"), (1, b"b")]},
    ],
    ids=repr,
)
def test_an_invalid_keyframe_is_reported_as_a_difference(fields: dict[str, Any]) -> None:
    (header, keyframe, *lines), num_blocks = dumped()
    assert isinstance(keyframe, Keyframe) and num_blocks == 24
    state = msgspec.structs.replace(keyframe.state, **fields)
    trace = [header, msgspec.structs.replace(keyframe, state=state, crc=None), *lines]
    found = replay_lines(numbered(trace))
    assert found is not None and (found.line, found.kind, found.field) == (2, "keyframe", "state")


# ---- the loop


@pytest.fixture(params=[30_000])
def quick_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[LoopUnderTest]:
    """Return a loop that is idle after 5 ms and has a small ring."""
    monkeypatch.setattr(scheduler_loop, "IDLE_MS", 5)
    monkeypatch.setattr(garbage_collection, "IDLE_SECONDS", 0.005)
    monkeypatch.setattr(journal, "RING_BYTES", request.param)
    with zmq.Context() as context:
        config = make_config(async_scheduling=True, crash_dump_dir=str(tmp_path / "dumps"))
        loop = LoopUnderTest(context, tmp_path, config)
        loop.handshake()
        yield loop
        loop.close()


@pytest.mark.full
def test_a_late_failure_leaves_a_dump_that_replays(quick_loop: LoopUnderTest, tmp_path: Path) -> None:
    loop = quick_loop
    for index in range(12):
        loop.client.send(make_request(f"r{index}", [index % 3, 1, 4, 1, 5], max_tokens=40))
        loop.until(lambda message: isinstance(message, StepOutputs) and bool(message.ended))
        assert loop.client.receive(0.02) is None, "the engine is idle"
    loop.spoil = lambda result: change(result, handles=np.array([77], np.int32), tokens=np.array([1], np.int32))
    loop.client.send(make_request("last", [0, 1, 4, 1, 5], max_tokens=9))
    loop.until(lambda message: isinstance(message, StepOutputs) and bool(message.ended))
    loop.child.put(Command("stop", text="the workers died too often"))
    loop.join()
    assert loop.log.dropped and loop.log.complete
    (path,) = (tmp_path / "dumps").iterdir()
    _, second, *lines = [entry.line for entry in TraceReader(path)]
    assert isinstance(second, Keyframe) and second.state.cached
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
    assert loop.log.dropped and not any(record.kind == RecordKind.KEYFRAME for record in loop.log)
    (path,) = (tmp_path / "dumps").iterdir()
    _, second, *lines = [entry.line for entry in TraceReader(path)]
    assert isinstance(second, Keyframe) and second.snapshot is not None and len(lines) > 40
    assert replay_lines(TraceReader(path), check=True) is None
