"""The decoder's steps by our kernels against the same by torch; run by test_triton.py."""

import pytest
import torch

from quire.kernels import gated_activation, rms_norm
from quire.worker_proc.models.ops import ACTIVATIONS, Ops, TorchOps
from quire.worker_proc.models.triton_ops import TritonOps


def test_norms(dtype: torch.dtype, device: torch.device) -> None:
    ours: Ops = TritonOps()
    torchs: Ops = TorchOps()
    rng = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 5, 96, generator=rng).to(dtype).to(device)
    weight = torch.randn(96, generator=rng).to(dtype).to(device)
    rtol, atol = rms_norm.TOLERANCES[dtype]
    sums = residual.clone(), residual.clone()
    result = ours.add_rms_norm(x, sums[0], weight, 1e-6)
    torch.testing.assert_close(result, torchs.add_rms_norm(x, sums[1], weight, 1e-6), rtol=rtol, atol=atol)
    assert torch.equal(*sums)
    heads = x.view(5, 3, 32)[:, 1:]
    for head_weight in (weight[:32], None):
        result, expected = (ops.rms_norm(heads, head_weight, 1e-6) for ops in (ours, torchs))
        torch.testing.assert_close(result, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates(activation: str, dtype: torch.dtype, device: torch.device) -> None:
    rng = torch.Generator().manual_seed(0)
    gate_up = (torch.randn(4, 2 * 72, generator=rng) * 2).to(dtype).to(device)
    rtol, atol = gated_activation.TOLERANCES[dtype]
    expected = TorchOps().gate(gate_up.clone(), activation)
    torch.testing.assert_close(TritonOps().gate(gate_up, activation), expected, rtol=rtol, atol=2 * atol)
