"""The disk behind the prefix cache: demotions, restarts, and contents that must not be found again."""

from collections.abc import Callable

import numpy as np
import pytest
from keyframed_runs import keyframe_of
from log_replay import replay
from scheduler_driver import Driver, expected_tokens
from tiers import thinned

from quire.protocol.wire.front_end_messages import TierState
from quire.protocol.wire.transfer_messages import BlocksMoved, DiskContents, MoveKind
from quire.scheduler_proc.kv import saves
from quire.scheduler_proc.process.worker_group import common_contents
from quire.scheduler_proc.requests.events import LoadLate
from quire.scheduler_proc.requests.reasons import WaitReason

PROMPT = list(range(1, 41))


def driver(num_host_pages: int = 25, num_blocks: int = 49, num_disk_pages: int = 400, **settings: object) -> Driver:
    engine = Driver(num_blocks, num_host_pages=num_host_pages, num_disk_pages=num_disk_pages, **settings)
    engine.read_disk()
    return engine


def fill_with_others(engine: Driver, count: int = 16) -> None:
    """Run requests that evict what was cached before."""
    for i in range(len(engine.answers), len(engine.answers) + count):
        engine.add(f"other {i}", [100 + i] * 30, max_tokens=4)
        engine.run()


def evicted_to_disk(num_host_pages: int = 25, **settings: object) -> Driver:
    """Return an idle engine whose disk has PROMPT, and whose device has not."""
    engine = driver(num_host_pages, **settings)
    engine.add("first", PROMPT, max_tokens=4)
    engine.run()
    fill_with_others(engine)
    assert disk_of(engine).num_stored >= 8
    return engine


def disk_of(engine: Driver) -> TierState:
    return engine.scheduler.statistics().tiers[-1]


def again(engine: Driver, *, is_cached: bool = True) -> None:
    """Add a request with PROMPT, and check its answer and where its prefix comes from."""
    before = disk_of(engine).num_loaded
    engine.add("again", PROMPT, max_tokens=4)
    engine.finish()
    engine.settle()
    engine.check_drained()
    assert engine.answers["again"].tokens == expected_tokens(PROMPT, 4)
    assert (disk_of(engine).num_loaded > before) == is_cached
    assert (engine.answers["again"].num_cached_tokens == 36) == is_cached
    assert engine.replay_lines() is None


@pytest.mark.parametrize("num_host_pages", [0, 25])
def test_an_evicted_prefix_is_loaded_from_disk(num_host_pages: int) -> None:
    engine = evicted_to_disk(num_host_pages)
    kinds = {MoveKind.DEMOTE, MoveKind.STORE} if num_host_pages else {MoveKind.STORE}
    assert {move.kind for move in engine.moves} == kinds
    again(engine)


@pytest.mark.parametrize("num_host_pages", thinned([25, 0], keep=1))
def test_the_next_engine_finds_the_disk(num_host_pages: int) -> None:
    before = evicted_to_disk(num_host_pages)
    engine = Driver(49, num_host_pages=5, num_disk_pages=400, before=before)
    engine.add("unread", PROMPT, max_tokens=1)
    engine.finish()
    assert disk_of(engine).num_pages == 0 and engine.answers["unread"].num_cached_tokens == 0
    fill_with_others(engine, 6)
    newest = max(page.generation for page in before.worker.host.pages.values())
    engine.read_disk()
    again(engine)
    fill_with_others(engine)
    assert max(page.generation for page in engine.worker.host.pages.values()) > newest


def test_a_load_mixes_tiers() -> None:
    prompt = list(range(1, 100))
    for count in range(2, 12):
        engine = driver()
        engine.add("first", prompt, max_tokens=4)
        engine.run()
        fill_with_others(engine, count)
        engine.add("again", prompt, max_tokens=4)
        engine.finish()
        assert engine.answers["again"].tokens == expected_tokens(prompt, 4)
        if any(min(move.page_ids) < 25 < max(move.page_ids) for move in engine.moves if move.is_load):
            return
    raise AssertionError("no load had pages of both tiers")


@pytest.mark.parametrize("num_host_pages", thinned([0, 25], keep=1))
def test_a_reset_lasts(num_host_pages: int) -> None:
    """Forgotten contents are found neither by this engine nor by the next, which reads their headers."""
    engine = evicted_to_disk(num_host_pages)
    assert engine.control("reset_prefix_cache").done
    assert disk_of(engine).num_cached == 0
    after = Driver(49, num_host_pages=num_host_pages, num_disk_pages=400, before=engine)
    after.read_disk()
    assert disk_of(after).num_cached == 0
    again(engine, is_cached=False)


def test_a_reset_before_the_disk_was_read_lasts() -> None:
    before = evicted_to_disk()
    engine = Driver(49, num_disk_pages=400, before=before)
    assert engine.control("reset_prefix_cache").done
    engine.read_disk()
    assert disk_of(engine).num_cached == 0
    engine.add("first", PROMPT, max_tokens=4)
    engine.run()
    fill_with_others(engine)
    after = Driver(49, num_disk_pages=400, before=engine)
    after.read_disk()
    assert 0 < disk_of(after).num_cached <= disk_of(engine).num_cached
    again(after)


def test_a_reset_forgets_demotions_in_flight() -> None:
    engine = driver()
    engine.add("first", PROMPT, max_tokens=4)
    engine.run()
    for number in range(500):
        if any(move.kind is MoveKind.DEMOTE for move in engine.worker.host.pending):
            break
        if engine.scheduler.is_idle:
            engine.add(f"other {number}", [100 + number] * 30, max_tokens=4)
        engine.fill()
        if not engine.execute():
            engine.move()
        engine.deliver()
    else:
        raise AssertionError("nothing was demoted")
    engine.abort(*[request.request_id for request in engine.scheduler.table.requests.values()])
    while engine.scheduler.in_flight:
        engine.execute()
        engine.deliver()
    assert engine.control("reset_prefix_cache").done
    engine.settle()
    engine.finish()
    assert disk_of(engine).num_cached == 0
    after = Driver(49, num_disk_pages=400, before=engine)
    after.read_disk()
    assert disk_of(after).num_cached == 0


@pytest.mark.parametrize("num_host_pages", [0, 9])
def test_contents_of_bad_requests_are_overwritten(num_host_pages: int) -> None:
    """They were stored when the request was preempted, and must not be found again by the next engine."""
    engine = driver(num_host_pages, 18, max_model_len=64)
    engine.worker.bad_from["bad"] = 12
    engine.add("other", [300] * 20, max_tokens=20)
    engine.add("bad", PROMPT, max_tokens=20)
    for number in range(3):
        engine.add(f"last {number}", [400 + number] * 20, max_tokens=20)
    engine.finish()
    engine.settle()
    found = {page.key for at, page in engine.worker.host.pages.items() if at in engine.worker.host.disk}
    assert engine.scheduler.kv.disk is not None
    assert found == {page.block_hash for page in engine.scheduler.kv.disk.pages.blocks if page.block_hash}
    assert disk_of(engine).num_stored > len(found)


def test_only_results_lead_to_disk() -> None:
    """A content whose step was not answered may be wrong, and the disk is read after any failure."""
    engine = driver(0, 25, max_num_batched_tokens=16, async_scheduling=True)
    engine.add("first", PROMPT, max_tokens=4)
    engine.run()
    engine.add("second", [100] * 60, max_tokens=4)
    for _ in range(100):
        if len(engine.scheduler.transfers):
            break
        engine.schedule() or engine.answer()
    planned = engine.scheduler.last_step
    assert not [move for move in engine.moves if not move.is_load], "the step was not answered"
    while not engine.moves:
        engine.execute()
        engine.deliver()
    assert engine.scheduler.steady_decode.clock.acknowledged >= planned
    engine.finish()


@pytest.mark.parametrize("new_workers", [True, False])
def test_stores_that_were_not_sent_end_with_an_epoch(new_workers: bool) -> None:
    engine = driver(0, 25, max_num_batched_tokens=16, async_scheduling=True)
    engine.add("first", PROMPT, max_tokens=4)
    engine.run()
    engine.add("second", [100] * 60, max_tokens=4)
    for _ in range(100):
        if len(engine.scheduler.transfers):
            break
        engine.schedule() or engine.answer()
    engine.restart_worker() if new_workers else engine.begin_worker_epoch()
    assert not len(engine.scheduler.transfers) and not engine.moves
    engine.finish()
    engine.check_drained()


def test_while_a_load_is_late_no_other_begins() -> None:
    """A disk that does not answer must not hold all blocks."""
    engine = evicted_to_disk(0)
    engine.add("late", PROMPT, max_tokens=4)
    engine.fill()
    engine.execute()
    assert engine.request("late").wait_reason is WaitReason.LOADING
    load = next(move for move in engine.worker.host.pending if move.is_load)
    engine.consume(LoadLate(load.transfer))
    assert disk_of(engine).num_late == 1
    engine.add("second", [100] * 30, max_tokens=4)
    engine.fill()
    assert engine.request("second").wait_reason is not WaitReason.LOADING
    engine.settle()
    engine.finish()
    engine.restart_worker()
    again(engine)


def test_an_unusable_disk_is_not_used() -> None:
    engine = Driver(49, num_host_pages=9, num_disk_pages=50)
    engine.consume(DiskContents(np.zeros(0, np.int32), np.zeros(0, np.int64), b"", reason="cannot be read"))
    engine.add("first", PROMPT, max_tokens=4)
    engine.run()
    fill_with_others(engine)
    assert disk_of(engine).num_pages == disk_of(engine).num_stored == 0
    assert engine.replay_lines() is None


@pytest.mark.full
def test_stores_to_a_broken_disk_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents of the disk are still found, and a later store is a probe; a keyframe has all of it."""
    monkeypatch.setattr(saves, "RETRY_STEPS", 300)
    engine = evicted_to_disk(0)
    num_stored, before = disk_of(engine).num_stored, len(engine.moves)
    engine.worker.host.fault = lambda: "refused"
    until(engine, lambda: disk_of(engine).is_stopped)
    failed, first = engine.moves[before:], engine.scheduler.last_step
    assert len(failed) >= saves.MAX_FAILURES and not any(move.is_load for move in failed)
    engine.settle()
    keyframe_of(engine)
    at = len(engine.log) - 1
    again(engine)
    before = len(engine.moves)
    until(engine, lambda: len(engine.moves) > before)
    assert 290 < engine.scheduler.last_step - first < 400
    (retried,) = engine.moves[before:]
    assert len(retried.page_ids) <= saves.RETRY_BLOCKS and disk_of(engine).num_stored == num_stored
    engine.worker.host.fault = lambda: ""
    until(engine, lambda: not disk_of(engine).is_stopped)
    until(engine, lambda: disk_of(engine).num_stored > num_stored + 2 * saves.RETRY_BLOCKS)
    engine.finish()
    assert engine.replay_lines() is None
    for records in (list(engine.log), list(engine.log)[at:]):
        assert replay(engine.header, records, check=True) is None


def until(engine: Driver, ended: Callable[[], bool]) -> None:
    """Run requests with new prompts until something is so."""
    for _ in range(300):
        if ended():
            return
        fill_with_others(engine, 1)
    raise AssertionError("it never was")


@pytest.mark.parametrize(
    ("pages", "generations", "keys"),
    [
        ([0], [1], b"k" * 32),
        ([400], [1], b"k" * 32),
        ([3, 3], [1, 2], b"k" * 64),
        ([3], [1, 2], b"k" * 32),
        ([3, 4], [1, 2], b"k" * 33),
        ([9], [1], b"k" * 32),
    ],
)
def test_contents_that_cannot_be_are_refused(pages: list[int], generations: list[int], keys: bytes) -> None:
    engine = Driver(49, num_disk_pages=400)
    contents = DiskContents(np.array(pages, np.int32), np.array(generations, np.int64), keys)
    before = engine.scheduler.statistics().num_stray_messages
    engine.consume(DiskContents(np.array([9], np.int32), np.array([1], np.int64), b"n" * 32, is_last=False))
    engine.consume(contents)
    assert engine.scheduler.statistics().num_stray_messages == before + 1
    engine.read_disk()
    assert disk_of(engine).num_pages == 399 and disk_of(engine).num_cached == 1
    engine.read_disk()
    assert engine.scheduler.statistics().num_stray_messages == before + 2, "the disk was read twice"


def test_the_oldest_contents_of_a_disk_are_reused_first() -> None:
    """Also if they are named in parts, and if two pages have equal contents."""
    engine = Driver(49, num_disk_pages=8)
    keys = [bytes([number]) * 32 for number in range(5)]
    generations = [50, 20, 40, 30, 60]
    contents = DiskContents(np.arange(1, 6, dtype=np.int32), np.array(generations), b"".join([*keys[:4], keys[1]]))
    for part in common_contents([[contents]]).parts(2):
        assert disk_of(engine).num_pages == 0
        engine.consume(part)
        engine.scheduler.check()
    pages = engine.scheduler.kv.tiers[0].pages
    assert [page.block_id for page in pages.free_block_queue.blocks()] == [6, 7, 2, 4, 3, 1, 5]
    assert disk_of(engine).num_pages == 7 and disk_of(engine).num_cached == 5
    assert engine.replay_lines() is None


def test_answers_that_fit_no_demotion_are_counted() -> None:
    engine = evicted_to_disk()
    before = engine.scheduler.statistics().num_stray_messages
    engine.consume(BlocksMoved(engine.moves[-1].transfer))
    assert engine.scheduler.statistics().num_stray_messages == before + 1
