"""Chart data: bins, histograms and hit rates have the totals of the run."""

import pytest
from replay_runs import made_up_run

from quire.replay.report import bins
from quire.replay.run.run_record import RequestRun, StepColumns


def test_few_steps_have_a_row_each() -> None:
    steps = made_up_run(1, 40).steps
    made = bins.bin_steps(steps, [])
    assert made["count"] is None
    assert made["time"] == [round(time * 1e6) for time in (*steps.begin, steps.end[-1])]
    assert made["waiting"] == [*steps.waiting, steps.waiting[-1]]


def test_bins_have_means_and_the_largest_step() -> None:
    steps = made_up_run(1, 5000).steps
    made = bins.bin_steps(steps, [], max_bins=100)
    assert len(made["time"]) <= 101
    counts = made["count"][:-1]
    assert sum(counts) == 5000
    for name in bins.STEP_COLUMNS:
        total = sum(mean * count for mean, count in zip(made[name], counts, strict=False))
        assert total == pytest.approx(sum(getattr(steps, name)), rel=1e-3)
    tokens = [prefill + decode for prefill, decode in zip(steps.prefill_tokens, steps.decode_tokens, strict=True)]
    assert max(made["largest"]) == max(tokens)


def test_pause_is_a_gap() -> None:
    steps = StepColumns()
    for begin in (0.0, 0.01, 5.0):
        steps.begin.append(begin)
        steps.end.append(begin + 0.009)
        for name in bins.STEP_COLUMNS:
            getattr(steps, name).append(1)
    made = bins.bin_steps(steps, [])
    assert made["time"] == [0, 10000, 19000, 5000000, 5009000]
    assert made["running"] == [1, 1, None, 1, 1]


def test_every_preemption_is_in_a_bin() -> None:
    made = bins.bin_steps(made_up_run(1, 5000).steps, [-1.0, 0.0, 3.0, 3.0, 50.0, 1e6], max_bins=100)
    assert sum(made["preemptions"]) == 6
    assert made["preemptions"][0] == 2


@pytest.mark.parametrize("scale", [1.01, 20, 1e6])
def test_histogram_counts_every_value(scale: float) -> None:
    runs = [[(1.0, 3), (scale / 2 + 0.5, 1), (scale, 2)], [(1.0, 1)], []]
    made = bins.histogram("e2e", "End to end", runs)
    assert [sum(each) for each in made["counts"]] == [6, 1, 0]
    assert made["edges"] == sorted(set(made["edges"]))
    assert made["log"] == (scale == 1e6)
    assert made["counts"][0][-1] == 2 or not made["log"]


def test_equal_values_are_centred_on_a_wide_axis() -> None:
    edges = bins.histogram("itl", "", [[(20.0, 9)]])["edges"]
    assert (edges[0], edges[-1]) == (15, 25)


def test_hit_rates_add_up() -> None:
    runs = [RequestRun("a", 0, 100, scheduled=1.0), RequestRun("b", 0, 300, scheduled=9.0), RequestRun("c", 0, 999)]
    runs[1].num_cached_tokens = 200
    made = bins.hit_rates(runs, 0.0, 10.0)
    assert (made["rate"], made["total"]) == ([0, pytest.approx(2 / 3, abs=1e-4)], [0, 0.5])
