"""Scheduled requests and tokens of a step: one budget, decodes first, then in order of arrival."""

import msgspec
import pytest
from scheduler_driver import Driver, change, expected_tokens

from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.scheduler_proc.core.step import StepPlan


def prompt_of(n: int, first: int = 0) -> list[int]:
    return list(range(first, first + n))


def steps_until_done(driver: Driver) -> list[dict[str, int]]:
    """Run all requests; return the tokens per request of each step."""
    found = []
    while driver.scheduler.table.requests:
        diff = driver.schedule()
        found.append(driver.counts(diff))
        driver.answer()
    driver.check_drained()
    return found


def test_admits_in_order_of_arrival() -> None:
    driver = Driver(max_num_seqs=2)
    for index in range(5):
        driver.add(f"r{index}", prompt_of(3, index), max_tokens=2)
    seen = [name for step in steps_until_done(driver) for name in step]
    assert sorted(set(seen), key=seen.index) == ["r0", "r1", "r2", "r3", "r4"]


def test_the_head_of_the_queue_is_never_overtaken() -> None:
    """A small request that fits is not admitted before an earlier large one that does not."""
    driver = Driver(num_blocks=9)
    driver.add("first", prompt_of(20), max_tokens=4)
    driver.step()
    driver.add("large", prompt_of(24, 100), max_tokens=2)
    driver.add("small", [7], max_tokens=2)
    for step in steps_until_done(driver):
        assert not ("small" in step and driver.answers["large"].ended is None and "large" not in step)
    assert driver.answers["large"].tokens == expected_tokens(prompt_of(24, 100), 2)


@pytest.mark.parametrize("budget", [4, 5, 16])
def test_no_step_computes_more_tokens_than_the_budget(budget: int) -> None:
    driver = Driver(max_num_batched_tokens=budget, max_num_seqs=4)
    for index in range(6):
        driver.add(f"r{index}", prompt_of(3 + 2 * index, 50 * index), max_tokens=5)
    steps = steps_until_done(driver)
    assert max(sum(step.values()) for step in steps) == budget
    assert max(len(step) for step in steps) <= 4


def test_fewer_tokens_are_scheduled_than_the_workers_have_room_for() -> None:
    driver = Driver(max_num_batched_tokens=16, max_num_scheduled_tokens=5, max_num_seqs=4)
    for index in range(6):
        driver.add(f"r{index}", prompt_of(3 + 2 * index, 50 * index), max_tokens=5)
    assert max(sum(step.values()) for step in steps_until_done(driver)) == 5
    assert driver.replay_lines() is None
    assert driver.scheduler.halve_token_budget() and driver.scheduler.config.step_tokens == 4
    assert not driver.scheduler.halve_token_budget(), "one token for each request"


def test_a_step_never_has_more_requests_than_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of requests that do not run, as after a wrong withdrawal, end the engine before the workers get them."""
    driver = Driver()
    driver.add("a", prompt_of(3), max_tokens=2)
    planner = driver.scheduler.planner
    plan_of = planner.plan

    def plan(step: int, pause: str) -> StepPlan:
        made = plan_of(step, pause)
        made.rows |= {1000 + handle: row for handle, row in made.rows.items()}
        return made

    monkeypatch.setattr(planner, "plan", plan)
    with pytest.raises(AssertionError, match="2 requests in a step while 1 run"):
        driver.schedule()


def test_long_prompt_is_spread_over_steps() -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add("a", prompt_of(21), max_tokens=2)
    assert steps_until_done(driver) == [{"a": 8}, {"a": 8}, {"a": 5}, {"a": 1}]
    assert driver.answers["a"].tokens == expected_tokens(prompt_of(21), 2)


def test_prompt_waits_until_it_fits_without_chunked_prefill() -> None:
    driver = Driver(max_num_batched_tokens=128, enable_chunked_prefill=False)
    driver.add("a", prompt_of(100), max_tokens=1)
    driver.add("b", prompt_of(40, 200), max_tokens=2)
    assert steps_until_done(driver) == [{"a": 100}, {"b": 40}, {"b": 1}]


def test_long_prefill_threshold_bounds_each_prompt() -> None:
    driver = Driver(long_prefill_token_threshold=5)
    driver.add("long", prompt_of(12), max_tokens=1)
    driver.add("short", prompt_of(3, 50), max_tokens=2)
    assert steps_until_done(driver) == [{"long": 5, "short": 3}, {"short": 1, "long": 5}, {"long": 2}]


def test_decodes_come_before_earlier_prefills() -> None:
    driver = Driver(long_prefill_token_threshold=3)
    driver.add("early", prompt_of(12), max_tokens=1)
    driver.add("decodes", [50], max_tokens=20)
    driver.step()
    driver.scheduler.config = change(driver.config, max_num_batched_tokens=2)
    assert driver.counts(driver.schedule()) == {"early": 1, "decodes": 1}


def test_prefill_gets_the_budget_that_decodes_leave() -> None:
    driver = Driver(max_num_seqs=4, max_num_batched_tokens=4)
    for name in ("a", "b"):
        driver.add(name, [ord(name)], max_tokens=30)
    driver.step()
    driver.add("long", prompt_of(9, 50), max_tokens=1)
    steps = [driver.counts(driver.schedule())]
    for _ in range(4):
        driver.answer()
        steps.append(driver.counts(driver.schedule()))
    assert steps[:4] == [{"a": 1, "b": 1, "long": 2}] * 4 and steps[4] == {"a": 1, "b": 1, "long": 1}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_requests_without_tokens_are_parked_and_resumed(asynchronous: bool) -> None:
    """The budget can shrink below the number of decoding requests after the workers ran out of memory."""
    driver = Driver(max_num_batched_tokens=8, async_scheduling=asynchronous)
    for name in "abcd":
        driver.add(name, [ord(name)], max_tokens=4)
    driver.step()
    driver.scheduler.config = change(driver.config, max_num_batched_tokens=2)
    driver.worker.max_tokens = 2 if not asynchronous else 8
    driver.finish()
    assert [h for diff in driver.diffs for h in diff.parked] == [2, 3]
    assert [h for diff in driver.diffs for h in diff.unparked] == [2, 3]
    for name in "abcd":
        assert driver.answers[name].tokens == expected_tokens([ord(name)], 4)


def test_parked_request_can_be_aborted() -> None:
    driver = Driver(max_num_batched_tokens=8)
    for name in "abc":
        driver.add(name, [ord(name)], max_tokens=6)
    driver.step()
    driver.scheduler.config = change(driver.config, max_num_batched_tokens=2)
    driver.step()
    assert driver.request("c").parked
    driver.abort("c")
    driver.finish()
    assert not any(diff.unparked for diff in driver.diffs)


def test_no_more_requests_run_than_max_num_seqs() -> None:
    driver = Driver(max_num_seqs=3)
    for index in range(8):
        driver.add(f"r{index}", [index], max_tokens=index + 1)
    assert max(len(step) for step in steps_until_done(driver)) == 3


def test_steady_batch_has_an_empty_diff() -> None:
    driver = Driver(block_size=16, max_model_len=128)
    for index in range(8):
        driver.add(f"r{index}", [index], max_tokens=10)
    driver.step(2)
    assert driver.schedule() == SchedulerOutput(3)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_pipeline_depth_limits_steps_in_flight(asynchronous: bool) -> None:
    driver = Driver(async_scheduling=asynchronous)
    driver.add("a", prompt_of(3), max_tokens=10)
    sent = 0
    while driver.schedule() is not None:
        sent += 1
    assert sent == (2 if asynchronous else 1)
    assert not driver.scheduler.can_schedule
    driver.answer()
    assert driver.scheduler.can_schedule


def test_next_step_needs_no_token_of_the_previous_one() -> None:
    """The second step decodes a token that the scheduler has not seen."""
    driver = Driver(async_scheduling=True)
    driver.add("a", prompt_of(3), max_tokens=3)
    first, second = driver.schedule(), driver.schedule()
    assert first is not None and first.counts == [(0, 3)]
    assert second is not None
    quiet = msgspec.structs.replace(second, appended_handles=None, appended_block_ids=None)
    assert quiet == SchedulerOutput(2)
    assert driver.answers["a"].tokens == []
    driver.run()
    assert driver.answers["a"].tokens == expected_tokens(prompt_of(3), 3)


def test_idle_scheduler_returns_nothing() -> None:
    driver = Driver()
    assert not driver.scheduler.can_schedule and driver.scheduler.schedule() is None
    assert driver.scheduler.take_messages() == []


def test_every_request_makes_progress_within_bounded_steps() -> None:
    """Under continuous arrivals, no running request is later than a waiting one."""
    driver = Driver(num_blocks=12, max_num_seqs=3, async_scheduling=True)
    for index in range(60):
        driver.add(f"r{index}", prompt_of(6, 10 * index), max_tokens=6)
        driver.step()
        waiting = [int(r.request_id[1:]) for r in driver.scheduler.table.waiting]
        running = [int(r.request_id[1:]) for r in driver.scheduler.table.running.values()]
        assert not running or not waiting or max(running) < min(waiting)
    driver.finish()
