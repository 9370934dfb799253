"""What is drawn: arrival processes, length distributions, ServeGen's clients, synthetic workloads."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.launch.replay.formats.arrivals import draw_gaps, parse_arrivals, parse_lengths
from quire.launch.replay.formats.detect import load_workload
from quire.launch.replay.formats.options import LoadOptions
from quire.launch.replay.formats.servegen import Window, draw_times, parse_histogram
from quire.launch.replay.workload.workload import Workload, block_names
from quire.protocol.errors import ConfigError

DATA = Path(__file__).parents[2] / "data"


def load(path: Path | str, **options: Any) -> Workload:
    return load_workload(Path(path), "auto", LoadOptions(**options))


def refusal(path: Path | str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, **options)
    return str(caught.value)


class TestArrivals:
    @pytest.mark.parametrize("family", ["gamma", "weibull"])
    @pytest.mark.parametrize("cv", [0.3, 1.0, 2.5])
    def test_gaps_have_mean_1_and_the_variation(self, family: str, cv: float) -> None:
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
        ("spec", "said"),
        [
            ("poison:3", "did you mean poisson?"),
            ("gamma:3", "give gamma:RATE:CV"),
            ("poisson:0", "must be a number above 0"),
            ("poisson:nan", "must be a number above 0"),
            ("poisson:fast", "must be a number above 0"),
            ("burst:3:1.5", "whole number"),
            ("at-once:3", "give at-once"),
        ],
    )
    def test_refusals(self, spec: str, said: str) -> None:
        with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
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
    def test_refusals(self, spec: str) -> None:
        with pytest.raises(ConfigError, match="input"):
            parse_lengths(spec, "input", 100)


@pytest.fixture
def servegen(tmp_path: Path) -> Path:
    """Client 2 is idle at first, and then wild; client 10 goes on all the time."""
    (tmp_path / "chunk-2-trace.csv").write_text("0,0,0,,0,0\n600,0,0,,0,0\n1200,0.5,4.0,Weibull,0.4,0.1\n")
    (tmp_path / "chunk-10-trace.csv").write_text("0,0.1,1.0,Gamma,1,10\n600,0.2,1.0,Gamma,1,5\n1200,0.1,1,Gamma,1,5\n")
    (tmp_path / "chunk-2-dataset.json").write_text(
        '{"0": {"input_tokens": "{5: 1.0}", "output_tokens": "{6: 0.5, 0: 0.5}"}}'
    )
    (tmp_path / "chunk-10-dataset.json").write_text(
        '{\n"0": {"input_tokens": "{100: 0.25, 200: 0.75}", "output_tokens": "{7: 1}", "reason_ratio": "{0.1: 1.0}"},\n'
        '"600": {"input_tokens": "{300: 1.0}", "output_tokens": "{8: 2.0}"}}'
    )
    return tmp_path


class TestServeGen:
    def test_each_window_has_its_mean_number_of_requests(self, servegen: Path) -> None:
        workload = load(servegen)
        counts = np.histogram([call.arrival for call in workload.calls], [0, 600, 1200, 1800, 3600])[0]
        assert counts.tolist() == [60, 120, 360, 0]
        assert {c.num_prompt_tokens for c in workload.calls if c.arrival < 600} == {100, 200}
        assert {c.num_prompt_tokens for c in workload.calls if 600 <= c.arrival < 1200} == {300}
        assert {c.num_output_tokens for c in workload.calls if c.num_prompt_tokens == 5} == {1, 6}
        assert any("2 clients drawn with seed 0" in note for note in workload.notes)

    def test_the_draw_depends_on_the_seed_and_not_on_the_window(self, servegen: Path) -> None:
        every = load(servegen)
        told = [(call.request_id, call.num_prompt_tokens) for call in every.calls if 700 <= call.arrival < 1300]
        cut = load(servegen, start=700.0, duration=600.0)
        assert [(call.request_id, call.num_prompt_tokens) for call in cut.calls] == told
        assert all(0 <= call.arrival < 600 for call in cut.calls)
        assert [c.arrival for c in load(servegen).calls] == [c.arrival for c in every.calls]
        assert [c.arrival for c in load(servegen, seed=1).calls] != [c.arrival for c in every.calls]

    def test_rate_multiplies_each_window_s(self, servegen: Path) -> None:
        workload = load(servegen, rate=2.5)
        counts = np.histogram([call.arrival for call in workload.calls], [0, 600, 1200, 1800])[0]
        assert counts.tolist() == [150, 300, 900]

    def test_one_file_is_its_client(self, servegen: Path) -> None:
        for name in ("chunk-10-trace.csv", "chunk-10-dataset.json"):
            assert len(load(servegen / name).calls) == 60 + 120 + 60

    def test_windows_are_as_bursty_as_they_say(self) -> None:
        times = draw_times(Window(600, 100.0, 2.0, "gamma"), 1.0, np.random.default_rng(0))
        gaps = np.diff(times)
        assert len(times) == 60_000 and times[0] >= 600 and times[-1] < 1200
        assert gaps.std() / gaps.mean() == pytest.approx(2, rel=0.05)
        wildest = draw_times(Window(0, 1 / 600, 1000.0, "gamma"), 1.0, np.random.default_rng(5))
        assert len(wildest) == 1 and 0 <= wildest[0] <= 600

    def test_histograms(self) -> None:
        histogram = parse_histogram("{3: 0.0, 5: 1.0, 9: 3.0}", "x")
        drawn = histogram.draw(40_000, np.random.default_rng(0)).tolist()
        assert set(drawn) == {5, 9}
        assert drawn.count(9) / len(drawn) == pytest.approx(0.75, abs=0.01)
        for bad in ("", "{}", "{5}", "{5: nan}", "{-1: 1.0}", "{5: -1.0}", "{5: 0.0}", "{99999999999: 1.0}", "{a: 1}"):
            with pytest.raises(ConfigError, match="where"):
                parse_histogram(bad, "where")

    def test_bad_files(self, servegen: Path) -> None:
        trace = servegen / "chunk-2-trace.csv"
        for line, said in (
            ("600,1,1,Normal,1,1", "must be Gamma or Weibull"),
            ("600,1,0,Gamma,1,1", "must be Gamma or Weibull"),
            ("600,-1,1,Gamma,1,1", "`rate` must be a number"),
            ("600,nan,1,Gamma,1,1", "`rate` must be a number"),
            ("600,1,1", "3 fields"),
            ("0,1,1,Gamma,1,1", "does not come after"),
        ):
            trace.write_text(f"0,0.5,1,Gamma,1,1\n{line}\n")
            message = refusal(servegen)
            assert message.startswith(f"{trace}:2: ") and said in message
            assert len(load(trace, lenient=True).calls) == 300
        trace.write_text("1200,0.5,1,Gamma,1,1\n")
        assert "the first is at 1200 s" in refusal(trace, duration=600.0)
        assert "take a shorter duration or a lower rate" in refusal(trace, rate=1e6)
        (servegen / "chunk-2-dataset.json").write_text('{"0": {"input_tokens": "{5: 1.0}"}}')
        assert "`output_tokens` is missing" in refusal(trace)
        (servegen / "chunk-2-dataset.json").write_text('{"0": ')
        assert str(servegen / "chunk-2-dataset.json") in refusal(trace)
        (servegen / "chunk-2-dataset.json").unlink()
        assert "chunk-2-dataset.json is missing" in refusal(servegen)


class TestSynthetic:
    def test_what_is_asked_for_is_drawn_and_said(self) -> None:
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

    def test_lengths_of_another_trace(self) -> None:
        excerpt = DATA / "vidur_excerpt.csv"
        pairs = {(call.num_prompt_tokens, call.num_output_tokens) for call in load(excerpt).calls}
        calls = load(f"synthetic:requests=200,input=file:{excerpt},output=file:{excerpt}").calls
        assert {(call.num_prompt_tokens, call.num_output_tokens) for call in calls} <= pairs
        mixed = load(f"synthetic:requests=200,input=file:{excerpt},output=fixed:2").calls
        assert {call.num_prompt_tokens for call in mixed} <= {n_in for n_in, _ in pairs}

    @pytest.mark.parametrize(
        ("spec", "said"),
        [
            ("request=3", "did you mean requests?"),
            ("requests", "is not KEY=VALUE"),
            ("requests=0", "whole number from 1"),
            ("requests=99999999999", "whole number from 1"),
            ("prefix_groups=3", "go together"),
            ("input=zipf:3", "unknown distribution"),
            ("input=file:/none", "no such file"),
        ],
    )
    def test_refusals(self, spec: str, said: str) -> None:
        assert said in refusal(f"synthetic:{spec}")


def test_the_weibull_s_shape_is_found_at_both_ends() -> None:
    for cv in (0.01, 20.0):
        gaps = draw_gaps("weibull", cv, 100_000, np.random.default_rng(0))
        assert math.isfinite(gaps.sum()) and (gaps >= 0).all()
