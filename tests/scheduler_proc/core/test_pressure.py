"""Pressure: admission stops while many KV blocks are used, and resumes when clearly fewer are."""

from typing import Any

from scheduler_driver import Driver

from quire.scheduler_proc.requests.reasons import WaitReason


def pressed(**settings: Any) -> Driver:
    """20 usable blocks of 4 tokens. Admission stops from 16 used blocks on, and resumes below 10."""
    limits = {"kv_pressure_high": 0.8, "kv_pressure_low": 0.5}
    return Driver(**{"num_blocks": 21, "watermark": 0.0, "async_scheduling": False} | limits | settings)


def running(driver: Driver) -> list[str]:
    return [request.request_id for request in driver.scheduler.table.running.values()]


def used(driver: Driver) -> int:
    pool = driver.scheduler.kv.pool
    return pool.num_usable_blocks - pool.num_free_blocks


def test_admission_resumes_only_below_the_lower_limit() -> None:
    driver = pressed()
    for name, length in (("a", 15), ("b", 23), ("c", 23)):
        driver.add(name, [ord(name)] * length, max_tokens=20)
    driver.step()
    assert running(driver) == ["a", "b", "c"] and used(driver) == 16, "the limit holds before an admission, not after"
    driver.add("d", [1, 2, 3], max_tokens=20)
    driver.step()
    assert driver.request("d").wait_reason is WaitReason.KV_PRESSURE
    driver.abort("c")
    driver.step()
    assert 10 <= used(driver) < 16 and running(driver) == ["a", "b"], "between the limits nothing changes"
    driver.abort("b")
    driver.step()
    assert running(driver) == ["a", "d"]
    driver.add("e", [5] * 27, max_tokens=9)
    driver.step()
    assert running(driver) == ["a", "d", "e"] and 10 <= used(driver) < 16
    driver.add("f", [6, 6, 6], max_tokens=9)
    driver.step()
    assert running(driver) == ["a", "d", "e", "f"], "the upper limit was not reached since"
    driver.finish()


def test_a_request_is_admitted_when_none_runs() -> None:
    driver = pressed()
    driver.add("a", [1] * 75, max_tokens=3)
    driver.add("b", [2] * 75, max_tokens=3)
    driver.step()
    assert running(driver) == ["a"]
    driver.run()
    driver.check_drained()


def test_cached_blocks_count_as_free() -> None:
    driver = pressed()
    driver.add("a", [1] * 70, max_tokens=2)
    driver.run()
    assert driver.scheduler.kv.pool.num_cached_blocks >= 17
    driver.add("b", [2] * 3, max_tokens=9)
    driver.add("c", [3] * 3, max_tokens=9)
    driver.step()
    assert running(driver) == ["b", "c"]


def test_a_request_of_higher_priority_preempts_instead_of_waiting() -> None:
    driver = pressed(scheduling_policy="priority")
    for name in "ab":
        driver.add(name, [ord(name)] * 31, max_tokens=20, priority=5)
    driver.step()
    driver.add("same", [1] * 3, max_tokens=9, priority=5)
    driver.step()
    assert running(driver) == ["a", "b"] and driver.request("same").wait_reason is WaitReason.KV_PRESSURE
    driver.add("urgent", [2] * 3, max_tokens=9, priority=1)
    driver.step()
    assert running(driver) == ["a", "urgent"]


def test_no_limit_by_default() -> None:
    driver = pressed(kv_pressure_high=1.0, kv_pressure_low=1.0, max_num_batched_tokens=128)
    for name in "abcd":
        driver.add(name, [ord(name)] * 18, max_tokens=2)
    driver.step()
    assert running(driver) == ["a", "b", "c", "d"] and used(driver) == 20
