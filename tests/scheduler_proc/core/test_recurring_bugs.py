"""Bugs that recurred in other engines, one scenario each, numbered as in ``tests/simulation/README.md``.

Issue numbers refer to vllm-project/vllm unless another repository is named. Three bugs concern features that do not
exist here and have no scenario: 15 (states of recurrent layers), 17 (remote loads of KV), 18 (encoder cache). Four
involve other components, and the page names their tests: 9 (logprobs), 10 (grammars with drafts), 13 (a
block of another group is read before it is written), 23 (per-row state of processors). 14, 16, 22 and 24 are tested as
far as their features exist: without sessions, transfers and cache tiers.
"""

from collections import Counter, deque
from typing import Any

import pytest
from kv_cases import full, layout_of, sliding
from log_replay import appended_blocks
from scheduler_driver import Driver, expected_tokens
from tiers import thinned

from quire.protocol.model.kv_layout import NULL_BLOCK_ID
from quire.protocol.wire.front_end_messages import EndReason
from quire.scheduler_proc.requests.reasons import WaitReason

OLD, YOUNG = [1, 2, 3, 4, 5, 6, 7], [11, 12, 13, 14, 15, 16, 17]


def short_of_blocks(**settings: Any) -> Driver:
    """Two requests that need 5 blocks each in the end, in a pool of 8."""
    driver = Driver(**{"num_blocks": 9, "async_scheduling": True, "enable_prefix_caching": False} | settings)
    driver.add("old", OLD, max_tokens=13)
    driver.add("young", YOUNG, max_tokens=13)
    return driver


def test_bug_01_resumed_with_all_its_tokens() -> None:
    """#26385: including the token that arrived after its preemption."""
    driver = short_of_blocks()
    driver.until_preemption()
    known = len(driver.answers["young"].tokens)
    sent = len(driver.diffs)
    driver.finish()
    (diff,) = [d for d in driver.diffs[sent:] if d.new_requests]
    assert diff.token_ids is not None
    tokens = diff.token_ids.tolist()
    assert tokens == (YOUNG + driver.answers["young"].tokens)[: len(tokens)] and len(tokens) == 7 + known + 1


@pytest.mark.parametrize("num_blocks", range(6, 14))
def test_bug_02_late_result_of_a_preempted_request(num_blocks: int) -> None:
    """#48245 (after #46066, #47900, #38624): its placeholder is subtracted once, and never below zero."""
    driver = short_of_blocks(num_blocks=num_blocks)
    while driver.scheduler.table.requests:
        driver.fill()
        for request in driver.scheduler.table.waiting:
            assert request.num_output_placeholders == request.num_in_flight >= 0
        driver.answer()
    driver.finish()
    assert driver.answers["young"].tokens == expected_tokens(YOUNG, 13)


@pytest.mark.parametrize(("num_blocks", "old", "young"), [(5, 2, 7), (6, 4, 5), (7, 6, 7)])
def test_bug_02_not_admitted_before_its_result(num_blocks: int, old: int, young: int) -> None:
    """It preempts itself beside a leaving request: there is room for its known tokens while its token is in flight."""
    driver = Driver(num_blocks=num_blocks, async_scheduling=True, enable_prefix_caching=False)
    driver.add("old", OLD, max_tokens=old)
    driver.add("young", list(range(11, 11 + young)), max_tokens=9)
    while driver.scheduler.table.requests:
        for _ in range(3):  # each event triggers another decision, in which no request may run
            driver.schedule()
        driver.answer()
    driver.finish()
    assert driver.scheduler.statistics().num_preemptions > 0
    assert driver.answers["young"].tokens == expected_tokens(list(range(11, 11 + young)), 9)


def test_bug_02_late_result_of_an_ended_request() -> None:
    """Its token must not go to the next request, which could have the same handle."""
    driver = Driver(async_scheduling=True)
    driver.add("aborted", OLD, max_tokens=60)
    driver.add("stays", YOUNG, max_tokens=40)
    driver.step(4)
    driver.fill()
    driver.abort("aborted")
    driver.add("next", [9], max_tokens=10)
    driver.finish()
    assert driver.answers["stays"].tokens == expected_tokens(YOUNG, 40)
    assert driver.answers["next"].tokens == expected_tokens([9], 10)


@pytest.mark.parametrize("budget", range(4, 40, 5))
def test_bug_03_chunked_prefills_side_by_side(budget: int) -> None:
    """#57562: a placeholder was missing without drafts or preemption. A chunk that does not sample has none."""
    driver = Driver(num_blocks=200, max_num_batched_tokens=max(budget, 8), async_scheduling=True)
    for index in range(8):
        driver.add(f"r{index}", list(range(index, index + 5 * index + 3)), max_tokens=4 + index)
        driver.schedule()
    while driver.scheduler.table.requests:
        for request in driver.scheduler.table.unsteady.values():
            assert 0 <= request.num_output_placeholders <= request.num_in_flight
            if request.num_tokens_to_compute > 1:
                assert request.num_output_placeholders == 0
        driver.step()
    driver.finish()
    assert driver.scheduler.statistics().num_preemptions == 0
    for index in range(8):
        prompt = list(range(index, index + 5 * index + 3))
        assert driver.answers[f"r{index}"].tokens == expected_tokens(prompt, 4 + index)


@pytest.mark.parametrize("quality", [0.0, 0.5, 1.0])
def test_bug_04_no_placeholder_reaches_the_model(quality: float) -> None:
    """#46899, #40768: a resumed request is sent with its known tokens only, without placeholders for drafts."""
    driver = short_of_blocks(num_speculative_tokens=3)
    driver.worker.draft_quality = quality
    driver.until_preemption()
    driver.finish()
    for diff in driver.diffs:
        if diff.token_ids is not None:
            assert diff.token_ids.min() >= 0
            assert len(diff.token_ids) == sum(n.num_tokens for n in diff.new_requests)
    assert driver.answers["young"].tokens == expected_tokens(YOUNG, 13)


@pytest.mark.parametrize("end", ["abort", "stop", "preempt"])
def test_bug_05_blocks_freed_while_a_step_is_in_flight(end: str) -> None:
    """vllm-ascend#14055: the next owner gets them in the diff that removes the previous owner, or later."""
    driver = short_of_blocks()
    driver.schedule()
    driver.schedule()
    young = driver.request("young").handle
    held = set(driver.scheduler.kv.block_ids(driver.request("young"))[0])
    if end == "preempt":
        diff = driver.until_preemption()
    else:
        driver.answer()
        (driver.abort("young") if end == "abort" else driver.stop("young", 1))
        driver.add("next", list(range(50, 70)), max_tokens=2)
        scheduled = driver.schedule()
        assert scheduled is not None
        diff = scheduled
        assert diff.block_ids is not None and held & set(diff.block_ids.tolist()), "a step that wrote them is in flight"
    assert young in diff.removed
    driver.finish()  # the worker executes all steps in order, and checks the content that it reads


@pytest.mark.parametrize("steady_decode", [True, False])
@pytest.mark.parametrize("young", [1, 2, 3])
@pytest.mark.parametrize("length", thinned(range(22, 30), keep=3))
def test_bug_06_scheduled_and_preempted_in_the_same_step(length: int, young: int, steady_decode: bool) -> None:
    """#23347: the diff contains nothing of a withdrawn row or block."""
    driver = Driver(
        num_blocks=9, steady_decode=steady_decode, long_prefill_token_threshold=7, enable_prefix_caching=False
    )
    prompt = list(range(50, 50 + young))
    driver.add("old", list(range(length)), max_tokens=3)
    driver.add("young", prompt, max_tokens=25 - young)
    driver.finish()
    for diff in driver.diffs:
        named = {h for h, _ in diff.counts} | {h for h, _, _ in appended_blocks(diff)} | set(diff.unparked)
        assert not named & (set(diff.removed) - {n.handle for n in diff.new_requests})
    assert driver.answers["young"].tokens == expected_tokens(prompt, 25 - young)


def test_bug_07_higher_priority_does_not_wait_for_a_row() -> None:
    """#41951, #51574: priority inversion at max_num_seqs."""
    driver = Driver(max_num_seqs=1, scheduling_policy="priority", async_scheduling=True)
    driver.add("worse", [1, 2], max_tokens=60, priority=1)
    driver.step(3)
    driver.add("better", [3, 4], max_tokens=3, priority=0)
    driver.step(8)
    assert driver.answers["better"].reason is EndReason.LENGTH and driver.answers["worse"].ended is None
    driver.finish()
    assert driver.answers["worse"].tokens == expected_tokens([1, 2], 60)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_bug_07_equals_do_not_preempt_each_other(policy: str) -> None:
    """#40004, #54530: requests do not preempt each other by turns, and none starves."""
    driver = Driver(num_blocks=9, max_num_seqs=4, scheduling_policy=policy, enable_prefix_caching=False)
    for index in range(4):
        driver.add(f"r{index}", [index] * 7, max_tokens=13)
    driver.finish()
    decisions = driver.scheduler.decisions.take()
    preempt = Counter(d.request_id for d in decisions if d.kind == "preempt")
    assert preempt["r0"] == 0 and max(preempt.values()) <= 3, preempt


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("reserve", [False, True])
def test_bug_08_long_prefill_is_not_preempted_repeatedly(policy: str, reserve: bool) -> None:
    """#25538: the two requests do not fit together. The long one waits until its whole prompt has room, and the other
    gets a token in every step meanwhile."""
    driver = Driver(
        num_blocks=13,
        max_num_batched_tokens=8,
        scheduling_policy=policy,
        reserve_full_sequence=reserve,
        enable_prefix_caching=False,
    )
    driver.add("old", list(range(8)), max_tokens=30)
    driver.add("long", list(range(50, 82)), max_tokens=4)
    preempt: list[int] = []
    while driver.scheduler.table.requests:
        running = driver.answers["old"].ended is None
        before = len(driver.answers["old"].tokens)
        driver.step()
        assert not running or len(driver.answers["old"].tokens) == before + 1
        decisions = [d for d in driver.scheduler.decisions.take() if d.kind == "preempt"]
        preempt += [d.step for d in decisions]
    driver.check_drained()
    assert len(preempt) <= 1


def test_bug_11_null_block_is_never_held() -> None:
    """#22209: a window group beside full attention has null entries, and hits with gaps."""
    layout = layout_of(full(4), sliding(8, 4))
    driver = Driver(num_blocks=40, layout=layout, async_scheduling=True)
    prompt = list(range(30))
    for index, length in enumerate((30, 24, 27, 30, 8)):
        driver.add(f"r{index}", [*prompt[:length], index], max_tokens=14)
        for _ in range(3):
            driver.step()
            null = driver.scheduler.kv.pool.blocks[NULL_BLOCK_ID]
            assert null.ref_cnt == 0 and null.block_hash is None
    driver.finish()
    assert driver.answers["r3"].num_cached_tokens > 0
    assert NULL_BLOCK_ID not in [b.block_id for b in driver.scheduler.kv.pool.free_block_queue.blocks()]


def test_bug_12_shared_window_blocks_are_freed_once() -> None:
    """#42571: requests share a window and pass beyond it in the same step."""
    driver = Driver(num_blocks=30, layout=layout_of(sliding(6, 4), full(4)))
    prompt = list(range(12))
    driver.add("first", prompt, max_tokens=1)
    driver.run()
    for name in ("a", "b", "c"):
        driver.add(name, [*prompt, ord(name)], max_tokens=20)
    driver.finish()  # ``check`` fails on a block that was freed twice
    assert [driver.answers[n].num_cached_tokens for n in "abc"] == [12, 12, 12]
    free = [b.block_id for b in driver.scheduler.kv.pool.free_block_queue.blocks()]
    assert len(set(free)) == len(free) == 29


def test_bug_14_no_hash_of_tokens_after_a_stop() -> None:
    """#49377, #49449, #53156: a request that continues a cut output differently gets no hits in the cut part."""
    driver = Driver(async_scheduling=True)
    prompt = list(range(6))
    driver.add("a", prompt, max_tokens=40)
    while len(driver.answers["a"].tokens) < 15:
        driver.step()
    driver.stop("a", 4)
    kept = [*prompt, *expected_tokens(prompt, 4)]
    driver.add("b", [*kept, 500, 501, 502, 503, 504, 505], max_tokens=8)
    driver.finish()
    assert driver.answers["b"].num_cached_tokens == 8
    assert driver.answers["b"].tokens == expected_tokens([*kept, 500, 501, 502, 503, 504, 505], 8)


@pytest.mark.parametrize("layout", [None, layout_of(full(4), sliding(6, 4))])
def test_bug_16_bad_row_frees_everything_and_the_next_runs(layout: Any) -> None:
    """#45474, #45138, #49250: its placeholders, blocks, hashes and row are freed; the next waiting request runs."""
    driver = Driver(num_blocks=12, layout=layout, max_num_seqs=1, async_scheduling=True)
    prompt = list(range(10))
    driver.worker.bad_from["bad"] = 3
    driver.add("bad", prompt, max_tokens=12)
    driver.add("next", prompt, max_tokens=5)
    driver.finish()
    assert driver.answers["bad"].reason is EndReason.ERROR
    assert driver.answers["bad"].tokens == expected_tokens(prompt, 3)
    assert driver.answers["next"].num_cached_tokens == 0, "no block that the bad row wrote is found"
    assert driver.answers["next"].tokens == expected_tokens(prompt, 5)


def test_bug_19_held_head_does_not_block_the_queue() -> None:
    """#45388, #45406, #45414, #53130, #53868: no request was running, and all waited for ever."""
    driver = Driver(max_num_seqs=1)
    for name in "abc":
        driver.add(name, [ord(name)], max_tokens=2)
    driver.hold("a", "remote_kv")
    driver.step(6)
    assert [driver.answers[n].ended is None for n in "abc"] == [True, False, False]
    driver.release("a")
    driver.finish()


@pytest.mark.parametrize(
    "settings",
    [
        {"reserve_full_sequence": True},
        {"watermark": 0.9},
        {"num_speculative_tokens": 3},
        {"num_speculative_tokens": 3, "reserve_full_sequence": True, "watermark": 0.5},
        {"max_prefill_share": 0.0},
        {"layout": layout_of(sliding(9, 1))},
        {"layout": layout_of(sliding(5, 4), full(4)), "watermark": 0.5},
    ],
)
def test_bug_19_every_accepted_request_can_run_alone(settings: dict[str, Any]) -> None:
    """An admission condition that no pool state fulfils would block the queue: the longest accepted request runs."""
    driver = Driver(num_blocks=10, block_size=1, **settings)
    longest = min(driver.scheduler.kv.max_tokens, 40)
    driver.add("long", list(range(longest - 1)), max_tokens=None if longest < 40 else 3)
    driver.add("next", [1], max_tokens=2)
    driver.finish()
    assert [driver.answers[n].reason for n in ("long", "next")] == [EndReason.LENGTH, EndReason.LENGTH]


def container_sizes(root: object) -> Counter[str]:
    """Return the size of each container reachable from ``root``, by the class and attribute that holds it."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    ahead: list[tuple[str, object]] = [("", root)]
    while ahead:
        where, thing = ahead.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, list | dict | set | deque):
            found[where] += len(thing)
        elif type(thing).__module__.startswith("quire.scheduler_proc"):
            slots = [s for c in type(thing).__mro__ for s in getattr(c, "__slots__", ())]
            names = [*getattr(thing, "__dict__", {}), *slots]
            ahead += [(f"{type(thing).__name__}.{n}", getattr(thing, n)) for n in names if hasattr(thing, n)]
    return found


def test_bug_20_no_container_grows_from_step_to_step() -> None:
    """#44490: the containers of an idle scheduler do not grow from the first hundreds of steps to thousands."""
    driver = Driver(num_blocks=12, async_scheduling=True, scheduling_policy="priority")
    sizes = []
    for turn in range(4):
        for index in range(25):
            name = f"t{turn}r{index}"
            driver.add(name, [turn, index, 1, 2, 3], max_tokens=5 + index % 9, priority=index % 3, client=index % 2)
            driver.step(index % 4)
            if index % 6 == 0:
                driver.hold(name, client=index % 2)
                driver.abort(name, client=index % 2)
            if index % 25 == 20:
                driver.begin_worker_epoch()
        driver.run()
        driver.scheduler.decisions.take()
        sizes.append(container_sizes(driver.scheduler))
    assert len(sizes[0]) > 15, "too few containers were found"
    grown = {name: (sizes[1][name], n) for name, n in sizes[-1].items() if n > sizes[1][name] + 20}
    assert not grown, grown


def test_bug_21_hits_are_counted_at_admission() -> None:
    """#18957: an attempt that failed for lack of blocks found hits, which were evicted before the admission."""
    driver = Driver(num_blocks=9)
    prompt = list(range(8))
    driver.add("first", prompt, max_tokens=1)
    driver.run()
    driver.add("big", list(range(100, 117)), max_tokens=13)
    driver.step()
    driver.add("second", [*prompt, 1, 2, 3, 4, 5, 6, 7, 8], max_tokens=2)
    driver.step()
    second = driver.request("second")
    assert second.wait_reason is WaitReason.KV_BLOCKS and second.num_cached_tokens == -1
    assert driver.scheduler.kv.get_computed_blocks(second)[1] == 8
    queries = driver.scheduler.statistics().prefix_cache_queries
    assert queries == 8 + 17, "a failed attempt is not counted"
    driver.finish()
    (new,) = [n for d in driver.diffs for n in d.new_requests if n.request_id == "second"]
    assert driver.answers["second"].num_cached_tokens == new.num_computed_tokens < 8


def test_bug_21_resumed_request_is_counted_once() -> None:
    """Hits of a resumed request in its own blocks are not counted."""
    driver = short_of_blocks(enable_prefix_caching=True)
    driver.finish()
    statistics = driver.scheduler.statistics()
    assert statistics.num_preemptions > 0
    assert (statistics.prefix_cache_queries, statistics.prefix_cache_hit_tokens) == (14, 0)


def test_bug_22_released_but_no_blocks() -> None:
    """#18631: a released request without enough blocks waits in its place and holds no blocks."""
    driver = Driver(num_blocks=9)
    driver.add("big", list(range(100, 125)), max_tokens=6)
    driver.add("remote", list(range(12)), max_tokens=3)
    driver.add("later", [1], max_tokens=2)
    driver.hold("remote", "remote_kv")
    driver.step()
    free = driver.scheduler.kv.pool.num_free_blocks
    driver.release("remote")
    driver.step()
    assert driver.request("remote").wait_reason is WaitReason.KV_BLOCKS
    assert driver.scheduler.kv.pool.num_free_blocks >= free - 1
    driver.finish()
    assert driver.answers["remote"].tokens == expected_tokens(list(range(12)), 3)


def test_bug_24_failed_admission_holds_nothing() -> None:
    """sglang#35270, #16067, #27586: hits were found but the rest did not fit: reference counts and free queue stay."""
    driver = Driver(num_blocks=9)
    prompt = list(range(8))
    driver.add("first", prompt, max_tokens=1)
    driver.run()
    driver.add("big", list(range(100, 117)), max_tokens=3)
    driver.step()
    pool = driver.scheduler.kv.pool
    driver.add("second", [*prompt, *range(200, 212)], max_tokens=2)
    before = [(b.block_id, b.ref_cnt) for b in pool.blocks], [b.block_id for b in pool.free_block_queue.blocks()]
    driver.schedule()
    assert driver.request("second").wait_reason is WaitReason.KV_BLOCKS
    assert before == (
        [(b.block_id, b.ref_cnt) for b in pool.blocks],
        [b.block_id for b in pool.free_block_queue.blocks()],
    )
    driver.answer()
    driver.finish()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_bug_25_resumed_request_has_only_its_new_blocks(asynchronous: bool) -> None:
    """rbln#676: block ids from before the preemption are not sent after it."""
    driver = short_of_blocks(async_scheduling=asynchronous)
    driver.until_preemption()
    while "young" not in [r.request_id for r in driver.scheduler.table.running.values()]:
        driver.step()
    diff = next(d for d in reversed(driver.diffs) if d.new_requests)
    assert diff.block_ids is not None
    request = driver.request("young")
    held = driver.scheduler.kv.block_ids(request)[0].tolist()
    assert held[: len(diff.block_ids)] == diff.block_ids.tolist()
    sent = [block for handle, _, block in appended_blocks(diff) if handle == request.handle]
    assert sent == []
    driver.finish()
