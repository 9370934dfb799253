"""Requests that fail alone: in the worker, or because their grammar does not compile."""

import pytest
from log_replay import replay
from scheduler_driver import Driver, end_of, expected_tokens

from quire.protocol.wire.front_end_messages import EndReason

PROMPT = list(range(3, 20))
BOTH = pytest.mark.parametrize("asynchronous", [False, True])


def finish(driver: Driver) -> None:
    driver.finish()
    assert replay(driver.header, driver.log, check=True) is None
    assert driver.replay_lines() is None


@BOTH
@pytest.mark.parametrize("drafts", [0, 3])
def test_failed_request_ends_alone_with_its_detail(asynchronous: bool, drafts: int) -> None:
    driver = Driver(async_scheduling=asynchronous, num_speculative_tokens=drafts)
    driver.worker.failed_at["a"] = 3
    driver.add("a", PROMPT, max_tokens=12)
    driver.add("b", [9, *PROMPT], max_tokens=12)
    finish(driver)
    reason, tokens = end_of(driver, "a")
    assert reason is EndReason.ERROR and tokens == expected_tokens(PROMPT, len(tokens)) and len(tokens) <= 3
    ended = driver.answers["a"].ended
    assert ended is not None and ended.detail == "request_failed: no token is allowed"
    assert end_of(driver, "b") == (EndReason.LENGTH, expected_tokens([9, *PROMPT], 12))


def test_blocks_of_a_failed_request_stay_cached() -> None:
    """Unlike those of a bad row: readers are not preempted, and later requests get hits."""
    driver = Driver()
    driver.add("a", PROMPT, max_tokens=12)
    driver.worker.failed_at["a"] = 5
    driver.step(3)
    driver.add("reader", PROMPT, max_tokens=12)
    driver.run()
    driver.add("later", PROMPT, max_tokens=2)
    finish(driver)
    assert driver.answers["a"].reason is EndReason.ERROR
    assert driver.scheduler.statistics().num_preemptions == 0
    assert driver.answers["reader"].num_cached_tokens == driver.answers["later"].num_cached_tokens == 16
    assert end_of(driver, "reader") == (EndReason.LENGTH, expected_tokens(PROMPT, 12))


def test_preempted_request_can_fail() -> None:
    driver = Driver(num_blocks=7, async_scheduling=True, enable_prefix_caching=False)
    driver.add("old", [3, 1, 4, 1, 5], max_tokens=15)
    driver.add("a", [7] * 5, max_tokens=15)
    for _ in range(60):
        if not driver.request("a").num_preemptions and driver.schedule() is None:
            driver.answer()
    request = driver.request("a")
    assert request.num_in_flight and request.num_preemptions
    driver.worker.failed_at["a"] = request.num_output_tokens
    finish(driver)
    assert driver.answers["a"].reason is EndReason.ERROR
    assert driver.answers["old"].tokens == expected_tokens([3, 1, 4, 1, 5], 15)


def test_failure_takes_precedence_over_a_stop_token() -> None:
    """The token of a failed row is not valid, so it cannot stop the request."""
    want = expected_tokens(PROMPT, 3)
    driver = Driver(async_scheduling=True)
    driver.worker.failed_at["a"] = 2
    driver.add("a", PROMPT, max_tokens=12, stop_token_ids=[want[2]])
    finish(driver)
    assert end_of(driver, "a") == (EndReason.ERROR, want[:2])


def test_refused_grammar_rejects_the_request() -> None:
    driver = Driver()
    driver.add("a", PROMPT, max_tokens=3)
    driver.hold("a")
    driver.refuse("a")
    rejected = driver.answers["a"].rejected
    assert rejected is not None and (rejected.code, rejected.param) == ("invalid_grammar", "structured_outputs")
    statistics = driver.scheduler.statistics()
    assert (statistics.num_requests_refused, statistics.prompt_tokens) == (1, 0)
    driver.refuse("a")
    assert driver.scheduler.statistics().num_stray_messages == 1
    finish(driver)


def test_only_held_requests_can_be_refused() -> None:
    driver = Driver()
    driver.add("a", PROMPT, max_tokens=3)
    driver.refuse("a")
    assert driver.scheduler.statistics().num_stray_messages == 1
    finish(driver)
    assert driver.answers["a"].reason is EndReason.LENGTH


def test_refused_request_that_ran_before_ends_with_an_error() -> None:
    """Its client may have received tokens, so it cannot be rejected."""
    driver = Driver(num_blocks=7, enable_prefix_caching=False)
    driver.add("old", [3, 1, 4, 1, 5], max_tokens=15)
    driver.add("a", [7] * 5, max_tokens=15)
    while not driver.request("a").num_preemptions:
        driver.step()
    driver.hold("a")
    driver.refuse("a")
    ended = driver.answers["a"].ended
    assert ended is not None and ended.detail == "invalid_grammar: it does not compile"
    finish(driver)


@BOTH
def test_internal_fail_event(asynchronous: bool) -> None:
    driver = Driver(async_scheduling=asynchronous)
    driver.add("a", PROMPT, max_tokens=12)
    driver.step(4)
    received = list(driver.answers["a"].tokens)
    driver.fail("a")
    driver.fail("a")
    assert end_of(driver, "a") == (EndReason.ERROR, received) and received
    ended = driver.answers["a"].ended
    assert ended is not None and ended.detail == "grammar_failed: no memory"
    finish(driver)
