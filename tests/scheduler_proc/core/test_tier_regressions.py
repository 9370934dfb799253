"""Faults that tiers of other engines have had, one test each, named with the reports. The table in
tests/simulation/README.md has all of them, and where the others are tested."""

import random
from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_driver import Driver, expected_tokens
from tiers import thinned

from quire.protocol.wire.front_end_messages import EndReason
from quire.scheduler_proc.kv.tiers import host_tier
from quire.scheduler_proc.requests.reasons import WaitReason

PROMPT = list(range(1, 41))


def evicted_prefix(num_blocks: int = 25, num_host_pages: int = 65, **settings: object) -> Driver:
    """Return an idle engine whose host memory has PROMPT, and whose device does not."""
    engine = Driver(num_blocks, num_host_pages=num_host_pages, **settings)
    engine.add("first", PROMPT, max_tokens=4)
    engine.run()
    evict(engine)
    return engine


def evict(engine: Driver) -> None:
    for number in range(8):
        engine.add(f"other {number}", [100 + number] * 30, max_tokens=4)
        engine.run()


def load(engine: Driver) -> None:
    """Add PROMPT, and let the worker receive its load."""
    engine.add("again", PROMPT, max_tokens=4)
    engine.fill()
    assert engine.request("again").wait_reason is WaitReason.LOADING
    engine.execute()
    assert engine.worker.host.pending


def finish(engine: Driver) -> None:
    engine.finish()
    engine.settle()
    engine.check_drained()
    for request_id in engine.answers.keys() & {"first", "again"}:
        answer = engine.answers[request_id]
        assert answer.tokens == expected_tokens(PROMPT, 4) or answer.reason is EndReason.ABORTED
    assert engine.replay_lines() is None


@pytest.mark.parametrize(("copies", "is_async"), thinned(product(["at once", "last"], [True, False]), keep=2))
def test_stores_read_what_their_steps_have_written(copies: str, is_async: bool) -> None:
    """vLLM #45704, #46278, #31210, Dynamo #5068: a store ran ahead of the step that wrote its blocks, or after the next
    one that did."""
    engine = Driver(25, num_host_pages=200, async_scheduling=is_async, max_num_batched_tokens=16)
    for number in range(12):
        engine.add(f"{number}", [number + 1] * 38, max_tokens=6)
    while not engine.scheduler.is_idle:
        engine.fill()
        ran = engine.execute()
        while (copies == "at once" or not ran) and engine.move():
            pass
        if not ran or engine.worker.host.pending:
            engine.deliver()
    for number in range(12):
        engine.add(f"again {number}", [number + 1] * 38, max_tokens=6)
        engine.run()
        assert engine.answers[f"again {number}"].tokens == expected_tokens([number + 1] * 38, 6)
    assert engine.scheduler.statistics().tiers[0].num_loaded > 0
    assert engine.worker.host.num_detected == 0


def test_no_step_has_a_block_before_its_load_is_answered() -> None:
    """SGLang #22811: a layer read its keys and values before their load had ended."""
    engine = evicted_prefix(40)
    load(engine)
    targets = set(engine.worker.host.pending[0].block_ids.tolist())
    engine.add("beside", [300] * 20, max_tokens=12)
    before = len(engine.diffs)
    while not engine.answers["beside"].ended:
        engine.fill()
        engine.execute()
        engine.deliver()
    used: set[int] = set()
    for diff in engine.diffs[before:]:
        for ids in (diff.block_ids, diff.appended_block_ids):
            used.update([] if ids is None else ids.tolist())
    assert used and not used & targets
    finish(engine)


def test_a_page_has_one_copy_at_a_time() -> None:
    """TensorRT-LLM #15546, #16088: a staging buffer was used again while its copy was still running."""
    engine = Driver(25, num_host_pages=6, async_scheduling=True)
    for number in range(10):
        engine.add(f"{number}", [number + 1] * 30, max_tokens=4)
    for _ in range(200):  # no copy runs; the worker asserts that no pending copies share a page
        engine.fill()
        engine.execute()
        engine.deliver()
    assert engine.worker.host.pending
    finish(engine)


def test_requests_of_another_salt_load_nothing() -> None:
    """TensorRT-LLM #8813: answers had tokens of other prompts."""
    engine = evicted_prefix()
    engine.add("salted", PROMPT, max_tokens=4, cache_salt="another user")
    engine.run()
    assert engine.answers["salted"].num_cached_tokens == 0
    assert engine.scheduler.statistics().tiers[0].num_loaded == 0
    finish(engine)


def test_a_failed_load_is_not_a_hit() -> None:
    """Dynamo #15079, SGLang #27504, #30321, #38031: a failed copy was counted as loaded, and its blocks were read."""
    engine = evicted_prefix()
    engine.worker.host.pages.clear()
    engine.add("again", PROMPT, max_tokens=4)
    engine.run()
    state = engine.scheduler.statistics().tiers[0]
    assert state.num_loaded == 0 and state.num_failed >= 5
    assert engine.answers["again"].num_cached_tokens < 36 - 4 * 5
    finish(engine)


def test_a_hit_may_be_evicted_before_it_is_used() -> None:
    """vLLM #39702: "Expected N hit tokens, got 0" ended the engine."""
    engine = evicted_prefix(14)
    engine.add("long", [200] * 10, max_tokens=40)
    engine.step(2)
    engine.add("again", PROMPT, max_tokens=4)
    for _ in range(60):
        engine.fill()
        engine.answer()
    assert engine.scheduler.kv.holds.num_kept <= 1
    finish(engine)


@pytest.mark.parametrize(
    ("event", "when"),
    thinned(
        product(["abort", "preempt", "add again", "epoch", "death"], ["sent", "received", "run", "answered"]), keep=7
    ),
)
def test_events_during_a_copy(event: str, when: str) -> None:
    """vLLM #46014, #49118, #52170, #54914: an assertion about a copy of a request that had moved on."""
    engine = evicted_prefix(30, async_scheduling=True)
    engine.add("running", [250] * 20, max_tokens=30)
    engine.step(3)
    engine.add("again", PROMPT, max_tokens=4)
    engine.fill()
    if when != "sent":
        engine.execute()
    if when in ("run", "answered"):
        while engine.move():
            pass
    if when == "answered":
        engine.deliver()
    match event:
        case "abort":
            engine.abort("again")
        case "preempt":  # it needs more blocks than are free while the load holds some
            engine.add("large", [260] * 60, max_tokens=40)
        case "add again":
            engine.abort("again")
            engine.add("twice", PROMPT, max_tokens=4)
        case "epoch":
            engine.begin_worker_epoch()
        case "death":
            engine.restart_worker()
    finish(engine)


def test_requests_that_keep_all_blocks_do_not_wait_for_each_other() -> None:
    """vLLM #45387, #45388: nothing ran and everything waited, because loads had taken all blocks."""
    engine = Driver(25, num_host_pages=200)
    prompts = [[10 * number + 1] * 36 for number in range(6)]
    for number, prompt in enumerate(prompts):
        engine.add(f"first {number}", prompt, max_tokens=2)
        engine.run()
    for number, prompt in enumerate(prompts):
        engine.add(f"again {number}", [*prompt, 5], max_tokens=30)
    finish(engine)
    assert engine.scheduler.statistics().tiers[0].num_loaded > 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=80))
def test_books_hold_when_pages_are_evicted_meanwhile(actions: list[tuple[int, int]]) -> None:
    """TensorRT-LLM #12834: evicting while allocating made the count of free pages wrong."""
    tier, keys = host_tier(6, None), [bytes([number]) * 16 for number in range(8)]
    taken = []

    def take(number: int) -> None:
        taken.extend(tier.take([0] * (number % 4)))

    def publish(number: int) -> None:
        if taken and tier.pages.get_cached_block(keys[number % 8]) is None:
            tier.publish([taken.pop()], [keys[number % 8]])

    def release(number: int) -> None:
        tier.release([taken.pop() for _ in range(min(number % 3, len(taken)))])

    def use(number: int) -> None:
        found = [tier.pages.get_cached_block(key) for key in keys[: number % 8]]
        tier.use([page for page in found if page is not None])

    doing: list[Callable[[int], object]] = [take, publish, release, use]
    doing += [lambda n: tier.pages.invalidate(keys[n % 8]), lambda n: n or tier.pages.drop_contents()]
    for action, number in actions:
        doing[action](number)
        tier.pages.check([taken])
        assert tier.pages.num_free_blocks == 5 - len(taken)


def test_a_page_of_another_group_or_prefix_is_not_accepted() -> None:
    """LMCache #2136, #2511, #1139, #3301, openvino.genai #3722: keys that did not name all that they should."""
    engine = evicted_prefix()
    pages = engine.worker.host.pages
    shuffled = list(pages.values())
    random.Random(3).shuffle(shuffled)
    for number, page in zip(list(pages), shuffled, strict=True):
        pages[number] = page
    engine.add("again", PROMPT, max_tokens=4)
    finish(engine)
    assert engine.worker.host.num_detected > 5


def test_a_preempted_request_does_not_flush_the_cache() -> None:
    """vLLM #43447: its blocks without content were reused last, and took the place of cached ones."""
    engine = Driver(25, num_host_pages=65)
    engine.add("first", PROMPT, max_tokens=4)
    engine.run()
    engine.add("unfinished", [150] * 3, max_tokens=30)
    engine.step(2)
    cached = engine.scheduler.statistics().num_cached_blocks
    engine.abort("unfinished")
    engine.run()
    for number in range(20):
        engine.add(f"{number}", [number + 200] * 3, max_tokens=1)
        engine.run()
    assert engine.scheduler.statistics().num_cached_blocks >= cached
    engine.add("again", PROMPT, max_tokens=4)
    finish(engine)
    assert engine.answers["again"].num_cached_tokens == 36
