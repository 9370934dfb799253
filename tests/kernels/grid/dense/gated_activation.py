"""The gated activation kernel against its reference; run by test_triton.py."""

import pytest
import torch

from quire.kernels.dense.gated_activation import ACTIVATIONS, TOLERANCES, gate, gate_reference


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 96, 1100])
def test_equals_reference(activation: str, width: int, dtype: torch.dtype, device: torch.device) -> None:
    rng = torch.Generator().manual_seed(0)
    memory = (torch.randn(3, 2 * width + 4, generator=rng) * 3).to(dtype).to(device)
    gate_up = memory[:, : 2 * width]
    rtol, atol = TOLERANCES[dtype]
    expected = gate_reference(gate_up, activation)
    torch.testing.assert_close(gate(gate_up, activation), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_stays_nan(activation: str, device: torch.device) -> None:
    gate_up = torch.full((1, 8), torch.nan, device=device)
    assert gate(gate_up, activation).isnan().all()
