"""What is drawn has the totals of what was there."""

import pytest
from replay_runs import made_up_run

from quire.launch.replay.report import bins
from quire.launch.replay.run.run_record import Moment, RequestRun, StepColumns


def test_few_steps_are_drawn_as_they_are() -> None:
    steps = made_up_run(1, 40).steps
    made = bins.bin_steps(steps)
    assert made["count"] is None
    assert made["begin"] == [round(begin * 1e6) for begin in steps.begin]
    assert made["waiting"] == {"mean": steps.waiting.tolist(), "min": None, "max": None}


def test_bins_keep_means_and_extremes() -> None:
    steps = made_up_run(1, 5000).steps
    made = bins.bin_steps(steps, max_bins=100)
    assert len(made["begin"]) <= 100
    assert sum(made["count"]) == 5000
    for name in bins.STEP_COLUMNS:
        column, values = made[name], getattr(steps, name)
        total = sum(mean * count for mean, count in zip(column["mean"], made["count"], strict=True))
        assert total == pytest.approx(sum(values), rel=1e-3)
        assert (min(column["min"]), max(column["max"])) == (min(values), max(values))
    assert made["end"][:-1] == made["begin"][1:]


def test_a_pause_is_no_long_step() -> None:
    steps = StepColumns()
    for begin in (0.0, 0.01, 5.0):
        steps.begin.append(begin)
        steps.end.append(begin + 0.009)
        for name in bins.STEP_COLUMNS:
            getattr(steps, name).append(1)
    assert bins.bin_steps(steps)["end"] == [10000, 19000, 5009000]


def test_no_steps() -> None:
    made = bins.bin_steps(StepColumns())
    assert made["begin"] == [] and made["tokens"]["mean"] == []


@pytest.mark.parametrize("scale", [1.01, 20, 1e6])
def test_a_histogram_loses_nobody(scale: float) -> None:
    runs = [[(1.0, 3), (scale / 2 + 0.5, 1), (scale, 2)], [(1.0, 1)], []]
    made = bins.histogram("e2e", "End to end", runs)
    assert [sum(each) for each in made["counts"]] == [6, 1, 0]
    assert made["edges"] == sorted(set(made["edges"]))
    assert made["log"] == (scale == 1e6)
    assert made["counts"][0][-1] == 2 or not made["log"]


def test_histograms_of_nothing_and_of_zeros() -> None:
    assert bins.histogram("e2e", "", [[], []])["edges"] == []
    assert sum(bins.histogram("queue", "", [[(0.0, 4)]])["counts"][0]) == 4


def test_equal_values_lie_in_the_middle_of_an_axis_that_is_wide_enough() -> None:
    edges = bins.histogram("itl", "", [[(20.0, 9)]])["edges"]
    assert (edges[0], edges[-1]) == (15, 25)


def test_hit_rates_add_up() -> None:
    runs = [RequestRun("a", 0, 100, scheduled=1.0), RequestRun("b", 0, 300, scheduled=9.0), RequestRun("c", 0, 999)]
    runs[1].num_cached_tokens = 200
    made = bins.hit_rates(runs, 0.0, 10.0)
    assert (made["rate"], made["total"]) == ([0, pytest.approx(2 / 3, abs=1e-4)], [0, 0.5])


def test_marks_count_all_preemptions() -> None:
    run = RequestRun("a", 0, 1, moments=[Moment(t, "preempt", "") for t in (1.0, 1.001, 7.0)] + [Moment(2, "wait", "")])
    assert bins.preemption_marks([run], 10.0) == [(1000000, 2), (7000000, 1)]
