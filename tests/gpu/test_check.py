"""`make gpu-check` on a machine without a GPU: the script runs, and reports failures."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

CHECK = Path(__file__).with_name("check.py")


@pytest.fixture(scope="module")
def check() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_check", CHECK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
def test_dry_run_of_everything(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-P", str(CHECK), "--dry-run", "--out", str(tmp_path / "out"), "--build", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads((tmp_path / "out" / "gpu-check.json").read_text())
    assert found["benchmark"] == "gpu-check" and found["notes"] == []
    jobs = {job["part"]: job for job in found["results"]["jobs"]}
    assert set(jobs) == {"machine", "grid", "equality", "kernels"}
    assert all(job["ok"] for job in jobs.values())
    assert all(jobs[part]["passed"] > 0 for part in ("grid", "equality", "kernels"))
    assert jobs["machine"]["found"]["torch"] and jobs["kernels"]["found"]["benchmark"] == "kernels"
    assert list(jobs["kernels"]["found"]["results"]["sections"]) == ["cpu_prefill", "cache_write"]


@pytest.mark.full
def test_job_past_its_time_limit_is_killed_and_reported(check: Any, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    place = check.Place(tmp_path, {})
    endless = check.Job("equality", "endless", [sys.executable, "-c", "while True: pass"], _keep)
    check.run_one(endless, time.monotonic() + 1.5, place)
    late = check.Job("equality", "late", [sys.executable, "-c", ""], _keep)
    check.run_one(late, time.monotonic() - 1, place)
    assert not endless.ok and endless.notes == ["status -9: no output"]
    assert late.notes == ["not started: the time limit was reached"] and not late.ok


def _keep(job: Any, status: int, output: str) -> None:
    job.ok = status == 0


@pytest.mark.parametrize(
    ("status", "output", "counts", "ok"),
    [
        (0, "....\n4 passed, 2 skipped in 1.20s", (4, 0), True),
        (1, "FAILED a.py::test_b - assert 1\n1 failed, 3 passed in 1s", (3, 1), False),
        (2, "ERROR a.py - ImportError\n1 error in 0.1s", (0, 1), False),
        (5, "3 deselected in 0.1s", (0, 0), True),
        (-9, "", (0, 0), False),
    ],
)
def test_pytest_output_is_parsed(check: Any, status: int, output: str, counts: tuple[int, int], ok: bool) -> None:
    job = check._pytest_job("grid", "a.py", [])
    job.read(job, status, output)
    assert ((job.passed, job.failed), job.ok) == (counts, ok)
    assert job.notes == [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]


def test_a_differing_case_fails_its_family(check: Any) -> None:
    job = check._equality_job("llama", "float32", False)
    good = {"case": "llama float32 graphs", "ok": True, "problem": "", "captured": True, "seconds": 1.0}
    bad = {"case": "llama float32 eager", "ok": False, "problem": "[1] instead of [2]", "captured": False}
    job.read(job, 0, f"noise\n{json.dumps(good)}\n{json.dumps(bad)}\n")
    assert (job.passed, job.failed, job.ok) == (1, 1, False)
    assert job.notes == ["llama float32 eager: [1] instead of [2]"]


def test_jobs_cover_every_grid_file_and_family(check: Any) -> None:
    jobs = check.check_jobs(check.PARTS, dry_run=False)
    folder = check.ROOT / check.GRID
    grid = {str(path.relative_to(folder)) for path in folder.rglob("*.py")} - {"conftest.py"}
    assert {job.name.split()[0] for job in jobs if job.part == "grid"} == grid
    assert {f"{family} float32" for family in check.FAMILIES} <= {job.name for job in jobs}
    assert "tests/kernels/test_triton.py" in {job.name for job in jobs if job.part == "marked"}
