"""Deadlines of steps."""

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


def test_steps_of_a_new_size_have_a_long_deadline() -> None:
    deadline = StepDeadline()
    one_step(deadline, 1, 8, 0.0, 0.01)
    deadline.sent(2, 4096, 10.0)
    assert deadline.remaining(11.0) == FIRST_STEPS_S - 1


def test_the_deadline_is_ten_times_the_usual_with_a_floor() -> None:
    deadline = StepDeadline()
    now = one_step(deadline, 1, 8, 0.0, 0.01)
    deadline.sent(2, 8, now)
    assert deadline.remaining(now) == pytest.approx(FLOOR_S)
    deadline.result_received(2, now + 0.01)
    now = one_step(deadline, 3, 1000, now + 0.01, 3.0)
    deadline.sent(4, 1000, now)
    remaining = deadline.remaining(now)
    assert remaining is not None and abs(remaining - TIMES_USUAL * 3.0) < 1e-6


def test_a_queued_step_counts_from_the_end_of_the_previous_one() -> None:
    deadline = StepDeadline()
    one_step(deadline, 1, 8, 0.0, 1.0)
    deadline.sent(2, 8, 10.0)
    deadline.sent(3, 8, 10.0)
    deadline.result_received(2, 15.0)
    assert deadline.remaining(15.0) == TIMES_USUAL * 5.0
    deadline.result_received(3, 16.0)
    deadline.sent(4, 8, 16.0)
    assert deadline.remaining(16.0) == TIMES_USUAL * 5.0, "the third step took one second, not six"


def test_old_durations_are_forgotten() -> None:
    deadline = StepDeadline()
    now = one_step(deadline, 1, 8, 0.0, 30.0)
    for step in range(2, NUM_KEPT + 2):
        now = one_step(deadline, step, 8, now, 0.01)
    deadline.sent(NUM_KEPT + 2, 8, now)
    assert deadline.remaining(now) == pytest.approx(FLOOR_S)


def test_slow_steps_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    deadline = StepDeadline()
    now = one_step(deadline, 1, 8, 0.0, 0.1)
    now = one_step(deadline, 2, 8, now, 0.45)
    now = one_step(deadline, 3, 8, now, 2.0)
    assert deadline.num_slow == 0 and not caplog.text
    now = one_step(deadline, 4, 4096, now, 30.0)
    assert deadline.num_slow == 0, "no usual duration is known"
    now = one_step(deadline, 5, 8, now, 11.0)
    assert deadline.num_slow == 1 and "slow step step=5 seconds=11 longest_before=2" in caplog.text


def test_new_workers_reset_the_deadline() -> None:
    deadline = StepDeadline()
    now = one_step(deadline, 1, 8, 0.0, 0.01)
    deadline.sent(2, 8, now)
    deadline.forget()
    assert deadline.remaining(now) is None
    deadline.sent(3, 8, now)
    assert deadline.remaining(now) == FIRST_STEPS_S


def test_steps_of_zero_duration_are_handled() -> None:
    """Two results may be received at the same clock reading."""
    deadline = StepDeadline()
    now = one_step(deadline, 1, 8, 0.0, 0.0)
    one_step(deadline, 2, 8, now, 1.0)
    assert deadline.num_slow == 1
