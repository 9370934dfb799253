"""Preemption under fcfs: the victim, its return to the queue, and its output, which does not change."""

from typing import Any

import pytest
from scheduler_driver import Driver, end_of, expected_tokens

from quire.protocol.wire.front_end_messages import EndReason
from quire.replay.core.policies import Policies


def two_that_do_not_fit(**settings: object) -> Driver:
    """8 blocks of 4: each request needs 5 blocks in the end, so the younger is preempted."""
    driver = Driver(**{"num_blocks": 9, "enable_prefix_caching": False} | settings)
    driver.add("old", [1, 2, 3, 4, 5, 6, 7], max_tokens=13)
    driver.add("young", [11, 12, 13, 14, 15, 16, 17], max_tokens=13)
    return driver


def test_last_admitted_request_is_preempted_first() -> None:
    driver = Driver(num_blocks=10, enable_prefix_caching=False)
    for index, name in enumerate(("a", "b", "c")):
        driver.add(name, [index] * 8, max_tokens=12)
    driver.until_preemption()
    assert [r.request_id for r in driver.scheduler.table.running.values()] == ["a", "b"]
    assert [r.request_id for r in driver.scheduler.table.waiting] == ["c"]
    driver.run()
    for index, name in enumerate(("a", "b", "c")):
        assert driver.answers[name].tokens == expected_tokens([index] * 8, 12)


def test_preempted_request_is_first_in_the_queue() -> None:
    driver = two_that_do_not_fit(max_num_seqs=2)
    driver.add("waits", [9], max_tokens=1)
    driver.until_preemption()
    assert [r.request_id for r in driver.scheduler.table.waiting] == ["young", "waits"]


def test_resumed_request_finds_its_cached_blocks() -> None:
    driver = Driver(num_blocks=9)
    driver.add("old", [1, 2, 3, 4, 5, 6, 7], max_tokens=13)
    driver.add("young", [11, 12, 13, 14, 15, 16, 17, 18, 19], max_tokens=10)
    driver.until_preemption()
    sent = len(driver.diffs)
    driver.run()
    (resumed,) = [n for d in driver.diffs[sent:] for n in d.new_requests]
    assert 0 < resumed.num_computed_tokens < resumed.num_tokens
    assert driver.answers["young"].num_cached_tokens == 0, "its own blocks are not reported as hits"


def test_not_resumed_while_a_result_is_in_flight() -> None:
    """#48245: the late token belongs to the request, so the tokens to recompute are known only after it."""
    driver = two_that_do_not_fit(async_scheduling=True)
    driver.until_preemption()
    young = driver.request("young")
    assert young.num_in_flight == 1 and not young.on_worker
    driver.abort("old")
    assert driver.scheduler.kv.pool.num_free_blocks == 8
    before = young.num_tokens
    while young.num_in_flight:
        diff = driver.schedule()
        assert diff is None or not diff.new_requests
        driver.answer()
    assert young.num_tokens == before + 1, "the token in flight was kept"
    diff = driver.schedule()
    assert diff is not None and diff.new_requests[0].num_tokens == before + 1
    driver.run()
    assert driver.answers["young"].tokens == expected_tokens([11, 12, 13, 14, 15, 16, 17], 13)


def test_token_in_flight_can_end_a_preempted_request() -> None:
    driver = two_that_do_not_fit(async_scheduling=True)
    driver.until_preemption()
    young = driver.request("young")
    driver.worker.forced["young", young.num_output_tokens] = 777
    young.stop_tokens = frozenset([777])
    driver.scheduler.table.stops.add([777])
    driver.run()
    reason, tokens = end_of(driver, "young")
    assert reason is EndReason.STOPPED and tokens[-1] == 777
    driver.check_drained()


def test_no_admission_in_a_step_that_preempts() -> None:
    driver = two_that_do_not_fit(long_prefill_token_threshold=4)
    diff = driver.until_preemption()
    # Its first chunk would fit into the blocks that it just freed: it would be admitted and preempted for ever.
    assert not diff.new_requests and len(diff.removed) == 1
    assert driver.scheduler.kv.pool.num_free_blocks >= 2


def test_oldest_request_always_makes_progress() -> None:
    """No livelock (#25538, #41951): the oldest running request is never preempted for younger ones."""
    driver = Driver(num_blocks=6, enable_prefix_caching=False, async_scheduling=True)
    for index in range(6):
        driver.add(f"r{index}", [index] * 6, max_tokens=12)
    steps = 0
    while driver.scheduler.table.requests:
        before = sum(len(a.tokens) for a in driver.answers.values())
        driver.step(6)
        steps += 6
        assert sum(len(a.tokens) for a in driver.answers.values()) > before, "six steps without a token"
    assert steps < 400
    driver.check_drained()


def test_preemptions_are_counted_per_request_and_in_total() -> None:
    driver = two_that_do_not_fit()
    driver.until_preemption()
    assert driver.request("young").num_preemptions == 1
    assert driver.control("statistics").num_preemptions == 1


# ---- the victim's loss


def preempted(driver: Driver) -> tuple[str, str, int]:
    """Return (request id, reason, computed positions) of the first preemption."""
    driver.until_preemption()
    (first, *_) = [d for d in driver.scheduler.decisions.take() if d.kind == "preempt"]
    return first.request_id, first.reason, first.num_tokens


def three(*lengths: int, **settings: Any) -> Driver:
    """Requests a, b and c that fill the pool and then need more blocks; ``lengths`` of their prompts."""
    num_blocks = 1 + sum(-(-length // 4) for length in lengths)
    driver = Driver(**{"num_blocks": num_blocks, "watermark": 0.0} | settings)
    for name, length in zip("abc", lengths, strict=True):
        driver.add(name, [ord(name)] * length, max_tokens=20)
    return driver


def test_the_victim_has_the_fewest_tokens_to_compute_again() -> None:
    assert preempted(three(8, 5, 12)) == ("b", "least_loss", 5)


def test_the_oldest_request_is_spared() -> None:
    assert preempted(three(3, 11, 7))[0] == "c"


def test_the_last_admitted_of_equal_losses_is_preempted() -> None:
    assert preempted(three(7, 7, 7))[0] == "c"


@pytest.mark.parametrize(("shared", "victim"), [(True, "c"), (False, "b")])
def test_tokens_that_another_request_holds_are_not_lost(shared: bool, victim: str) -> None:
    """c reads 12 tokens that a has written: it loses fewer of its own than b, although it is longer."""
    driver = Driver(num_blocks=9 if shared else 12, watermark=0.0)
    driver.add("a", range(13), max_tokens=30)
    driver.step()
    driver.add("b", [50] * 7, max_tokens=30)
    driver.add("c", [*range(12), 98, 99] if shared else [99, *range(1, 12), 98, 99], max_tokens=30)
    assert preempted(driver)[0] == victim


def test_a_request_that_frees_no_block_is_the_last_choice() -> None:
    """b holds only blocks that c has too."""
    driver = Driver(num_blocks=12, watermark=0.0)
    driver.add("b", range(8), max_tokens=30)
    driver.add("c", range(20), max_tokens=30)
    driver.schedule()
    preemption, (b, c) = driver.scheduler.planner.preemption, driver.scheduler.table.running.values()
    assert driver.scheduler.kv.num_shared_tokens(b) == 8
    assert preemption.choose([b, c]) is c and preemption.choose([b]) is b
    driver.finish()


def test_the_last_admitted_one_in_replays_of_other_engines() -> None:
    victim, reason, _ = preempted(three(9, 7, 15, policies=Policies(least_loss=False)))
    assert (victim, reason) == ("c", "youngest")


@pytest.mark.parametrize("lengths", [(3, 11, 15, 7, 3), (3, 3, 15, 7, 11)])
def test_the_least_loss_is_chosen_among_the_lowest_priority(lengths: tuple[int, ...]) -> None:
    """But not the oldest one of this priority."""
    driver = Driver(
        num_blocks=1 + sum(-(-length // 4) for length in lengths), watermark=0.0, scheduling_policy="priority"
    )
    for name, length, priority in zip("abcde", lengths, (0, 1, 1, 1, 0), strict=True):
        driver.add(name, [ord(name)] * length, max_tokens=20, priority=priority)
    assert preempted(driver)[:2] == ("d", "lowest_priority")


def test_the_least_loss_is_chosen_in_the_tenant_with_the_most_blocks() -> None:
    driver = Driver(num_blocks=13, watermark=0.0)
    for name, length, tenant in (("a", 3, 1), ("b", 15, 1), ("c", 7, 1), ("d", 19, 1), ("e", 3, 2), ("f", 3, 2)):
        driver.add(name, [ord(name)] * length, max_tokens=20, tenant=tenant)
    assert preempted(driver)[:2] == ("c", "over_share"), "not a, which is the tenant's oldest, and not e or f"


def test_every_request_ends_beside_a_stream_of_longer_ones() -> None:
    """A short request is often the victim, but longer ones that arrive later do not delay it for ever."""
    driver = Driver(num_blocks=13, enable_prefix_caching=False, watermark=0.0)
    driver.add("first", [1] * 15, max_tokens=30)
    driver.add("short", [2] * 3, max_tokens=30)
    steps, later = 0, 0
    while driver.answers["short"].ended is None:
        if driver.scheduler.table.num_waiting < 2:
            driver.add(f"later{later}", [3] * 11, max_tokens=8)
            later += 1
        driver.step()
        steps += 1
        assert steps < 200
    assert later > 1
    driver.finish()
