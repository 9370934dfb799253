"""The norm kernels against their references; run by test_triton.py."""

import pytest
import torch

from quire.kernels.dense.rms_norm import (
    TOLERANCES,
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)

EPS = 1e-5


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    rtol, atol = TOLERANCES[expected.dtype]
    torch.testing.assert_close(result, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("width", [1, 80, 576, 2048, 5000])
@pytest.mark.parametrize("weight_dtype", [torch.float32, None])
def test_rows(width: int, weight_dtype: torch.dtype | None, dtype: torch.dtype, device: torch.device) -> None:
    rng = torch.Generator().manual_seed(0)
    memory = torch.full((5, width + 3), torch.nan, dtype=dtype)
    memory[:, :width] = torch.randn(5, width, generator=rng).to(dtype)
    x = memory.to(device)[:, :width]
    weight = None if weight_dtype is None else torch.randn(width, generator=rng).to(weight_dtype).to(device)
    close(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS))


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (3, 128), (7, 48)])
def test_heads_of_a_fused_projection(heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    rng = torch.Generator().manual_seed(1)
    qkv = torch.randn(6, heads + 4, head_dim, generator=rng).to(dtype).to(device)
    weight = torch.randn(head_dim, generator=rng).to(dtype).to(device)
    x = qkv[:, 2 : 2 + heads]
    close(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS))


@pytest.mark.parametrize("width", [96, 1536])
@pytest.mark.parametrize("residual_dtype", [None, torch.float32])
def test_sum_and_norm(width: int, residual_dtype: torch.dtype | None, dtype: torch.dtype, device: torch.device) -> None:
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(13, width, generator=rng).to(dtype).to(device)
    residual = (torch.randn(13, width, generator=rng) * 30).to(residual_dtype or dtype).to(device)
    weight = torch.randn(width, generator=rng).to(device)
    expected_residual = residual.clone()
    expected = add_rms_norm_reference(x, expected_residual, weight, EPS)
    result = add_rms_norm(x, residual, weight, EPS)
    close(result, expected)
    # Without rounding the sum before the norm, a quarter of the elements would differ by one in the last place.
    assert float((result == expected).double().mean()) > 0.98 or residual.dtype == torch.float32
    assert torch.equal(residual, expected_residual)


def test_no_tokens(device: torch.device) -> None:
    assert rms_norm(torch.zeros(0, 4, 16, device=device), None, EPS).shape == (0, 4, 16)
