"""`make gpu-check` on a machine without a GPU: the script runs, and its jobs cover every grid and family."""

import importlib.util
import json
import subprocess
import sys
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


@pytest.mark.slow
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


def test_jobs_cover_every_grid_file_and_family(check: Any) -> None:
    jobs = check.check_jobs(check.PARTS, dry_run=False)
    folder = check.ROOT / check.GRID
    grid = {str(path.relative_to(folder)) for path in folder.rglob("*.py")} - {"conftest.py"}
    assert {job.name.split()[0] for job in jobs if job.part == "grid"} == grid
    assert {f"{family} float32" for family in check.FAMILIES} <= {job.name for job in jobs}
    assert "tests/kernels/test_triton.py" in {job.name for job in jobs if job.part == "marked"}
