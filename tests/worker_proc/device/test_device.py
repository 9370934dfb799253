"""Compute dtypes of CPUs with and without 16-bit matrix instructions."""

from dataclasses import replace

import pytest
import torch

from quire.kernels.cpu.native.library import load_native
from quire.worker_proc.device import device
from quire.worker_proc.device.device import ComputeDtypes, cpu_compute_dtypes


@pytest.fixture
def bare_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_supported", lambda probe: False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widens_16_bit_weights_without_matrix_instructions(dtype: torch.dtype, bare_cpu: None) -> None:
    chosen = cpu_compute_dtypes(dtype, None)
    assert (chosen.weights, chosen.activations) == (torch.float32, torch.float32)
    assert "float32 is faster" in chosen.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_native_library_keeps_16_bit_weights(dtype: torch.dtype) -> None:
    native = load_native()
    if native is None or not native.has_float16:
        pytest.skip("no compiler here, or a CPU without float16 conversions")
    chosen = cpu_compute_dtypes(dtype, replace(native, has_bfloat16=False))
    assert (chosen.weights, chosen.activations) == (dtype, torch.float32) and "stay" in chosen.reason


def test_cpu_with_matrix_instructions_uses_the_requested_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_supported", lambda probe: True)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert cpu_compute_dtypes(dtype, None) == ComputeDtypes(dtype, dtype)


def test_native_library_multiplies_bfloat16_rows() -> None:
    native = load_native()
    if native is None:
        pytest.skip("no compiler here")
    able = replace(native, has_bfloat16=True)
    assert cpu_compute_dtypes(torch.bfloat16, able) == ComputeDtypes(torch.bfloat16, torch.bfloat16)
    assert cpu_compute_dtypes(torch.float32, able) == ComputeDtypes(torch.float32, torch.float32)


def test_missing_torch_operator_counts_as_unsupported() -> None:
    assert device._supported("_no_such_operator") is False
