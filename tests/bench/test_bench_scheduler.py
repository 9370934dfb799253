"""``quire bench scheduler`` with small sizes: its sections, its worker, and a script as the peer."""

import argparse
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.bench.peers import PeerFailed, run_json
from quire.bench.scheduler import scheduler as scheduler_command
from quire.bench.scheduler.churn_trace import churn_trace
from quire.bench.scheduler.scheduler import SHOWN, parse_sections, run
from quire.bench.scheduler.scheduler_churn import ChurnLoad, ChurnSizes, load_churn_trace
from quire.bench.scheduler.scheduler_forks import ForkSizes
from quire.bench.scheduler.scheduler_layouts import LayoutSizes
from quire.bench.scheduler.scheduler_loads import LoadSizes, measure_loads
from quire.bench.scheduler.scheduler_peer import SchedulerPeer, median_of, one_core, ratio_of
from quire.bench.scheduler.scheduler_rig import BatchWorker, Rig, summary
from quire.bench.scheduler.scheduler_sections import SECTIONS, Sizes, measure
from quire.bench.scheduler.scheduler_tiers import TierSizes
from quire.bench.scheduler.scheduler_trace import TraceSizes
from quire.launch.cli import main
from quire.protocol.errors import ConfigError
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.worker_messages import NewRequestData, SchedulerOutput

LOAD = ChurnLoad(steps=40, rate=0.5, initial=12, num_blocks=400, max_num_seqs=8)
TINY = Sizes(
    steady=(1, 4),
    steps=6,
    warm_up=2,
    busy=(0, 3),
    admission_len=64,
    admissions=7,
    conversation_len=1600,
    turn_len=40,
    turns=2,
    hashing=((64, 3), (8192, 2)),
    batch=4,
    wire_steps=3,
    repeats=10,
    new_prompts=(2, 1024),
    memory_blocks=256,
    churn=ChurnSizes(usual=LOAD, large=LOAD),
    loads=LoadSizes(gb_per_s=(1.0, 10.0), found=(256, 8192), depths=(0, 4), first=30, visits=1, pairs=1),
    tiers=TierSizes(batch=16, prompt_len=32, units=1, rounds=4, load_len=256, loads=3),
    forks=ForkSizes(lengths=(20, 90), children=(1, 3), rounds=4, samples=5, prompt_len=100),
    layouts=LayoutSizes(batch=16, prompt_len=32, window=20, units=1, rounds=2),
    trace=TraceSizes(batch=16, prompt_len=32, steps=32, chunks=2, names=("trace.jsonl",)),
)
A_SUMMARY = {"n", "mean_us", "median_us", "p99_us", "max_us"}


def section(name: str) -> dict[str, Any]:
    found = measure(name, TINY)
    assert found["env"]["clock_call_us"] > 0
    assert not gc.get_freeze_count() and gc.isenabled()
    json.dumps(found, allow_nan=False)
    figures: dict[str, Any] = found[name]
    assert figures.pop("_section_seconds") >= 0
    return figures


class TestSections:
    @pytest.mark.full
    def test_steady(self) -> None:
        found = section("steady")
        assert set(found) == {"sync_N1", "sync_N4", "async_N1", "async_N4"}
        assert all(set(part) == A_SUMMARY and part["n"] == 6 for one in found.values() for part in one.values())

    @pytest.mark.full
    def test_admission(self) -> None:
        hits = {name: one.get("hit_tokens") for name, one in section("admission").items()}
        assert hits.pop("next_turn_100k", 0) != 0 and hits.pop("lookup_100k") == 1584
        assert hits == {f"busy{busy}_hit{hit}": 48 if hit else 0 for busy in (0, 3) for hit in (0, 100)}

    def test_hashing(self) -> None:
        assert section("hashing")["sha256_64tok"]["us_per_1k_tokens"] > 0

    @pytest.mark.full
    def test_churn(self) -> None:
        found = section("churn")
        assert set(found) == {"sync", "async", "async_8"}
        arrivals = sum(map(len, churn_trace(11, LOAD.steps, LOAD.rate, LOAD.initial)))
        for one in found.values():
            assert one["requests_added"] == arrivals
            assert 0 < one["mean_running"] <= LOAD.max_num_seqs
            assert one["steps_per_s_incl_request_build"] > 0 and set(one["both"]) == A_SUMMARY

    @pytest.mark.full
    def test_wire_and_outputs(self) -> None:
        found = section("wire")
        assert set(found) == {"decode_N4", "new2_1k"}
        for one in (*found.values(), section("outputs")):
            assert set(one) == {"bytes", "bytes_max", "encode", "decode"}
        assert 2048 * 2 <= found["new2_1k"]["bytes"] == found["new2_1k"]["bytes_max"]

    @pytest.mark.full
    def test_memory(self) -> None:
        found = section("memory")
        assert found["blocks"] == 256 and 0 < found["cached_blocks"] < 256

    @pytest.mark.full
    def test_trace(self) -> None:
        found = section("trace")["trace.jsonl"]
        assert found["step_without_us"] > 0 and 150 < found["line_bytes"] < 500 and found["lost_lines"] == 0

    @pytest.mark.full
    def test_layouts(self) -> None:
        found = section("layouts")
        assert list(found) == ["full_attention", "one_window", "two_groups", "seven_groups"]
        assert found["full_attention"]["ratio"] == 1 and all(one["step_us"] > 0 for one in found.values())

    def test_loads(self) -> None:
        found = section("loads")
        assert found["num_cells"] == 2 * 5 * 2 * 3 and set(found["choices"]) == {"load", "compute", "split"}
        assert found["regret_percent"] < 20 and found == section("loads"), "every run gives the same figures"

    @pytest.mark.full
    def test_pairs(self) -> None:
        """Each request beside both ways of serving it, also with costs of an earlier start under another load."""
        sizes = LoadSizes(gb_per_s=(0.01, 0.1, 1.0, 10.0), found=(256, 2048, 8192), depths=(0,), first=1, visits=2)
        found = measure_loads(sizes)
        assert found["good_pairs_percent"] >= 95
        assert found["good_pairs_after_start_percent"] >= 95

    @pytest.mark.full
    def test_tiers(self) -> None:
        found = section("tiers")
        assert found["loaded_per_prompt"] == 15 and found["us_per_loaded_block"] > 0
        assert found["idle"]["ratio"] > 0 and 0 < found["storing"]["stored_per_step"] <= 2

    @pytest.mark.full
    def test_forks(self) -> None:
        """Five samples of 100 tokens: six full blocks once, and one or two of each sample."""
        found = section("forks")
        assert found["children_3"]["20_tokens_us"] > 0
        forks, requests = found["forks"], found["requests"]
        assert (forks["computed_tokens"], forks["kv_blocks"]) == (100, 6 + 5)
        assert requests["computed_tokens"] > 100 and requests["request_bytes"] > forks["request_bytes"]

    def test_each_section_has_its_table(self) -> None:
        assert set(SHOWN) == set(SECTIONS)


class TestWorker:
    @pytest.mark.parametrize("async_scheduling", [False, True])
    def test_scheduler_accepts_its_results(self, async_scheduling: bool) -> None:
        rig = Rig(num_blocks=40, max_num_seqs=4, max_num_batched_tokens=32, async_scheduling=async_scheduling)
        for index in range(9):
            rig.add(rig.prompt(20 * (index + 1)), max_tokens=30)
        rig.run_until_idle()
        rig.scheduler.check()
        known = rig.scheduler.statistics()
        assert known.generation_tokens == 9 * 30 and known.num_free_blocks == known.num_usable_blocks
        assert known.num_preemptions > 0

    def test_parked_rows_wait(self) -> None:
        worker = BatchWorker(4)
        rows = [NewRequestData(handle, f"r{handle}", 2, 2, 0, [1], SamplingParams(), 0) for handle in range(2)]
        worker.execute(SchedulerOutput(1, new_requests=rows, counts=[(0, 2), (1, 2)]))
        told = [worker.execute(SchedulerOutput(2, parked=[0])), worker.execute(SchedulerOutput(3, unparked=[0]))]
        assert [[] if each.handles is None else each.handles.tolist() for each in told] == [[1], [0, 1]]

    def test_refused_request_raises(self) -> None:
        with pytest.raises(RuntimeError, match="refused"):
            Rig(num_blocks=4, max_num_seqs=1).add(np.ones(1000, np.int32), 1)


def test_summary() -> None:
    assert summary([3000, 1000, 2000, 9000]) == {
        "n": 4,
        "mean_us": 3.75,
        "median_us": 3.0,
        "p99_us": 9.0,
        "max_us": 9.0,
    }


class TestTrace:
    def test_same_seed_repeats_and_rate_is_met(self) -> None:
        trace = churn_trace(1, 400, 1.5, initial=20)
        assert trace == churn_trace(1, 400, 1.5, initial=20)
        arrivals = [arrival for step in trace for arrival in step]
        assert (len(arrivals) - 20) / 400 == pytest.approx(1.5, rel=0.15)
        assert all(64 <= len(prompt) <= 1536 and 1 <= max_tokens <= 601 for prompt, max_tokens in arrivals)
        assert len({tuple(prompt[:256]) for prompt, _ in arrivals}) < 0.75 * len(arrivals)

    def test_trace_of_another_file(self, tmp_path: Path) -> None:
        path = tmp_path / "driver.py"
        path.write_text("def churn_trace(seed, steps, rate):\n    return [[([seed], steps)]]\n")
        assert load_churn_trace(path)(3, 4, 5.0) == [[([3], 4)]]

    @pytest.mark.parametrize("text", ["def (", "", "import there_is_no_such_module"])
    def test_refusals(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "driver.py"
        path.write_text(text)
        with pytest.raises(ConfigError, match="cannot import churn_trace"):
            load_churn_trace(path)


class TestTrees:
    def test_median(self) -> None:
        runs = [{"a": 1.0, "b": {"c": 5}, "s": "x"}, {"a": 3.0, "b": {"c": 1}}, {"a": 2.0, "b": {"c": 3}}]
        assert median_of(runs) == {"a": 2.0, "b": {"c": 3}, "s": "x"}

    def test_ratio_is_peer_over_own(self) -> None:
        ours = {"a": {"x": 2.0, "only": 1.0}, "zero": 0, "text": "t", "env": {"python": 1}}
        assert ratio_of(ours, {"a": {"x": 5.0}, "zero": 3, "text": "t", "env": {"python": 1}}) == {"a": {"x": 2.5}}

    @pytest.mark.full
    def test_parts_of_the_peer_are_added(self, tmp_path: Path) -> None:
        def as_ours(section: str, figures: dict[str, Any]) -> dict[str, Any]:
            driver = tmp_path / "driver.py"
            driver.write_text(f"if __name__ == '__main__': print({json.dumps({'env': {}, section: figures})!r})")
            found: dict[str, Any] = SchedulerPeer(Path(sys.executable), driver).measure(section)[section]
            return found

        admission = {
            "c": {"build_request_with_hashing": {"n": 3, "mean_us": 2.0}, "add_request": {"n": 3, "mean_us": 1.0}}
        }
        assert as_ours("admission", admission)["c"]["build_and_add"] == {"n": 3, "mean_us": 3.0}
        churn = {
            "scheduler_seconds": 2.0,
            "build_request_mean_us": 1000.0,
            "add_request_mean_us": 10.0,
            "requests_added": 2000,
            "steps": 100,
        }
        found = as_ours("churn", {"sync": churn})["sync"]
        assert (found["scheduler_seconds_incl_request_build"], found["steps_per_s_incl_request_build"]) == (4.0, 25.0)
        wire = as_ours("wire", {"d": {"pickle_bytes": 9, "pickle_encode": {"n": 1}, "pickle_decode": {"n": 2}}})["d"]
        assert (wire["bytes"], wire["encode"], wire["decode"]) == (9, {"n": 1}, {"n": 2})


def arguments(**changed: Any) -> argparse.Namespace:
    fine = {"sections": "outputs", "repeats": 1, "peer": None, "peer_driver": None, "steady": True, "json": None}
    return argparse.Namespace(**(fine | changed))


OWN = {"env": {"clock_call_us": 0.1}, "outputs": {"bytes": 700}}
"""The figures of a section that are not measured."""


class TestCommand:
    def test_sections(self) -> None:
        assert parse_sections(None) == list(SECTIONS)
        assert parse_sections("wire, steady,wire") == ["wire", "steady"]

    def test_repeats(self) -> None:
        with pytest.raises(ConfigError, match="--repeats must be from 1"):
            run(arguments(repeats=0))

    def test_missing_peer(self, tmp_path: Path) -> None:
        driver = tmp_path / "driver.py"
        driver.write_text("")
        with pytest.raises(ConfigError, match="not an executable file"):
            run(arguments(peer=tmp_path / "python", peer_driver=driver))
        with pytest.raises(ConfigError, match=r"--peer-driver .*: file not found"):
            run(arguments(peer=Path(sys.executable), peer_driver=tmp_path / "none.py"))
        with pytest.raises(ConfigError, match="--peer requires --peer-driver"):
            run(arguments(peer=Path(sys.executable)))

    def test_unknown_section_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["bench", "scheduler", "--sections", "steady,stedy"])
        assert ended.value.code == 78
        error = capsys.readouterr().err
        assert "unknown section 'stedy'; did you mean steady?" in error
        assert "known: steady, admission, hashing, churn, wire, outputs, memory" in error

    def test_report_with_a_peer(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Quire's section runs in a real process; the peer prints fixed figures."""
        driver = tmp_path / "driver.py"
        figures = {"env": {}, "outputs": {"bytes": 8000, "encode": {"mean_us": 1e6}, "decode": {"mean_us": 1e6}}}
        driver.write_text(
            f"def churn_trace(*a): ...\nif __name__ == '__main__': print('a warning', {json.dumps(figures)!r})"
        )
        path = tmp_path / "out.json"
        run(arguments(peer=Path(sys.executable), peer_driver=driver, json=path))
        *text, line = capsys.readouterr().out.splitlines()
        found = json.loads(line)
        assert json.loads(path.read_text()) == found
        assert list(found)[:3] == ["ours", "peer", "ratio"]
        assert found["ratio"]["outputs"]["bytes"] == round(8000 / found["ours"]["outputs"]["bytes"], 3)
        assert found["ratio"]["outputs"]["encode"]["mean_us"] > 1
        assert text[0].split() == ["outputs", "quire", "peer", "peer", "/", "quire"]
        assert any(row.startswith("encode.mean_us") for row in text)
        assert any("consume(), take_messages()" in row for row in text)

    def test_failed_section_keeps_the_figures_of_others(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def measure_child(command: list[str]) -> dict[str, Any]:
            if "trace" in command:
                raise PeerFailed("it needs the package zstandard")
            return OWN

        monkeypatch.setattr(scheduler_command, "run_json", measure_child)
        with pytest.raises(SystemExit) as ended:
            run(arguments(sections="outputs,trace"))
        *text, line = capsys.readouterr().out.splitlines()
        assert ended.value.code == 1 and "quire failed in trace: it needs the package zstandard" in text
        assert json.loads(line)["ours"]["outputs"] == {"bytes": 700}

    def test_failed_peer_has_its_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(scheduler_command, "run_json", lambda command: OWN)
        driver = tmp_path / "driver.py"
        driver.write_text("def churn_trace(*a): ...\nif __name__ == '__main__': raise SystemExit('it has no memory')")
        run(arguments(peer=Path(sys.executable), peer_driver=driver))
        *text, line = capsys.readouterr().out.splitlines()
        assert json.loads(line)["peer"]["outputs"] == {"error": "it has no memory"}
        assert "peer failed in outputs: it has no memory" in text

    def test_peer_sections_remain_if_the_others_fail(self, tmp_path: Path) -> None:
        """The reported error is the last line that names an exception, not what a library prints at exit."""
        driver = tmp_path / "driver.py"
        driver.write_text(
            "import atexit, sys\n"
            'if __name__ == \'__main__\': print(\'{"env": {}, "hashing": {"default_algo": "sha256"}}\')\n'
            "atexit.register(lambda: sys.stderr.write('something leaked\\n'))\n"
        )
        found = SchedulerPeer(Path(sys.executable), driver).measure("hashing")["hashing"]
        assert found["default_algo"] == "sha256"
        assert found["error"].startswith("AttributeError: ") and "Rig" in found["error"]

    def test_process_that_cannot_start(self, tmp_path: Path) -> None:
        with pytest.raises(PeerFailed, match="No such file"):
            run_json([str(tmp_path / "none")])

    def test_one_core_restores_the_affinity(self) -> None:
        before = os.sched_getaffinity(0)
        with one_core():
            assert len(os.sched_getaffinity(0)) == 1
        assert os.sched_getaffinity(0) == before
