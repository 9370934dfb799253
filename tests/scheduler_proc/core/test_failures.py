"""Requests that end for a reason of their own: in the worker, or because their grammar came to nothing."""

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
def test_a_failed_request_ends_alone_and_says_why(asynchronous: bool, drafts: int) -> None:
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


def test_what_it_wrote_is_right_and_found_again() -> None:
    """Unlike a bad row's: nobody who read it begins again, and who comes later reads it."""
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


def test_one_that_was_preempted_meanwhile_fails_too() -> None:
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


def test_failing_and_a_stop_token_at_once_is_a_failure() -> None:
    """Its token means nothing, so it stops nothing."""
    want = expected_tokens(PROMPT, 3)
    driver = Driver(async_scheduling=True)
    driver.worker.failed_at["a"] = 2
    driver.add("a", PROMPT, max_tokens=12, stop_token_ids=[want[2]])
    finish(driver)
    assert end_of(driver, "a") == (EndReason.ERROR, want[:2])


def test_a_refused_grammar_is_a_rejection() -> None:
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


def test_only_who_is_held_can_be_refused() -> None:
    driver = Driver()
    driver.add("a", PROMPT, max_tokens=3)
    driver.refuse("a")
    assert driver.scheduler.statistics().num_stray_messages == 1
    finish(driver)
    assert driver.answers["a"].reason is EndReason.LENGTH


def test_who_had_begun_before_it_was_held_ends_with_an_error() -> None:
    """It was introduced, perhaps with tokens: it cannot be rejected any more."""
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
def test_a_request_can_be_failed_from_within(asynchronous: bool) -> None:
    driver = Driver(async_scheduling=asynchronous)
    driver.add("a", PROMPT, max_tokens=12)
    driver.step(4)
    had = list(driver.answers["a"].tokens)
    driver.fail("a")
    driver.fail("a")
    assert end_of(driver, "a") == (EndReason.ERROR, had) and had
    ended = driver.answers["a"].ended
    assert ended is not None and ended.detail == "grammar_failed: no memory"
    finish(driver)
