"""Attention within rows, the layer norm and activations of linear layers: equal to torch in any batch."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiers import covering

from quire.kernels.cpu.attention.row_attention import TOLERANCES, RowAttention, attend_rows_reference
from quire.kernels.cpu.linear.linear import ACTIVATIONS, PackedLinear
from quire.kernels.cpu.linear.ops import CpuKernels
from quire.kernels.cpu.native.library import Native

LENGTHS = [1, 5, 16, 17, 40, 130, 2]


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _starts(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(np.int32)


def _rotary(positions: int, dim: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(positions).float(), 100.0 ** -(torch.arange(dim // 2) / (dim // 2)))
    return torch.stack([torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)])


@pytest.mark.parametrize(
    ("dtype", "shape", "reach"), covering(TOLERANCES, [(3, 8, 0), (1, 20, 20), (2, 64, 32)], [0, 1, 9, 200])
)
def test_rows_equal_the_reference(native: Native, dtype: torch.dtype, shape: tuple[int, int, int], reach: int) -> None:
    heads, head_dim, rotary_dim = shape
    starts = _starts(LENGTHS)
    qkv = _random(int(starts[-1]), 3 * heads * head_dim + 5).to(dtype)[:, 2:-3]
    rotary = _rotary(131, rotary_dim) if rotary_dim else None
    out = RowAttention(native)(qkv, starts, heads, reach=reach, rotary=rotary)
    want = attend_rows_reference(qkv.float(), starts, heads, reach=reach, rotary=rotary)
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(out.float(), want, rtol=rtol, atol=atol)


def test_bits_of_a_row_do_not_depend_on_the_others(native: Native) -> None:
    starts, attend = _starts(LENGTHS), RowAttention(native)
    qkv = _random(int(starts[-1]), 3 * 2 * 16)
    out = attend(qkv, starts, 2, reach=7)
    for row, length in enumerate(LENGTHS):
        own = slice(int(starts[row]), int(starts[row + 1]))
        assert torch.equal(attend(qkv[own], _starts([length]), 2, reach=7), out[own])


def test_values_that_are_not_finite_stay_in_their_row(native: Native) -> None:
    starts = _starts([4, 30, 3])
    qkv = _random(37, 48)
    qkv[5, 20] = torch.nan
    out = RowAttention(native)(qkv, starts, 1)
    assert out[:4].isfinite().all() and out[34:].isfinite().all() and out[4:34].isnan().any()


def test_invalid_arguments_are_rejected(native: Native) -> None:
    attend, qkv = RowAttention(native), torch.zeros(6, 48)
    for starts, message in (
        (_starts([2, 3]), "from 0 to 6"),
        (_starts([6, 0]), "a token or more"),
        (np.array([0, 6], np.int64), "int32"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(qkv, starts, 2)
    with pytest.raises(ValueError, match="3 \\* 5 heads"):
        attend(qkv, _starts([6]), 5)
    with pytest.raises(ValueError, match="rotary"):
        attend(qkv, _starts([6]), 2, rotary=torch.zeros(2, 5, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [7, 48, 770])
def test_layer_norm_equals_torch(native: Native, dtype: torch.dtype, width: int) -> None:
    kernels = CpuKernels(native)
    x, residual = _random(9, width).to(dtype), _random(9, width, seed=1).to(dtype)
    weight, bias = (_random(width, seed=seed).to(dtype) for seed in (2, 3))
    rtol, atol = (1e-5, 1e-5) if dtype is torch.float32 else (1.6e-2, 1e-2)
    want = F.layer_norm((x + residual).float(), (width,), weight.float(), bias.float(), 1e-6)
    for keeps_sum in (False, True):
        held = residual.clone()
        out = kernels.layer_norm(x, weight, bias, 1e-6, held, keeps_sum=keeps_sum)
        torch.testing.assert_close(out.float(), want, rtol=rtol, atol=atol)
        assert torch.equal(held, x + residual if keeps_sum else residual)
    plain = F.layer_norm(x.float(), (width,), weight.float(), None, 1e-6)
    torch.testing.assert_close(kernels.layer_norm(x, weight, None, 1e-6).float(), plain, rtol=rtol, atol=atol)


def test_layer_norm_rejects_other_shapes(native: Native) -> None:
    kernels, x, weight = CpuKernels(native), torch.zeros(3, 8), torch.ones(8)
    with pytest.raises(ValueError, match="weight: dimension 0"):
        kernels.layer_norm(x, torch.ones(7), None, 1e-5)
    with pytest.raises(ValueError, match="residual: expected contiguous"):
        kernels.layer_norm(x, weight, None, 1e-5, torch.zeros(2, 8))


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("rows", [1, 6, 40])
def test_linear_layers_return_the_activation_of_their_sums(native: Native, name: str, rows: int) -> None:
    weight, bias = _random(37, 24), _random(37, seed=1)
    packed = PackedLinear(native, weight, bias)
    packed.set_activation(name)
    x = _random(rows, 24, seed=2)
    torch.testing.assert_close(packed(x), FUNCTIONS[name](F.linear(x, weight, bias)), rtol=1e-5, atol=1e-5)
