"""Synthetic workloads: arrival processes, length distributions, prefix groups."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.protocol.errors import ConfigError
from quire.replay.formats.arrivals import draw_gaps, parse_arrivals, parse_lengths
from quire.replay.formats.detect import load_workload
from quire.replay.formats.options import LoadOptions
from quire.replay.workload.workload import Workload, block_names

DATA = Path(__file__).parents[1] / "data"


def load(path: Path | str, **options: Any) -> Workload:
    return load_workload(Path(path), "auto", LoadOptions(**options))


def refusal(path: Path | str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, **options)
    return str(caught.value)


class TestArrivals:
    @pytest.mark.parametrize("family", ["gamma", "weibull"])
    @pytest.mark.parametrize("cv", [0.3, 1.0, 2.5])
    def test_gaps_have_mean_1_and_given_variation(self, family: str, cv: float) -> None:
        gaps = draw_gaps(family, cv, 400_000, np.random.default_rng(1))
        assert gaps.mean() == pytest.approx(1, rel=0.02)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.04)

    @pytest.mark.parametrize("spec", ["poisson:4", "gamma:4:2", "weibull:4:0.5", "constant:4", "burst:4:8"])
    def test_processes_have_their_rate(self, spec: str) -> None:
        times = parse_arrivals(spec).times(40_000, np.random.default_rng(2))
        assert times[0] == 0 and (np.diff(times) >= 0).all()
        assert 40_000 / times[-1] == pytest.approx(4, rel=0.05)
        assert str(parse_arrivals(spec)) == spec

    def test_bursts(self) -> None:
        times = parse_arrivals("burst:4:3").times(7, np.random.default_rng(0))
        assert times.tolist() == [0, 0, 0, 0.75, 0.75, 0.75, 1.5]
        assert parse_arrivals("at-once").times(3, np.random.default_rng(0)).tolist() == [0, 0, 0]
        assert len(parse_arrivals("poisson:1").times(0, np.random.default_rng(0))) == 0

    @pytest.mark.parametrize(
        ("spec", "expected"),
        [
            ("poison:3", "did you mean poisson?"),
            ("gamma:3", "must be gamma:RATE:CV"),
            ("poisson:0", "must be a number above 0"),
            ("poisson:nan", "must be a number above 0"),
            ("poisson:fast", "must be a number above 0"),
            ("burst:3:1.5", "whole number"),
            ("at-once:3", "must be at-once"),
        ],
    )
    def test_rejects_invalid_specs(self, spec: str, expected: str) -> None:
        with pytest.raises(ConfigError, match=expected.replace("?", r"\?")):
            parse_arrivals(spec)


class TestLengths:
    def test_distributions(self) -> None:
        random = np.random.default_rng(3)
        assert set(parse_lengths("7", "input", 100)(5, random).tolist()) == {7}
        assert set(parse_lengths("uniform:3:5", "input", 100)(200, random).tolist()) == {3, 4, 5}
        drawn = parse_lengths("lognormal:500:0.8", "input", 10**6)(200_000, random)
        assert drawn.mean() == pytest.approx(500, rel=0.02)
        assert drawn.std() / drawn.mean() == pytest.approx(0.8, rel=0.03)
        clipped = parse_lengths("lognormal:2:3", "input", 9)(1000, random)
        assert (clipped.min(), clipped.max()) == (1, 9)

    @pytest.mark.parametrize(
        "spec",
        ["fixed:0", "fixed:-1", "fixed:1.5", "fixed:101", "uniform:5:3", "uniform:1:101", "zipf:3", "uniform:3", ""],
    )
    def test_rejects_invalid_specs(self, spec: str) -> None:
        with pytest.raises(ConfigError, match="input"):
            parse_lengths(spec, "input", 100)


class TestSynthetic:
    def test_draws_requested_workload_with_a_note(self) -> None:
        spec = "synthetic:requests=50,arrivals=constant:5,input=uniform:10:20,output=3"
        workload = load(spec)
        assert [call.arrival for call in workload.calls] == pytest.approx([i / 5 for i in range(50)])
        assert {call.num_output_tokens for call in workload.calls} == {3}
        assert 10 <= min(c.num_prompt_tokens for c in workload.calls) < max(c.num_prompt_tokens for c in workload.calls)
        assert "arrivals=constant:5" in workload.notes[0] and "seed 0" in workload.notes[0]
        assert repr(load(spec).calls) == repr(workload.calls)
        assert repr(load(spec, seed=1).calls) != repr(workload.calls)
        assert load(spec, rate=2.0).calls[-1].arrival == pytest.approx(4.9)

    def test_groups_share_their_prefix(self) -> None:
        calls = load("synthetic:requests=60,input=fixed:9,output=4,prefix_groups=3,prefix_tokens=40").calls
        assert {call.num_prompt_tokens for call in calls} == {49}
        first = {block_names(call, 8)[: 5 * 16] for call in calls}
        assert len(first) == 3, "five blocks of the prefix"
        assert len({block_names(call, 8)[5 * 16 : 6 * 16] for call in calls}) == 60

    def test_draws_lengths_from_another_trace(self) -> None:
        excerpt = DATA / "azure_excerpt.csv"
        pairs = {(call.num_prompt_tokens, call.num_output_tokens) for call in load(excerpt).calls}
        calls = load(f"synthetic:requests=200,input=file:{excerpt},output=file:{excerpt}").calls
        assert {(call.num_prompt_tokens, call.num_output_tokens) for call in calls} <= pairs
        mixed = load(f"synthetic:requests=200,input=file:{excerpt},output=fixed:2").calls
        assert {call.num_prompt_tokens for call in mixed} <= {n_in for n_in, _ in pairs}

    @pytest.mark.parametrize(
        ("spec", "expected"),
        [
            ("request=3", "did you mean requests?"),
            ("requests", "is not KEY=VALUE"),
            ("requests=0", "whole number from 1"),
            ("requests=99999999999", "whole number from 1"),
            ("prefix_groups=3", "must both be 0"),
            ("input=zipf:3", "unknown distribution"),
            ("input=file:/none", "not found"),
        ],
    )
    def test_rejects_invalid_specs(self, spec: str, expected: str) -> None:
        assert expected in refusal(f"synthetic:{spec}")


def test_finds_weibull_shape_at_both_ends() -> None:
    for cv in (0.01, 20.0):
        gaps = draw_gaps("weibull", cv, 100_000, np.random.default_rng(0))
        assert math.isfinite(gaps.sum()) and (gaps >= 0).all()
