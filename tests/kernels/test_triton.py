"""Starts the Triton tests, each in a process of its own: one under TRITON_INTERPRET=1 cannot compile."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

HERE = Path(__file__).parent
GRID = sorted(path for path in (HERE / "grid").glob("*.py") if path.name != "conftest.py")


def run_python(arguments: list[str | Path], folder: Path, **variables: str) -> str:
    """Run a Python program, without Triton's interpreter unless ``variables`` ask for it, and return what it prints.

    ``folder`` becomes its compile cache. One thread, because several that share cores wait for each other.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"} | variables
    # -P: a top-level `kernels` or `protocol` of the current folder must not be importable.
    command = [sys.executable, "-P", *arguments]
    done = subprocess.run(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_grid(folder: Path, **variables: str) -> None:
    output = run_python(["-m", "pytest", "-q", "-p", "no:cacheprovider", *GRID], folder, **variables)
    print(output)
    assert " passed" in output


def test_grid_in_the_interpreter(tmp_path: Path) -> None:
    version = importlib.metadata.version("triton")
    if tuple(int(part) for part in version.split(".")[:2]) < (3, 7):
        pytest.skip(f"the interpreter of Triton {version} converts arrays to range bounds in a way that NumPy refuses")
    run_grid(tmp_path, TRITON_INTERPRET="1")


def test_compiles_ahead(tmp_path: Path) -> None:
    print(run_python([HERE / "compile_ahead.py"], tmp_path))


@pytest.mark.gpu
def test_grid_on_the_device(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    run_grid(tmp_path)
