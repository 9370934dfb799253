"""Preemption under fcfs: the last admitted request is preempted, resumes first, and its output does not change."""

from scheduler_driver import Driver, end_of, expected_tokens

from quire.protocol.wire.front_end_messages import EndReason


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
