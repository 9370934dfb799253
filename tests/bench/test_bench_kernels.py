"""``quire bench kernels`` from end to end with tiny sizes, and the arithmetic of its figures."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.bench.kernels import ReceivedResults, _report, run
from quire.bench.measure.shapes import find_shape
from quire.bench.worker.cpu_attention import gather_and_attend, spec_of
from quire.bench.worker.gpu_attention import prefill_flops
from quire.bench.worker.gpu_step import covered_share, floor_s
from quire.bench.worker.paged_case import HeadShape, make_case
from quire.bench.worker.record import Bench, Limits, OutOfTime
from quire.bench.worker.sections import SECTIONS, choose
from quire.bench.worker.timing import CallTimer
from quire.launch.cli import main
from quire.protocol.errors import ConfigError

CPU = torch.device("cpu")
LIMITS = Limits(1e9, 2e9, {torch.bfloat16: 1e12})


def _bench(deadline: float = float("inf")) -> Bench:
    return Bench(CPU, CallTimer(CPU, 0.0), "dry", {}, LIMITS, deadline)


def _dry_run(folder: Path) -> dict[str, Any]:
    file = folder / "found.json"
    command = [sys.executable, "-P", "-m", "quire.launch.cli", "bench", "kernels", "--dry-run", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads(file.read_text())
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.full
def test_dry_run_of_all_sections(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    found = _dry_run(tmp_path)
    assert found["benchmark"] == "kernels" and found["settings"]["dry_run"]
    assert "figures are meaningless" in found["notes"][-1]
    sections = found["results"]["sections"]
    assert list(sections) == [section.name for section in SECTIONS]
    for name, section in sections.items():
        assert section["error"] == "", name
        assert section["rows"], name
        for row in section["rows"]:
            assert row["error"] == "" and row["us"] > 0, (name, row)
        assert any(row["implementation"].startswith("quire") for row in section["rows"]), name
    assert {row["case"] for row in found["results"]["limits"]} >= {"read 0 MiB", "copy 0 MiB"}


@pytest.mark.full
def test_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "kernels", "--device", "cpu", "--sections", "cpu_magic"])
    assert "no section 'cpu_magic' for this device; available: cpu_attention" in capsys.readouterr().err


def test_time_limit_of_0_is_refused() -> None:
    with pytest.raises(ConfigError, match="--time-limit must be above 0"):
        run(argparse.Namespace(time_limit=0.0))


def test_sections_of_another_device_are_not_chosen() -> None:
    assert {section.device for section in choose([], {"cpu"})} == {"cpu"}
    assert [section.name for section in choose(["cpu_prefill"], {"cpu"})] == ["cpu_prefill"]
    with pytest.raises(ValueError, match="no section 'decode_step'"):
        choose(["decode_step"], {"cpu"})


def test_failure_is_a_row_and_others_continue() -> None:
    bench = _bench()

    def fail() -> None:
        raise RuntimeError("no such\nkernel")

    bench.measure("case", "quire", lambda: [fail], read=8)
    bench.measure("case", "torch", lambda: [lambda: None], read=8)
    bad, good = bench.rows
    assert bad.us is None and bad.error == "RuntimeError: no such kernel"
    assert good.us is not None and good.figures["of_read"] == pytest.approx(8 / (good.us * 1e-6) / 1e9)


def test_nothing_starts_after_the_deadline() -> None:
    bench = _bench(deadline=0.0)
    with pytest.raises(OutOfTime):
        bench.measure("case", "quire", lambda: [lambda: None])
    assert bench.rows == []


def test_figures_are_ratios_to_the_limits() -> None:
    row = _bench().measure("case", "quire", lambda: [lambda: None], moved=2**20, flops=1e6, dtype=torch.bfloat16)
    assert row.us is not None
    seconds = row.us * 1e-6
    assert row.figures["of_copy"] == pytest.approx(2**20 / seconds / 2e9)
    assert row.figures["of_matmul"] == pytest.approx(1e6 / seconds / 1e12)


def test_prefill_flops_count_visible_keys() -> None:
    heads = HeadShape(4, 2, 8)
    pairs = sum(min(10, 7 + i) for i in range(4))  # queries at 6, 7, 8, 9 of 10 tokens
    assert prefill_flops(1, 4, 10, heads) == 4 * pairs * 4 * 8


def test_floor_of_a_step() -> None:
    """Llama 3.1 8B in bfloat16 reads 7.5 billion weights, all but the embedding, and 128 KiB of KV cache per token."""
    model = find_shape("llama-3.1-8b")
    limits = Limits(4.3e12, 4e12, {torch.bfloat16: 790e12})
    one = floor_s(model, 1, 1024, torch.bfloat16, limits)
    assert one == pytest.approx((15.01e9 + 1024 * 2**17) / 4.3e12, rel=1e-3)
    many = floor_s(model, 1024, 1024, torch.bfloat16, limits)
    assert many == pytest.approx(2 * 7.504e9 * 1024 / 790e12 + 1024 * 1024 * 2**17 / 4.3e12, rel=1e-3)


def test_covered_share_counts_overlaps_once() -> None:
    assert covered_share([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (8.0, 10.0)]) == pytest.approx(0.7)


def test_gather_loop_equals_the_cpu_backend() -> None:
    from quire.worker_proc.attention.cpu import CpuBackend

    heads = HeadShape(4, 2, 16, 8)
    case = make_case([1, 1, 5], [19, 8, 5], heads, torch.float32, CPU, 2, head_major=True)
    for table in case.tables:
        backend = CpuBackend(native=False)
        plan = backend.plan(case.batch(table))
        expected = backend.attend(case.query, case.kv_cache, plan, spec_of(heads), None)
        torch.testing.assert_close(gather_and_attend(case, table), expected)


def test_crashed_section_is_in_the_notes() -> None:
    found = ReceivedResults(plan=["ops"], device={"type": "cpu"})
    found.sections["ops"] = {"title": "", "rows": [], "error": "process exited with status 3", "seconds": 0.0}
    found.limits = [{"case": "read", "implementation": "torch", "us": 1.0, "figures": {}, "error": ""}]
    args = argparse.Namespace(quick=False, dry_run=False, time_limit=None)
    assert _report(args, found).notes == ["ops: process exited with status 3"]


CRASHING = """#!{python} -P
import json, os, sys
sys.stdin.read()
rest = sys.argv[sys.argv.index("--sections") + 1].split(",") if "--sections" in sys.argv else ["a", "b", "c", "d"]
row = {{"case": "x", "implementation": "quire", "us": 1.0, "figures": {{}}, "error": ""}}
print(json.dumps({{"plan": rest, "device": {{"type": "cuda"}}, "limits": [row]}}), flush=True)
for name in rest:
    if name == "b":
        os.kill(os.getpid(), 11)
    print(json.dumps({{"section": name, "title": name, "rows": [row], "error": "", "seconds": 0.1}}), flush=True)
    if name == "c":
        sys.exit(3)
"""


def test_crash_ends_only_one_section(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The process crashes in section b, and exits with DEVICE_LOST after c."""
    program = tmp_path / "python"
    program.write_text(CRASHING.format(python=sys.executable))
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    main(["bench", "kernels", "--device", "cuda"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name: s["error"] for name, s in found["results"]["sections"].items()} == {
        "a": "",
        "b": "process exited with status -11",
        "c": "",
        "d": "",
    }
    assert found["notes"] == ["b: process exited with status -11"]
