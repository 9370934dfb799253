"""Held requests block no other request; a pause stops all steps, or only admission."""

import pytest
from scheduler_driver import Driver, end_of, expected_tokens

from quire.protocol.wire.front_end_messages import EndReason

POLICIES = pytest.mark.parametrize("policy", ["fcfs", "priority"])


def three(**settings: object) -> Driver:
    driver = Driver(**{"max_num_seqs": 1} | settings)
    for index, name in enumerate("abc"):
        driver.add(name, [index, 9], max_tokens=3, arrival=float(index))
    return driver


def waiting(driver: Driver) -> list[str]:
    return [r.request_id for r in driver.scheduler.table.waiting]


def running(driver: Driver) -> list[str]:
    return [r.request_id for r in driver.scheduler.table.running.values()]


def strays(driver: Driver) -> int:
    return driver.scheduler.statistics().num_stray_messages


# ---- holds


@POLICIES
def test_no_request_waits_behind_a_held_one(policy: str) -> None:
    driver = three(scheduling_policy=policy)
    driver.hold("a")
    assert waiting(driver) == ["b", "c"] and driver.scheduler.table.num_waiting == 3
    driver.step(8)
    assert [driver.answers[n].reason for n in "abc"] == [None, EndReason.LENGTH, EndReason.LENGTH]
    assert driver.scheduler.schedule() is None
    driver.release("a")
    driver.finish()
    assert driver.answers["a"].tokens == expected_tokens([0, 9], 3)


@POLICIES
def test_released_request_returns_to_its_place(policy: str) -> None:
    driver = three(scheduling_policy=policy)
    driver.hold("a")
    driver.hold("b")
    driver.release("b")
    assert waiting(driver) == ["b", "c"]
    driver.release("a")
    assert waiting(driver) == ["a", "b", "c"]
    driver.finish()


def test_invalid_holds_and_releases_are_counted_and_ignored() -> None:
    driver = three()
    driver.step()
    before = strays(driver)
    driver.hold("unknown")
    driver.hold("b", "boredom")  # unknown reason
    driver.release("b")  # not held
    driver.release("unknown")
    driver.hold("c", client=1)  # request of another front end
    driver.hold("b")
    driver.hold("b", "streaming")  # already held
    assert strays(driver) == before + 6
    assert waiting(driver) == ["c"]
    driver.release("b")
    driver.finish()


@pytest.mark.parametrize("steady_decode", [True, False])
@pytest.mark.parametrize("num_known", [0, 1, 3])
def test_a_running_request_is_preempted_and_its_samples_in_flight_do_not_count(
    num_known: int, steady_decode: bool
) -> None:
    """The steps in flight sample without what the request waits for, so their tokens are wrong."""
    driver = Driver(async_scheduling=True, steady_decode=steady_decode)
    driver.add("a", [1, 9], max_tokens=6)
    driver.add("b", [2, 9], max_tokens=6)
    while driver.request("a").num_output_tokens < num_known:
        driver.step()
    driver.fill()
    known = driver.request("a").num_output_tokens
    driver.worker.forced |= {("a", index): 77 for index in range(known, 9)}
    driver.hold("a")
    assert "a" not in running(driver) and driver.scheduler.statistics().num_preemptions == 1
    driver.settle()
    assert driver.request("a").num_output_tokens == known
    driver.worker.forced.clear()
    driver.release("a")
    driver.finish()
    assert driver.answers["a"].tokens == expected_tokens([1, 9], 6)
    assert driver.answers["b"].tokens == expected_tokens([2, 9], 6)
    assert driver.replay_lines() is None


def test_held_request_can_be_aborted_stopped_and_dropped() -> None:
    driver = three()
    for name in "abc":
        driver.hold(name)
    assert not driver.scheduler.can_schedule
    driver.abort("a")
    driver.stop("b", 0)
    driver.drop_client(0)
    assert [driver.answers[n].reason for n in "abc"] == [EndReason.ABORTED, EndReason.STOPPED, EndReason.ABORTED]
    driver.schedule()
    driver.check_drained()


def test_preempted_request_can_be_held_and_keeps_its_tokens() -> None:
    driver = Driver(num_blocks=9, enable_prefix_caching=False)
    driver.add("old", [1, 2, 3, 4, 5, 6, 7], max_tokens=13)
    driver.add("young", [11, 12, 13, 14, 15, 16, 17], max_tokens=13)
    while not driver.scheduler.statistics().num_preemptions:
        driver.step()
    known = len(driver.answers["young"].tokens)
    driver.hold("young", "remote_kv")
    while driver.answers["old"].ended is None:
        driver.step()
    assert len(driver.answers["young"].tokens) == known > 0
    driver.release("young")
    driver.finish()
    assert driver.answers["young"].tokens == expected_tokens([11, 12, 13, 14, 15, 16, 17], 13)


def test_held_requests_count_for_the_queue_limit() -> None:
    driver = Driver(max_num_queued_reqs=1)
    driver.add("a", [1], max_tokens=1)
    driver.hold("a")
    driver.add("b", [2], max_tokens=1)
    rejected = driver.answers["b"].rejected
    assert rejected is not None and rejected.code == "queue_full"


# ---- pauses


@pytest.mark.parametrize("asynchronous", [False, True])
def test_pause_new_lets_running_requests_continue(asynchronous: bool) -> None:
    driver = three(async_scheduling=asynchronous)
    driver.step()
    driver.control("pause_new")
    driver.step(8)
    assert driver.answers["a"].reason is EndReason.LENGTH and running(driver) == []
    assert waiting(driver) == ["b", "c"]
    assert driver.scheduler.statistics().waiting_by_reason["paused"] == 2
    driver.control("resume")
    driver.finish()


def test_pause_and_resume_in_steady_decode() -> None:
    driver = Driver(async_scheduling=True)
    for index in range(3):
        driver.add(f"r{index}", [index], max_tokens=40)
    driver.step(4)
    assert len(driver.scheduler.steady_decode) == 3
    driver.control("pause")
    driver.settle()
    sent = len(driver.diffs)
    driver.step(3)
    assert len(driver.diffs) == sent and len(driver.scheduler.steady_decode) == 3
    driver.control("resume")
    driver.finish()
    for index in range(3):
        assert driver.answers[f"r{index}"].tokens == expected_tokens([index], 40)


def test_pauses_replace_each_other_and_one_resume_ends_both() -> None:
    driver = three()
    driver.control("pause")
    driver.control("pause_new")
    assert driver.scheduler.can_schedule and driver.schedule() is None
    driver.control("pause")
    assert not driver.scheduler.can_schedule
    driver.control("resume")
    driver.finish()


def test_request_preempted_during_pause_new_waits_for_resume() -> None:
    driver = Driver(num_blocks=9, enable_prefix_caching=False)
    driver.add("old", [1] * 7, max_tokens=13)
    driver.add("young", [2] * 7, max_tokens=13)
    driver.step()
    driver.control("pause_new")
    while driver.answers["old"].ended is None:
        driver.step()
    assert driver.scheduler.statistics().num_preemptions == 1
    driver.step(3)
    assert running(driver) == [] and waiting(driver) == ["young"]
    driver.control("resume")
    driver.finish()
    assert end_of(driver, "young") == (EndReason.LENGTH, expected_tokens([2] * 7, 13))


# ---- all requests


@pytest.mark.parametrize("asynchronous", [False, True])
def test_abort_all_ends_each_request_in_any_state(asynchronous: bool) -> None:
    driver = three(async_scheduling=asynchronous)
    driver.hold("c")
    driver.step()
    driver.control("abort_all")
    assert [driver.answers[n].reason for n in "abc"] == [EndReason.ABORTED] * 3
    driver.settle()
    driver.schedule()
    assert driver.control("reset_prefix_cache").done or asynchronous
    driver.finish()


def test_requests_and_tenants_are_listed_with_their_reasons() -> None:
    driver = three(fair_admission=True)
    driver.add("d", [1], max_tokens=1, tenant=5)
    driver.hold("c")
    driver.step()
    assert driver.control("statistics").requests == []
    listed = driver.control("requests")
    assert [(each.request_id, each.state, each.reason) for each in listed.requests] == [
        ("a", "running", ""),
        ("b", "waiting", "max_num_seqs"),
        ("c", "held", "grammar"),
        ("d", "waiting", "max_num_seqs"),
    ]
    assert listed.requests[0].num_blocks == 1 and listed.requests[0].num_prompt_tokens == 2
    assert [(t.tenant, t.num_running, t.num_waiting, t.num_blocks) for t in listed.tenants] == [
        (0, 1, 2, 1),
        (5, 0, 1, 0),
    ]
    driver.control("pause")
    assert [each.reason for each in driver.control("requests").requests] == ["", "paused", "grammar", "paused"]
    driver.control("resume")
    driver.release("c")
    driver.finish()
