"""Converters of public traces: the requests that ``quire replay`` reads from their output, and errors for invalid
input.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from quire.replay.formats.detect import load_workload
from quire.replay.formats.options import LoadOptions
from quire.replay.workload.workload import Call, block_names

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "trace_converters"))

import servegen
import vidur

MAINS = {"servegen": servegen.main, "vidur": vidur.main}
EXCERPT = Path(__file__).parents[1] / "data" / "vidur_excerpt.csv"


class Converters:
    def __init__(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._out, self._monkeypatch = out, monkeypatch

    def calls(self, name: str, source: Path, *flags: str) -> list[Call]:
        self._monkeypatch.setattr(sys, "argv", [name, str(source), str(self._out), *flags])
        MAINS[name]()
        workload = load_workload(self._out, "auto", LoadOptions())
        assert workload.format == "mooncake"
        return workload.calls

    def refusal(self, name: str, source: Path, *flags: str) -> str:
        with pytest.raises(SystemExit) as caught:
            self.calls(name, source, *flags)
        return str(caught.value)


@pytest.fixture
def converters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Converters:
    return Converters(tmp_path / "out.jsonl", monkeypatch)


@pytest.fixture
def traces() -> Path:
    folder = os.environ.get("QUIRE_TRACES")
    if not folder:
        pytest.skip("QUIRE_TRACES is not set to the directory of traces")
    return Path(folder)


class TestVidur:
    def test_excerpt(self, converters: Converters) -> None:
        calls = converters.calls("vidur", EXCERPT, "--arrivals", "constant:2")
        assert [call.arrival for call in calls] == [i / 2 for i in range(30)]
        assert (calls[0].num_prompt_tokens, calls[0].num_output_tokens) == (3772, 54)
        assert len({block_names(call, 16)[:16] for call in calls}) == 30, "no prompt shares a prefix with another"
        assert {call.arrival for call in converters.calls("vidur", EXCERPT)} == {0}

    def test_invalid_line_and_arrival_process(self, converters: Converters, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("num_prefill_tokens,num_decode_tokens\n5,6\n5,1e3\n")
        assert f"{tmp_path / 'a.csv'}:3: `num_decode_tokens` must be" in converters.refusal("vidur", tmp_path / "a.csv")
        assert "did you mean poisson?" in converters.refusal("vidur", EXCERPT, "--arrivals", "poison:3")

    def test_whole_trace(self, converters: Converters, traces: Path) -> None:
        calls = converters.calls("vidur", traces / "vidur")
        for expected, values in (
            ((2588.1, 2730, 3702, 3934, 4054), [call.num_prompt_tokens for call in calls]),
            ((291.4, 167, 372, 3273, 4056), [call.num_output_tokens for call in calls]),
        ):
            shares = np.percentile(values, [50, 90, 99, 100], method="inverted_cdf").tolist()
            assert (round(sum(values) / len(values), 1), *shares) == expected


@pytest.fixture
def clients(tmp_path: Path) -> Path:
    """Client 2 is idle at first and then bursty; client 10 is active all the time."""
    folder = tmp_path / "clients"
    folder.mkdir()
    (folder / "chunk-2-trace.csv").write_text("0,0,0,,0,0\n600,0,0,,0,0\n1200,0.5,4.0,Weibull,0.4,0.1\n")
    (folder / "chunk-10-trace.csv").write_text("0,0.1,1.0,Gamma,1,10\n600,0.2,1.0,Gamma,1,5\n1200,0.1,1,Gamma,1,5\n")
    (folder / "chunk-2-dataset.json").write_text(
        '{"0": {"input_tokens": "{5: 1.0}", "output_tokens": "{6: 0.5, 0: 0.5}"}}'
    )
    (folder / "chunk-10-dataset.json").write_text(
        '{"0": {"input_tokens": "{100: 0.25, 200: 0.75}", "output_tokens": "{7: 1}", "reason_ratio": "{0.1: 1.0}"},\n'
        '"600": {"input_tokens": "{300: 1.0}", "output_tokens": "{8: 2.0}"}}'
    )
    return folder


class TestServeGen:
    def test_each_window_has_its_mean_number_of_requests(self, converters: Converters, clients: Path) -> None:
        for rate in (1.0, 2.5):
            calls = converters.calls("servegen", clients, "--rate", str(rate))
            counts = np.histogram([call.arrival for call in calls], [0, 600, 1200, 1800, 3600])[0]
            assert counts.tolist() == [60 * rate, 120 * rate, 360 * rate, 0]
        assert {c.num_prompt_tokens for c in calls if c.arrival < 600} == {100, 200}
        assert {c.num_prompt_tokens for c in calls if 600 <= c.arrival < 1200} == {300}
        assert {c.num_output_tokens for c in calls if c.num_prompt_tokens == 5} == {1, 6}
        assert len({block_names(call, 4)[:16] for call in calls}) == len(calls)

    def test_draw_depends_on_the_seed_and_not_on_the_selection(self, converters: Converters, clients: Path) -> None:
        def drawn(*flags: str) -> list[tuple[int, float, int, int]]:
            calls = converters.calls("servegen", clients, *flags)
            return [(c.number, c.arrival, c.num_prompt_tokens, c.num_output_tokens) for c in calls]

        every = drawn()
        cut = drawn("--start", "700", "--duration", "600")
        assert [each[2:] for each in cut] == [each[2:] for each in every if 700 <= each[1] < 1300]
        assert 0 <= cut[0][1] < cut[-1][1] < 600
        assert drawn() == every != drawn("--seed", "1")

    def test_gaps_have_the_windows_coefficient_of_variation(self, converters: Converters, clients: Path) -> None:
        (clients / "chunk-2-trace.csv").write_text("0,0,0,,0,0\n")
        (clients / "chunk-10-trace.csv").write_text("600,100,2.0,Gamma,1,10\n")
        gaps = np.diff([call.arrival for call in converters.calls("servegen", clients)])
        assert len(gaps) == 59_999
        assert gaps.std() / gaps.mean() == pytest.approx(2, rel=0.05)

    @pytest.mark.parametrize(
        "line",
        ["600,1,1,Normal,1,1", "600,1,0,Gamma,1,1", "600,-1,1,Gamma,1,1", "600,nan,1,Gamma", "600,1,1", "0,1,1,Gamma"],
    )
    def test_invalid_windows(self, converters: Converters, clients: Path, line: str) -> None:
        (clients / "chunk-2-trace.csv").write_text(f"0,0.5,1,Gamma,1,1\n{line}\n")
        assert f"{clients / 'chunk-2-trace.csv'}:2: " in converters.refusal("servegen", clients)

    @pytest.mark.parametrize("histogram", ["", "{}", "{5}", "{5: nan}", "{-1: 1.0}", "{5: -1.0}", "{5: 0.0}", "{a: 1}"])
    def test_invalid_histograms(self, converters: Converters, clients: Path, histogram: str) -> None:
        dataset = f'{{"0": {{"input_tokens": "{histogram}", "output_tokens": "{{5: 1}}"}}}}'
        (clients / "chunk-2-dataset.json").write_text(dataset)
        assert repr(histogram) in converters.refusal("servegen", clients)

    def test_invalid_directories(self, converters: Converters, clients: Path, tmp_path: Path) -> None:
        assert "must be above 0" in converters.refusal("servegen", clients, "--start", "1e6")
        assert "at most 5000000" in converters.refusal("servegen", clients, "--rate", "1e6")
        dataset = clients / "chunk-2-dataset.json"
        for text, error in (('{"0": {}}', "'input_tokens' is missing"), ('{"0": ', f"{dataset}: "), ("{}", "no hist")):
            dataset.write_text(text)
            assert error in converters.refusal("servegen", clients)
        dataset.unlink()
        assert "chunk-2-dataset.json is missing" in converters.refusal("servegen", clients)

    @pytest.mark.parametrize("name", ["language_m-small", "reason_deepseek-r1"])
    def test_whole_traces(self, converters: Converters, traces: Path, name: str) -> None:
        window = ("--start", "36000", "--duration", "1200")
        once = len(converters.calls("servegen", traces / "servegen" / name, *window, "--rate", "0.5"))
        assert len(converters.calls("servegen", traces / "servegen" / name, *window)) == pytest.approx(2 * once, abs=8)
