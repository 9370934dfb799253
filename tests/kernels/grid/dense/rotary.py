"""The rotary kernel against its reference; run by test_triton.py."""

import pytest
import torch

from quire.kernels.dense.rotary import TOLERANCES, rotary, rotary_reference


def make_table(max_position: int, rotary_dim: int, device: torch.device) -> torch.Tensor:
    angles = torch.outer(torch.arange(max_position) + 0.5, 1.0 / torch.arange(1, rotary_dim // 2 + 1))
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)]).to(device)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (96, 96), (256, 64)])
@pytest.mark.parametrize("in_place", [False, True])
def test_equals_reference(
    head_dim: int, rotary_dim: int, in_place: bool, dtype: torch.dtype, device: torch.device
) -> None:
    rng = torch.Generator().manual_seed(0)
    # Queries and keys are the first heads of a projection that has values behind them.
    qkv = torch.randn(4, 7, head_dim, generator=rng).to(dtype).to(device)
    before = qkv.clone()
    positions = torch.tensor([0, 19, 3, 7], device=device)
    table = make_table(20, rotary_dim, device)
    expected = rotary_reference(qkv[:, :5], positions, table)
    result = rotary(qkv[:, :5], positions, table, qkv[:, :5] if in_place else None)
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(result, expected, rtol=rtol, atol=atol)
    assert torch.equal(result[..., rotary_dim:], before[:, :5, rotary_dim:])
    assert torch.equal(qkv[:, 5:], before[:, 5:])
    assert in_place or torch.equal(qkv, before)


def test_positions_outside_the_table_are_zeroed(device: torch.device) -> None:
    table = torch.full((2, 6, 16), torch.nan, device=device)
    table[:, 1:5] = 1
    x = torch.ones(4, 2, 24, device=device)
    result = rotary(x, torch.tensor([-1, 4, 2**40, 3], device=device), table[:, 1:5])
    assert result[:3, :, :16].count_nonzero() == 0
    assert bool((result[..., 16:] == 1).all())
