"""Priority policy: the lowest number is first and preempts higher numbers, but not equal ones."""

from typing import Any

import pytest
from scheduler_driver import Driver, expected_tokens

from quire.protocol.errors import ConfigError
from quire.scheduler_proc.requests.reasons import PreemptReason

BOTH = pytest.mark.parametrize("asynchronous", [False, True])


def by_priority(**settings: Any) -> Driver:
    return Driver(**{"scheduling_policy": "priority"} | settings)


def running(driver: Driver) -> list[str]:
    return [r.request_id for r in driver.scheduler.table.running.values()]


def waiting(driver: Driver) -> list[str]:
    return [r.request_id for r in driver.scheduler.table.waiting]


def preempted(driver: Driver) -> list[tuple[str, str, str]]:
    """Return (request id, reason, beneficiary) of the preemptions since the last call."""
    taken = driver.scheduler.decisions.take()
    return [(d.request_id, d.reason, d.beneficiary) for d in taken if d.kind == "preempt"]


def test_order_is_lowest_number_then_earliest_arrival() -> None:
    driver = by_priority(max_num_seqs=1)
    for name, priority, arrival in (("late", 1, 9.0), ("worse", 2, 1.0), ("early", 1, 3.0), ("best", -7, 99.0)):
        driver.add(name, [1, 2], max_tokens=1, priority=priority, arrival=arrival)
    order: list[str] = []
    while driver.scheduler.table.requests:
        driver.step()
        order += [name for name in driver.answers if driver.answers[name].ended and name not in order]
    assert order == ["best", "early", "late", "worse"]


def test_equal_arrivals_keep_the_order_of_the_engine() -> None:
    driver = by_priority()
    for name in "cab":
        driver.add(name, [1], max_tokens=1, arrival=5.0)
    assert waiting(driver) == ["c", "a", "b"]


def test_fcfs_ignores_priorities() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add("first", [1], max_tokens=2, priority=5)
    driver.add("second", [2], max_tokens=2, priority=-5)
    driver.step()
    assert running(driver) == ["first"] and waiting(driver) == ["second"]


@BOTH
def test_preempts_lowest_priority_request_for_blocks(asynchronous: bool) -> None:
    driver = by_priority(num_blocks=9, enable_prefix_caching=False, async_scheduling=asynchronous)
    driver.add("worse", [1] * 7, max_tokens=13, priority=3, arrival=1.0)
    driver.add("better", [2] * 7, max_tokens=13, priority=1, arrival=2.0)
    while not driver.scheduler.statistics().num_preemptions:
        driver.step()
    assert preempted(driver) == [("worse", PreemptReason.LOWEST_PRIORITY, "better")]
    assert waiting(driver) == ["worse"]
    driver.finish()
    assert driver.answers["worse"].tokens == expected_tokens([1] * 7, 13)


def test_preempts_latest_arrival_among_equals() -> None:
    driver = by_priority(num_blocks=9, enable_prefix_caching=False)
    driver.add("late", [1] * 7, max_tokens=13, arrival=2.0)
    driver.add("early", [2] * 7, max_tokens=13, arrival=1.0)
    while not driver.scheduler.statistics().num_preemptions:
        driver.step()
    assert preempted(driver) == [("late", PreemptReason.LOWEST_PRIORITY, "early")]


def test_lowest_priority_request_preempts_itself() -> None:
    """It could only get a block from a request of higher priority."""
    driver = by_priority(num_blocks=5, enable_prefix_caching=False)
    driver.add("better", [1] * 5, max_tokens=9, priority=0)
    driver.add("worse", [2] * 6, max_tokens=7, priority=1)
    while not driver.scheduler.statistics().num_preemptions:
        driver.step()
    assert preempted(driver)[0] == ("worse", PreemptReason.ITSELF, "worse")
    driver.finish()
    assert driver.answers["better"].tokens == expected_tokens([1] * 5, 9)


@BOTH
def test_waiting_request_preempts_lower_priority_for_a_row(asynchronous: bool) -> None:
    """#41951: otherwise a long request of low priority would block it until its end."""
    driver = by_priority(max_num_seqs=2, async_scheduling=asynchronous)
    driver.add("bad", [1, 2, 3], max_tokens=20, priority=5)
    driver.add("worst", [4, 5, 6], max_tokens=20, priority=9)
    driver.step()
    driver.add("best", [7, 8, 9], max_tokens=3, priority=0)
    diff = driver.schedule() or driver.schedule()
    while diff is None or not diff.new_requests:
        driver.answer()
        diff = driver.schedule()
    assert running(driver) == ["bad", "best"] and waiting(driver) == ["worst"]
    assert len(diff.removed) == 1, "the row is removed and reused in the same diff"
    driver.finish()
    assert preempted(driver) == [("worst", PreemptReason.LOWEST_PRIORITY, "best")]
    for name, prompt in (("bad", [1, 2, 3]), ("worst", [4, 5, 6])):
        assert driver.answers[name].tokens == expected_tokens(prompt, 20)


def test_waiting_request_preempts_lower_priorities_for_blocks() -> None:
    driver = by_priority(num_blocks=9, enable_prefix_caching=False)
    for index, name in enumerate(("a", "b", "c")):
        driver.add(name, [index] * 7, max_tokens=4, priority=index + 1)
    driver.step()
    driver.add("big", list(range(20, 38)), max_tokens=2, priority=0)
    driver.step()
    assert [name for name, _, _ in preempted(driver)] == ["c", "b"] and running(driver) == ["a", "big"]
    driver.finish()


@pytest.mark.parametrize("priority", [5, 6])
def test_no_preemption_among_equal_priorities(priority: int) -> None:
    """Equals would preempt each other for ever (#54530)."""
    driver = by_priority(max_num_seqs=1)
    driver.add("runs", [1, 2], max_tokens=9, priority=5, arrival=2.0)
    driver.step()
    driver.add("waits", [3, 4], max_tokens=2, priority=priority, arrival=1.0)
    driver.finish()
    assert preempted(driver) == []


def test_withdrawn_row_is_not_cached() -> None:
    """ "low" got tokens in the step that fill a block; then "high" preempted it. The block is never written, so it
    must not be found when "low" resumes."""
    driver = by_priority(max_num_seqs=1, long_prefill_token_threshold=4)
    prompt = list(range(14))
    driver.add("low", prompt, max_tokens=2, priority=5)
    driver.step()
    driver.add("high", [50, 51], max_tokens=2, priority=0)
    driver.step()
    assert running(driver) == ["high"]
    driver.add("same", [*prompt, 99], max_tokens=2, priority=1)
    driver.finish()
    assert driver.answers["same"].num_cached_tokens == 4, "one block was written"
    assert driver.answers["low"].tokens == expected_tokens(prompt, 2)
    assert driver.answers["same"].tokens == expected_tokens([*prompt, 99], 2)


def test_victim_in_steady_decode_returns_its_budget() -> None:
    driver = by_priority(max_num_seqs=2, max_num_batched_tokens=4)
    for name, priority in (("low", 5), ("mid", 3)):
        driver.add(name, [priority], max_tokens=20, priority=priority)
    driver.step(2)
    driver.add("high", [1, 2, 3, 4, 5, 6], max_tokens=1, priority=0)
    assert driver.counts(driver.schedule()) == {"mid": 1, "high": 2}, "the prefill budget was set before the preemption"
    assert len(driver.scheduler.steady_decode) == 1
    driver.answer()
    driver.finish()
    assert driver.answers["low"].tokens == expected_tokens([5], 20)


def test_preempted_request_keeps_its_place_and_is_not_starved() -> None:
    """It resumes before later requests of equal priority, as soon as better ones leave a row."""
    driver = by_priority(max_num_seqs=2)
    driver.add("low", [1, 2], max_tokens=30, priority=9, arrival=0.0)
    for index in range(10):
        driver.add(f"h{index}", [index], max_tokens=4, priority=0, arrival=1.0 + index)
        driver.add(f"x{index}", [index], max_tokens=4, priority=9, arrival=1.0 + index)
        driver.step()
    while driver.answers["low"].ended is None:
        driver.step()
        if running(driver):
            assert not any(driver.answers[f"x{i}"].tokens for i in range(10)) or "low" not in waiting(driver)
    driver.finish()
    assert driver.answers["low"].tokens == expected_tokens([1, 2], 30)


def test_unknown_policy_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"scheduling_policy must be one of fcfs, priority, program, continuum \(got 'lottery'\)"
    ):
        Driver(scheduling_policy="lottery")


@BOTH
def test_high_priority_does_not_wait_for_a_long_prefill(asynchronous: bool) -> None:
    """The prefill of a lower priority uses the whole budget of each step; it is preempted for the tokens."""
    driver = by_priority(max_num_batched_tokens=16, async_scheduling=asynchronous)
    driver.add("long", list(range(100)), max_tokens=3, priority=3)
    driver.step()
    driver.add("urgent", [1, 2, 3], max_tokens=4, priority=-1)
    diff = driver.schedule() or driver.diffs[-1]
    assert preempted(driver) == [("long", PreemptReason.LOWEST_PRIORITY, "urgent")]
    assert [new.request_id for new in diff.new_requests] == ["urgent"]
    driver.finish()
    assert driver.answers["urgent"].tokens == expected_tokens([1, 2, 3], 4)
    assert driver.answers["long"].tokens == expected_tokens(list(range(100)), 3)


def test_whole_prompt_takes_tokens_of_a_lower_priority() -> None:
    driver = by_priority(max_num_batched_tokens=24, enable_chunked_prefill=False)
    driver.add("worse", list(range(20)), max_tokens=3, priority=3)
    driver.add("better", list(range(22)), max_tokens=3, priority=1)
    driver.add("best", [7] * 5, max_tokens=3, priority=0)
    driver.finish()
    for name, prompt in (("worse", list(range(20))), ("better", list(range(22))), ("best", [7] * 5)):
        assert driver.answers[name].tokens == expected_tokens(prompt, 3)


def test_withdrawn_prefill_returns_its_tokens_to_prefill() -> None:
    """While requests decode, prefills have half of the budget; the victim's tokens return to that half."""
    driver = by_priority(max_num_batched_tokens=16, max_prefill_share=0.5)
    driver.add("decodes", [1], max_tokens=30)
    driver.step()
    driver.add("long", list(range(40)), max_tokens=2, priority=9)
    driver.step()
    driver.add("urgent", list(range(50, 62)), max_tokens=2, priority=-1)
    diff = driver.schedule()
    assert diff is not None and [(n.request_id, dict(diff.counts)[n.handle]) for n in diff.new_requests] == [
        ("urgent", 8)
    ]
    driver.finish()
