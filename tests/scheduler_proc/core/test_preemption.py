"""A pool too small for all: the last admitted gives way, comes back at the front, and its client sees nothing of it."""

from log_replay import appended_blocks
from scheduler_driver import Driver, end_of, expected_tokens

from quire.protocol.wire.front_end_messages import EndReason
from quire.protocol.wire.worker_messages import SchedulerOutput


def two_that_do_not_fit(**settings: object) -> Driver:
    """8 blocks of 4: each request ends with 5, so the younger is preempted on the way."""
    driver = Driver(**{"num_blocks": 9, "enable_prefix_caching": False} | settings)
    driver.add("old", [1, 2, 3, 4, 5, 6, 7], max_tokens=13)
    driver.add("young", [11, 12, 13, 14, 15, 16, 17], max_tokens=13)
    return driver


def until_preemption(driver: Driver) -> SchedulerOutput:
    """Run up to the step whose diff takes a request away; returns that diff. Nothing of it was executed."""
    for _ in range(300):
        diff = driver.schedule()
        if driver.scheduler.statistics().num_preemptions:
            assert diff is not None
            return diff
        if diff is None:
            driver.execute()
            driver.deliver()
    raise AssertionError("nobody was preempted")


def test_the_last_admitted_is_preempted_first() -> None:
    driver = Driver(num_blocks=10, enable_prefix_caching=False)
    for index, name in enumerate(("a", "b", "c")):
        driver.add(name, [index] * 8, max_tokens=12)
    until_preemption(driver)
    assert [r.request_id for r in driver.scheduler.table.running.values()] == ["a", "b"]
    assert [r.request_id for r in driver.scheduler.table.waiting] == ["c"]
    driver.run()
    for index, name in enumerate(("a", "b", "c")):
        assert driver.answers[name].tokens == expected_tokens([index] * 8, 12)


def test_a_preempted_request_comes_before_all_who_wait() -> None:
    driver = two_that_do_not_fit(max_num_seqs=2)
    driver.add("waits", [9], max_tokens=1)
    until_preemption(driver)
    assert [r.request_id for r in driver.scheduler.table.waiting] == ["young", "waits"]


def test_it_is_resumed_with_all_its_tokens() -> None:
    """#26385: prompt and everything that was sampled, also what arrived after it was preempted."""
    driver = two_that_do_not_fit(async_scheduling=True)
    until_preemption(driver)
    sent = len(driver.diffs)
    driver.run()
    (new,) = [(d, n) for d in driver.diffs[sent:] for n in d.new_requests]
    diff, data = new
    assert (data.request_id, data.num_prompt_tokens, data.num_computed_tokens) == ("young", 7, 0)
    known = diff.token_ids.tolist() if diff.token_ids is not None else []
    whole = [11, 12, 13, 14, 15, 16, 17, *driver.answers["young"].tokens]
    assert len(known) == data.num_tokens > 7 and known == whole[: len(known)]
    assert driver.answers["young"].tokens == expected_tokens(whole[:7], 13)


def test_its_cached_blocks_are_found_again() -> None:
    driver = Driver(num_blocks=9)
    driver.add("old", [1, 2, 3, 4, 5, 6, 7], max_tokens=13)
    driver.add("young", [11, 12, 13, 14, 15, 16, 17, 18, 19], max_tokens=10)
    until_preemption(driver)
    sent = len(driver.diffs)
    driver.run()
    (resumed,) = [n for d in driver.diffs[sent:] for n in d.new_requests]
    assert 0 < resumed.num_computed_tokens < resumed.num_tokens
    assert driver.answers["young"].num_cached_tokens == 0, "its own blocks are no hit that its client would hear of"


def test_it_is_not_resumed_while_a_result_of_it_is_in_flight() -> None:
    """#48245: the late token belongs to the request; only then it is known what to compute again."""
    driver = two_that_do_not_fit(async_scheduling=True)
    until_preemption(driver)
    young = driver.request("young")
    assert young.num_in_flight == 1 and not young.on_worker
    driver.abort("old")
    assert driver.scheduler.kv.pool.num_free_blocks == 8
    before = young.num_tokens
    while young.num_in_flight:
        diff = driver.schedule()
        assert diff is None or not diff.new_requests
        driver.execute()
        driver.deliver()
    assert young.num_tokens == before + 1, "the token in flight was kept"
    diff = driver.schedule()
    assert diff is not None and diff.new_requests[0].num_tokens == before + 1
    driver.run()
    assert driver.answers["young"].tokens == expected_tokens([11, 12, 13, 14, 15, 16, 17], 13)


def test_a_token_in_flight_may_end_a_preempted_request() -> None:
    driver = two_that_do_not_fit(async_scheduling=True)
    until_preemption(driver)
    young = driver.request("young")
    driver.worker.forced["young", young.num_output_tokens] = 777
    young.stop_tokens = frozenset([777])
    driver.scheduler.table.stops.add([777])
    driver.run()
    reason, tokens = end_of(driver, "young")
    assert reason is EndReason.STOPPED and tokens[-1] == 777
    driver.check_drained()


def test_a_share_of_this_very_step_is_taken_back() -> None:
    """#23347: "young" decodes and has got its share, then "old" needs its blocks."""
    driver = Driver(num_blocks=6, long_prefill_token_threshold=7, enable_prefix_caching=False)
    driver.add("old", list(range(19)), max_tokens=1)
    driver.add("young", [50], max_tokens=8)
    diff = until_preemption(driver)
    assert driver.counts(diff) == {"old": 5} and diff.removed == [1]
    assert driver.request("young").num_in_flight == 0, "it does not run in this step"
    driver.run()
    driver.check_drained()
    assert driver.answers["old"].tokens == expected_tokens(list(range(19)), 1)
    assert driver.answers["young"].tokens == expected_tokens([50], 8)


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    driver = two_that_do_not_fit(long_prefill_token_threshold=4)
    diff = until_preemption(driver)
    # Its first chunk would fit into what its own blocks left free: it would come and go for ever.
    assert not diff.new_requests and len(diff.removed) == 1
    assert driver.scheduler.kv.pool.num_free_blocks >= 2


def test_the_oldest_gets_on_in_every_step_whatever_the_pool() -> None:
    """No livelock (#25538, #41951): the head of the running never gives way to younger ones."""
    driver = Driver(num_blocks=6, enable_prefix_caching=False, async_scheduling=True)
    for index in range(6):
        driver.add(f"r{index}", [index] * 6, max_tokens=12)
    steps = 0
    while driver.scheduler.table.requests:
        before = sum(len(a.tokens) for a in driver.answers.values())
        for _ in range(6):
            driver.step()
        steps += 6
        assert sum(len(a.tokens) for a in driver.answers.values()) > before, "six steps without a token"
    assert steps < 400
    driver.check_drained()


def test_blocks_of_the_preempted_are_not_given_away_before_its_removal() -> None:
    driver = two_that_do_not_fit(async_scheduling=True)
    young = driver.request("young").handle
    driver.schedule()
    held = set(driver.scheduler.kv.block_ids(driver.request("young"))[0])
    diff = until_preemption(driver)
    assert young in diff.removed
    earlier = {block for d in driver.diffs[:-1] for h, _, block in appended_blocks(d) if h != young}
    assert not held & earlier


def test_one_request_alone_never_preempts_itself_for_ever() -> None:
    driver = Driver(num_blocks=4, async_scheduling=True)
    driver.add("a", [1, 2, 3], max_tokens=50)
    driver.run()
    reason, tokens = end_of(driver, "a")
    assert reason is EndReason.LENGTH and tokens == expected_tokens([1, 2, 3], 10)


def test_preemptions_are_counted_for_request_and_engine() -> None:
    driver = two_that_do_not_fit()
    until_preemption(driver)
    assert driver.request("young").num_preemptions == 1
    assert driver.control("statistics").num_preemptions == 1
