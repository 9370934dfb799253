"""When a step is overdue."""

import pytest

from quire.scheduler_proc.process.step_deadline import FIRST_STEPS_S, FLOOR_S, NUM_KEPT, TIMES_USUAL, StepDeadline


def one_step(deadline: StepDeadline, step: int, num_tokens: int, now: float, seconds: float) -> float:
    deadline.sent(step, num_tokens, now)
    deadline.result_received(step, now + seconds)
    return now + seconds


def test_nothing_in_flight_is_never_overdue() -> None:
    deadline = StepDeadline()
    assert deadline.remaining(5.0) is None
    one_step(deadline, 1, 8, 5.0, 0.1)
    assert deadline.remaining(1e9) is None


def test_a_size_that_is_new_may_take_long() -> None:
    deadline = StepDeadline()
    one_step(deadline, 1, 8, 0.0, 0.01)
    deadline.sent(2, 4096, 10.0)
    assert deadline.remaining(11.0) == FIRST_STEPS_S - 1


def test_quick_steps_have_the_floor_and_slow_ones_ten_times_what_is_usual() -> None:
    deadline = StepDeadline()
    now = one_step(deadline, 1, 8, 0.0, 0.01)
    deadline.sent(2, 8, now)
    assert deadline.remaining(now) == pytest.approx(FLOOR_S)
    deadline.result_received(2, now + 0.01)
    now = one_step(deadline, 3, 1000, now + 0.01, 3.0)
    deadline.sent(4, 1000, now)
    remaining = deadline.remaining(now)
    assert remaining is not None and abs(remaining - TIMES_USUAL * 3.0) < 1e-6


def test_a_step_behind_another_counts_from_the_end_of_that() -> None:
    deadline = StepDeadline()
    one_step(deadline, 1, 8, 0.0, 1.0)
    deadline.sent(2, 8, 10.0)
    deadline.sent(3, 8, 10.0)
    deadline.result_received(2, 15.0)
    assert deadline.remaining(15.0) == TIMES_USUAL * 5.0
    deadline.result_received(3, 16.0)
    deadline.sent(4, 8, 16.0)
    assert deadline.remaining(16.0) == TIMES_USUAL * 5.0, "the third took a second, not six"


def test_what_was_long_ago_does_not_count() -> None:
    deadline = StepDeadline()
    now = one_step(deadline, 1, 8, 0.0, 30.0)
    for step in range(2, NUM_KEPT + 2):
        now = one_step(deadline, step, 8, now, 0.01)
    deadline.sent(NUM_KEPT + 2, 8, now)
    assert deadline.remaining(now) == pytest.approx(FLOOR_S)


def test_a_slow_step_is_told(caplog: pytest.LogCaptureFixture) -> None:
    deadline = StepDeadline()
    now = one_step(deadline, 1, 8, 0.0, 0.1)
    now = one_step(deadline, 2, 8, now, 0.45)
    now = one_step(deadline, 3, 8, now, 2.0)
    assert deadline.num_slow == 0 and not caplog.text
    now = one_step(deadline, 4, 4096, now, 30.0)
    assert deadline.num_slow == 0, "nobody knows what is usual"
    now = one_step(deadline, 5, 8, now, 11.0)
    assert deadline.num_slow == 1 and "slow step step=5 seconds=11 longest_before=2" in caplog.text


def test_other_workers_begin_anew() -> None:
    deadline = StepDeadline()
    now = one_step(deadline, 1, 8, 0.0, 0.01)
    deadline.sent(2, 8, now)
    deadline.forget()
    assert deadline.remaining(now) is None
    deadline.sent(3, 8, now)
    assert deadline.remaining(now) == FIRST_STEPS_S


def test_a_clock_that_stood_still_does_not_end_the_scheduler() -> None:
    """Two answers that lay in the socket together may be taken at one reading of the clock."""
    deadline = StepDeadline()
    now = one_step(deadline, 1, 8, 0.0, 0.0)
    one_step(deadline, 2, 8, now, 1.0)
    assert deadline.num_slow == 1
