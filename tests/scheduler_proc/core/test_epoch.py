"""New worker epoch: the workers' state is not trusted. All tokens are recomputed, and no stream changes."""

from typing import Any

import pytest
from scheduler_driver import Driver, end_of, expected_tokens

from quire.protocol.wire.front_end_messages import EndReason
from quire.scheduler_proc.requests.reasons import PreemptReason
from quire.scheduler_proc.requests.request import RequestStatus

BOTH = pytest.mark.parametrize("asynchronous", [False, True])


def busy(asynchronous: bool = True, **settings: Any) -> Driver:
    """Return an engine with two running requests and one waiting."""
    driver = Driver(**{"max_num_seqs": 2, "async_scheduling": asynchronous} | settings)
    for index, name in enumerate("abc"):
        driver.add(name, [index, 7, 8, 9, 10], max_tokens=12 + index, client=index % 2)
    driver.step(4)
    return driver


def check_all(driver: Driver) -> None:
    driver.finish()
    for index, name in enumerate("abc"):
        assert end_of(driver, name) == (
            EndReason.LENGTH,
            expected_tokens([index, 7, 8, 9, 10], 12 + index),
        )


@BOTH
@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_all_is_recomputed_and_tokens_are_the_same(asynchronous: bool, in_flight: int) -> None:
    driver = busy(asynchronous)
    driver.settle()
    for _ in range(in_flight):
        driver.schedule()
    before = {name: list(answer.tokens) for name, answer in driver.answers.items()}
    driver.begin_worker_epoch()
    assert len(driver.scheduler.in_flight) == 0 and driver.scheduler.kv.pool.num_cached_blocks == 0
    diff = driver.schedule()
    assert diff is not None and sorted(diff.removed) == [0, 1]
    assert [(n.request_id, n.num_computed_tokens) for n in diff.new_requests] == [("a", 0), ("b", 0)]
    assert [n.num_tokens for n in diff.new_requests] == [5 + len(before[name]) for name in "ab"]
    check_all(driver)


def test_late_results_are_ignored_and_counted() -> None:
    driver = busy()
    driver.fill()
    late = len(driver.scheduler.in_flight)
    before = driver.scheduler.statistics()
    driver.begin_worker_epoch()
    received = {name: list(answer.tokens) for name, answer in driver.answers.items()}
    while driver.execute():
        driver.deliver()
    after = driver.scheduler.statistics()
    assert {name: answer.tokens for name, answer in driver.answers.items()} == received
    assert after.num_stray_messages == before.num_stray_messages + late == before.num_stray_messages + 2
    assert after.generation_tokens == before.generation_tokens
    check_all(driver)


def test_pipeline_has_room_beside_late_results() -> None:
    driver = busy()
    driver.fill()
    driver.begin_worker_epoch()
    assert driver.schedule() is not None and driver.schedule() is not None
    assert not driver.scheduler.can_schedule, "late results do not count as steps in flight"
    check_all(driver)


def test_request_with_its_last_token_in_flight_runs_again() -> None:
    """The leaving request is no longer on the workers, and its token is lost, so it must run again."""
    driver = Driver(async_scheduling=True)
    driver.add("a", [1, 2, 3], max_tokens=2)
    driver.add("b", [4], max_tokens=9)
    driver.schedule()
    driver.schedule()
    driver.answer()
    driver.schedule()
    assert list(driver.scheduler.table.leaving) == [0]
    driver.begin_worker_epoch()
    assert not driver.scheduler.table.leaving
    driver.finish()
    assert driver.answers["a"].tokens == expected_tokens([1, 2, 3], 2)
    assert driver.answers["b"].tokens == expected_tokens([4], 9)


def test_order_of_arrival_is_kept() -> None:
    driver = busy()
    driver.begin_worker_epoch()
    assert [r.request_id for r in driver.scheduler.table.waiting] == ["a", "b", "c"]
    states = [r.status for r in driver.scheduler.table.waiting]
    assert states == [RequestStatus.PREEMPTED, RequestStatus.PREEMPTED, RequestStatus.WAITING]


def test_reason_is_new_epoch_and_not_a_counted_preemption() -> None:
    driver = busy()
    driver.scheduler.decisions.take()
    driver.begin_worker_epoch()
    decisions = [(d.kind, d.request_id, d.reason) for d in driver.scheduler.decisions.take()]
    assert sorted(decisions) == [("preempt", "a", PreemptReason.NEW_EPOCH), ("preempt", "b", PreemptReason.NEW_EPOCH)]
    statistics = driver.scheduler.statistics()
    assert statistics.preemptions_by_reason["new_epoch"] == 2 and statistics.num_preemptions == 0


def test_cached_blocks_are_only_those_of_the_new_epoch() -> None:
    driver = Driver()
    prompt = list(range(20))
    driver.add("before", prompt, max_tokens=1)
    driver.run()
    driver.begin_worker_epoch()
    driver.add("first", prompt, max_tokens=1)
    driver.run()
    driver.add("second", prompt, max_tokens=1)
    driver.run()
    assert [driver.answers[n].num_cached_tokens for n in ("first", "second")] == [0, 16]


@BOTH
def test_repeated_and_with_no_requests(asynchronous: bool) -> None:
    driver = Driver(async_scheduling=asynchronous)
    driver.begin_worker_epoch()
    assert driver.schedule() is None
    driver = busy(asynchronous)
    driver.begin_worker_epoch()
    driver.begin_worker_epoch()
    driver.schedule()
    driver.begin_worker_epoch()
    check_all(driver)


@BOTH
def test_requests_end_after_an_epoch(asynchronous: bool) -> None:
    driver = busy(asynchronous)
    driver.schedule()
    driver.begin_worker_epoch()
    driver.abort("a")
    driver.stop("b", 1, client=1)
    driver.finish()
    assert driver.answers["a"].reason is EndReason.ABORTED and driver.answers["b"].reason is EndReason.STOPPED
    assert driver.answers["c"].tokens == expected_tokens([2, 7, 8, 9, 10], 14)


def test_old_handles_are_not_reused_while_workers_may_hold_them() -> None:
    driver = busy()
    driver.schedule()
    driver.abort("a")
    driver.begin_worker_epoch()
    driver.add("d", [1], max_tokens=1)
    assert driver.request("d").handle == 3
    driver.run()
    driver.add("e", [1], max_tokens=1)
    assert driver.request("e").handle < 4
    driver.finish()


def test_halved_budget_has_room_for_the_longest_whole_prompt() -> None:
    driver = Driver(enable_chunked_prefill=False, max_num_batched_tokens=60, max_model_len=40, max_num_seqs=4)
    assert driver.scheduler.halve_token_budget() and driver.scheduler.config.max_num_batched_tokens == 40
    assert not driver.scheduler.halve_token_budget()
    driver.add("a", list(range(39)), max_tokens=1)
    driver.finish()
