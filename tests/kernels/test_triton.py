"""The Triton tests, which run in separate processes: a process with TRITON_INTERPRET=1 cannot compile."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from side_runs import GRID, PYTEST

INSTALLED = importlib.util.find_spec("triton") is not None
VERSION = tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) if INSTALLED else (0, 0)

pytestmark = pytest.mark.skipif(not INSTALLED, reason="triton is not installed")


needs_3_7 = pytest.mark.skipif(
    VERSION < (3, 7), reason="before 3.7 the interpreter passes arrays as bounds of range, which NumPy rejects"
)


@needs_3_7
@pytest.mark.full
def test_first_cases_in_the_interpreter(side_run: str) -> None:
    """One shape of each kernel's test."""
    assert " passed" in side_run


@needs_3_7
@pytest.mark.full
def test_grid_in_the_interpreter(side_run: str) -> None:
    assert " passed" in side_run


@needs_3_7
@pytest.mark.slow
def test_rest_of_the_grid_in_the_interpreter(side_run: str) -> None:
    assert " passed" in side_run


@pytest.mark.full
def test_kernels_compile_ahead_of_time(side_run: str) -> None:
    assert '"failures": []' in side_run


@pytest.mark.slow
def test_kernels_compile_ahead_of_time_for_other_gpu_generations(side_run: str) -> None:
    assert '"failures": []' in side_run


@pytest.mark.gpu
def test_grid_on_the_device(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", *PYTEST, *GRID]
    done = subprocess.run(
        command, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, text=True, capture_output=True, timeout=900
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
