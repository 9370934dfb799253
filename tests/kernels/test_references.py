"""Argument checks of launchers, and their behaviour without triton. These tests do not need triton."""

import subprocess
import sys

import pytest
import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.triton_runtime import require_launchable

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3), r"key: expected the dimensions \[num_tokens, head_dim\], got shape \(3,\)"),
        (torch.zeros(3, 5), r"key: dimension 1 \(head_dim\) is 5, expected 4"),
        (torch.zeros(3, 4, dtype=torch.int8), r"key: dtype is torch.int8, expected torch.float32 or torch.float16"),
        (torch.zeros(3, 4, device="meta"), r"key: device is meta, expected cpu"),
        (torch.zeros(4, 3).T, r"key: the innermost dimension \(head_dim\) has stride 3, expected 1"),
    ],
)
def test_error_names_the_tensor_and_the_dimension(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tensor("key", tensor, {"num_tokens": None, "head_dim": 4}, (torch.float32, torch.float16), CPU)


@pytest.mark.full
def test_launchers_import_without_triton_and_name_the_missing_package() -> None:
    script = """
import sys
import quire.kernels.cache.cache_write, quire.kernels.attention.paged_attention, quire.kernels.cache.slot_mapping
from quire.worker_proc.attention.triton_backend import TritonBackend
assert "triton" not in sys.modules
sys.modules["triton"] = None  # makes Python's import fail as for a missing package
try:
    TritonBackend()
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], check=True, capture_output=True, text=True)
    assert "need the triton package" in done.stdout


def test_launch_on_the_cpu_needs_the_interpreter() -> None:
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if triton.knobs.runtime.interpret:
        pytest.skip("the interpreter is on")
    with pytest.raises(RuntimeError, match=r"need CUDA, and the tensors are on 'cpu'.*TRITON_INTERPRET=1"):
        require_launchable("cpu")
