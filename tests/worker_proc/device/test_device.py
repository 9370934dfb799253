"""What a CPU without 16-bit matrix instructions is given instead."""

import pytest
import torch

from quire.kernels.cpu.native import load_native
from quire.worker_proc.device import device
from quire.worker_proc.device.device import ComputeDtypes, cpu_compute_dtypes, has_matrix_instructions


@pytest.fixture
def bare_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_supported", lambda probe: False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_widened_where_nothing_multiplies_them(dtype: torch.dtype, bare_cpu: None) -> None:
    chosen = cpu_compute_dtypes(dtype, None)
    assert (chosen.weights, chosen.activations) == (torch.float32, torch.float32)
    assert "float32 is faster" in chosen.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_native_library_keeps_16_bit_weights(dtype: torch.dtype, bare_cpu: None) -> None:
    native = load_native()
    if native is None or not native.has_float16:
        pytest.skip("no compiler here, or a CPU without float16 conversions")
    chosen = cpu_compute_dtypes(dtype, native)
    assert (chosen.weights, chosen.activations) == (dtype, torch.float32) and "stay" in chosen.reason


def test_a_cpu_with_the_instructions_gets_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_supported", lambda probe: True)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert cpu_compute_dtypes(dtype, load_native()) == ComputeDtypes(dtype, dtype)
    assert has_matrix_instructions(torch.bfloat16) and not has_matrix_instructions(torch.float32)


def test_an_operator_that_this_torch_lacks_counts_as_unsupported() -> None:
    assert device._supported("_no_such_operator") is False
