"""The MXFP4 expert kernels against the plain reference on dequantised weights; run by test_triton.py."""

import pytest
import torch

from quire.kernels.common.mxfp4 import dequantise_mxfp4
from quire.kernels.moe.fused_experts import TOLERANCES, fused_experts_reference
from quire.kernels.moe.fused_experts_mxfp4 import fused_experts_mxfp4
from quire.kernels.moe.moe_routing import route


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden_size", "width", "activation"),
    [(4, 3, 2, 96, 64, "swiglu_oai"), (20, 2, 1, 160, 32, "silu")],
)
def test_equals_reference(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    width: int,
    activation: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, hidden_size, generator=rng).to(dtype).to(device)
    ids, weights = route(torch.randn(num_tokens, num_experts, generator=rng).to(device), top_k)
    packed = []
    for rows, columns in ((2 * width, hidden_size), (hidden_size, width)):
        shape = (num_experts, rows, columns // 32)
        packed.append(torch.randint(0, 256, (*shape, 16), generator=rng, dtype=torch.uint8).to(device))
        packed.append(torch.randint(121, 125, shape, generator=rng, dtype=torch.uint8).to(device))
    w13, w2 = (dequantise_mxfp4(*packed[i : i + 2], dtype) for i in (0, 2))
    biases = {}
    if activation == "swiglu_oai":
        biases["bias13"] = torch.randn(num_experts, 2 * width, generator=rng).to(dtype).to(device)
        biases["bias2"] = torch.randn(num_experts, hidden_size, generator=rng).to(dtype).to(device)
    result = fused_experts_mxfp4(x, *packed, ids, weights, activation, **biases)
    expected = fused_experts_reference(x, w13, w2, ids, weights, activation, **biases)
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(result, expected, rtol=rtol, atol=atol * float(expected.abs().mean()))
