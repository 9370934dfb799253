"""Host memory: what is stored and loaded, what holds blocks meanwhile, and faults of copies."""

import random
from itertools import product

import pytest
from fake_pages import random_faults
from scheduler_driver import Driver, expected_tokens
from tiers import thinned

from quire.protocol.model.kv_layout import KVGroup, KVLayout
from quire.protocol.wire.front_end_messages import EndReason
from quire.protocol.wire.transfer_messages import BlocksMoved
from quire.scheduler_proc.requests.events import LoadLate
from quire.scheduler_proc.requests.reasons import WaitReason

WINDOWS = KVLayout(
    [KVGroup("full_attention", 4, [0]), KVGroup("sliding_window", 4, [1], 10), KVGroup("sliding_window", 4, [2], 10)],
    num_kv_heads=1,
    head_dim=4,
    dtype="float32",
)
PROMPT = list(range(1, 41))


def driver(num_blocks: int = 25, num_host_pages: int = 65, **settings: object) -> Driver:
    return Driver(num_blocks, num_host_pages=num_host_pages, **settings)


def fill_with_others(engine: Driver, count: int = 6) -> None:
    """Run requests that evict what was cached before."""
    for i in range(count):
        engine.add(f"other {i}", [100 + i] * 30, max_tokens=4)
        engine.run()


def loaded(engine: Driver) -> int:
    return engine.scheduler.statistics().tiers[0].num_loaded


def test_an_evicted_prefix_is_loaded_and_not_computed() -> None:
    engine = driver()
    engine.add("first", PROMPT, max_tokens=4)
    engine.run()
    fill_with_others(engine)
    state = engine.scheduler.statistics().tiers[0]
    assert state.num_stored > 0 and state.num_loaded == 0
    engine.add("again", PROMPT, max_tokens=4)
    engine.run()
    assert loaded(engine) >= 5
    assert engine.answers["again"].num_cached_tokens == 36
    assert engine.answers["again"].tokens == engine.answers["first"].tokens == expected_tokens(PROMPT, 4)
    engine.check_drained()
    assert engine.replay_lines() is None


def test_only_what_a_window_reads_is_loaded() -> None:
    """A hit of 36 tokens: nine blocks of full attention, and of each window of 10 those from position 27 on."""
    engine = driver(60, 400, layout=WINDOWS)
    engine.add("first", PROMPT, max_tokens=4)
    engine.run()
    fill_with_others(engine, 12)
    engine.add("again", PROMPT, max_tokens=4)
    engine.run()
    assert engine.answers["again"].num_cached_tokens == 36
    assert loaded(engine) == 9 + 2 * 3
    assert engine.answers["again"].tokens == expected_tokens(PROMPT, 4)
    engine.check_drained()


def test_a_load_needs_no_more_blocks_than_its_computation() -> None:
    """14 blocks are free: enough for the prompt, but not for the prompt and the watermark of 7."""
    engine = driver(watermark=0.3, max_num_batched_tokens=16)
    engine.add("first", PROMPT, max_tokens=4)
    engine.run()
    fill_with_others(engine)
    engine.add("running", [90] * 37, max_tokens=3)
    while engine.scheduler.statistics().num_free_blocks > 14:
        engine.step()
    engine.add("again", PROMPT, max_tokens=4)
    engine.run()
    assert loaded(engine) == 9
    engine.check_drained()


def test_a_request_that_loads_does_not_delay_others() -> None:
    engine = driver(40)
    engine.add("first", PROMPT, max_tokens=2)
    engine.run()
    fill_with_others(engine, 8)
    engine.add("again", PROMPT, max_tokens=2)
    engine.add("behind", [7, 8, 9], max_tokens=3)
    engine.fill()
    assert engine.request("again").wait_reason is WaitReason.LOADING
    for _ in range(10):  # its copy does not run
        engine.fill()
        engine.execute()
        engine.deliver()
    assert engine.answers["behind"].reason is EndReason.LENGTH
    assert engine.request("again").wait_reason is WaitReason.LOADING
    engine.finish()


def test_faults_in_pages_are_detected_and_computed_instead() -> None:
    for seed in range(5):
        engine = driver()
        engine.worker.host.fault = random_faults(random.Random(seed), 0.4)
        engine.add("first", PROMPT, max_tokens=4)
        engine.run()
        fill_with_others(engine)
        engine.add("again", PROMPT, max_tokens=4)
        engine.run()
        assert engine.answers["again"].tokens == expected_tokens(PROMPT, 4)
        engine.check_drained()


@pytest.mark.parametrize(("when", "new_workers"), thinned(product(["sent", "received", "run"], [True, False]), keep=3))
def test_host_memory_outlives_workers(new_workers: bool, when: str) -> None:
    engine = driver()
    engine.add("first", PROMPT, max_tokens=4)
    engine.run()
    fill_with_others(engine)
    engine.add("again", PROMPT, max_tokens=4)
    engine.fill()
    if when != "sent":
        engine.execute()
    if when == "run":
        engine.move()
    engine.restart_worker() if new_workers else engine.begin_worker_epoch()
    assert engine.request("again").wait_reason is WaitReason.QUEUED
    engine.finish()
    assert engine.answers["again"].num_cached_tokens == 36, "it was loaded again"
    assert engine.answers["again"].tokens == expected_tokens(PROMPT, 4)
    assert engine.replay_lines() is None


def test_a_late_load_is_computed_and_not_repeated() -> None:
    engine = driver(40)
    engine.add("first", PROMPT, max_tokens=4)
    engine.run()
    fill_with_others(engine, 8)
    engine.add("again", PROMPT, max_tokens=4)
    engine.fill()
    engine.execute()
    engine.consume(LoadLate(engine.worker.host.pending[0].transfer))
    for _ in range(20):  # its copy does not run
        engine.fill()
        engine.execute()
        engine.deliver()
    assert engine.answers["again"].tokens == expected_tokens(PROMPT, 4)
    assert engine.scheduler.statistics().tiers[0].num_late == 1
    engine.consume(LoadLate(10**6))
    engine.settle()
    engine.check_drained()


def test_answers_that_fit_no_transfer_are_counted() -> None:
    engine = driver()
    before = engine.scheduler.statistics().num_stray_messages
    engine.consume(BlocksMoved(77))
    engine.consume(BlocksMoved(0, failed=[5]))
    assert engine.scheduler.statistics().num_stray_messages == before + 2


def test_a_reset_reaches_host_memory() -> None:
    engine = driver()
    engine.add("first", PROMPT, max_tokens=4)
    engine.run()
    fill_with_others(engine)
    assert engine.scheduler.statistics().tiers[0].num_cached > 0
    assert engine.control("reset_prefix_cache").done
    assert engine.scheduler.statistics().tiers[0].num_cached == 0
    engine.add("again", PROMPT, max_tokens=4)
    engine.finish()
    assert engine.answers["again"].num_cached_tokens == 0


@pytest.mark.parametrize("ends", ["result", "epoch"])
def test_a_store_is_named_only_after_the_result_of_its_step(ends: str) -> None:
    """A worker's copy may be answered before the step that wrote the blocks, and that step may fail."""
    engine = driver(max_num_batched_tokens=16)
    engine.add("first", PROMPT, max_tokens=4)
    engine.run()
    engine.add("second", [100] * 60, max_tokens=4)
    while not len(engine.scheduler.transfers):
        engine.schedule() or engine.answer()
    assert len(engine.scheduler.in_flight)
    engine.consume(BlocksMoved(1))
    assert engine.scheduler.statistics().tiers[0].num_cached == 0
    if ends == "epoch":
        engine.begin_worker_epoch()
        assert not len(engine.scheduler.kv.holds), "what no result will follow is released"
        assert engine.scheduler.statistics().tiers[0].num_cached == 0
    else:
        engine.execute()
        engine.deliver()
        assert engine.scheduler.statistics().tiers[0].num_cached > 0
    engine.abort("second")
    engine.finish()
    engine.check_drained()
