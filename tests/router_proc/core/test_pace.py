"""Seconds per token: from steps that compute prompts, and only from those."""

from quire.protocol.wire.front_end_messages import Histogram, Statistics
from quire.router_proc.core.pace import Pace


def statistics(num_steps: int, num_tokens: float, seconds: float) -> Statistics:
    return Statistics(
        1,
        num_steps=num_steps,
        step_tokens=Histogram([], [num_steps], num_tokens),
        step_worker=Histogram([], [num_steps], seconds),
    )


def test_measures_prompts_and_not_decode() -> None:
    pace = Pace()
    pace.update(Statistics(1))
    assert pace.seconds_per_token == 0.0
    pace.update(statistics(10, 20_000, 2.0))
    assert pace.seconds_per_token == 1e-4
    pace.update(statistics(110, 20_400, 9.0))  # 100 steps of 4 tokens
    pace.update(statistics(110, 20_400, 9.0))  # idle
    assert pace.seconds_per_token == 1e-4
    pace.update(statistics(111, 21_400, 9.2))
    assert 1e-4 < pace.seconds_per_token < 2e-4


def test_starts_over_with_a_scheduler_that_counts_from_0() -> None:
    pace = Pace()
    pace.update(statistics(10, 20_000, 2.0))
    pace.update(statistics(1, 1_000, 0.1))
    assert pace.seconds_per_token == 1e-4
