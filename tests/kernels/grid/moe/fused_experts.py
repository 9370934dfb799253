"""The expert kernels against their reference; run by test_triton.py."""

import pytest
import torch

from quire.kernels.moe.fused_experts import TOLERANCES, fused_experts, fused_experts_reference
from quire.kernels.moe.moe_routing import route


def experts_of(
    num_experts: int, hidden_size: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Return w13, w2 and their biases, scaled so that outputs are around 1."""
    rng = torch.Generator().manual_seed(3)
    w13 = torch.randn(num_experts, 2 * width, hidden_size, generator=rng) * 2 / hidden_size**0.5
    w2 = torch.randn(num_experts, hidden_size, width, generator=rng) / width**0.5
    bias13, bias2 = torch.randn(num_experts, 2 * width, generator=rng), torch.randn(num_experts, hidden_size)
    return tuple(t.to(dtype).to(device) for t in (w13, w2, bias13, bias2))


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden_size", "width", "activation"),
    [(3, 6, 2, 96, 40, "silu"), (40, 3, 2, 72, 48, "swiglu_oai"), (1, 2, 1, 160, 130, "gelu_tanh")],
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
    x = torch.randn(num_tokens, hidden_size + 8, generator=rng).to(dtype).to(device)[:, :hidden_size]
    ids, weights = route(torch.randn(num_tokens, num_experts, generator=rng).to(device), top_k)
    w13, w2, bias13, bias2 = experts_of(num_experts, hidden_size, width, dtype, device)
    biases = {"bias13": bias13, "bias2": bias2} if activation == "swiglu_oai" else {}
    result = fused_experts(x, w13, w2, ids, weights, activation, **biases)
    expected = fused_experts_reference(x, w13, w2, ids, weights, activation, **biases)
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(result, expected, rtol=rtol, atol=atol)


def test_experts_of_other_ranks_add_nothing(device: torch.device) -> None:
    x = torch.ones(3, 32, device=device)
    w13, w2, _, _ = experts_of(2, 32, 16, torch.float32, device)
    ids = torch.tensor([[0, 5], [-1, 7], [1, 0]], dtype=torch.int32, device=device)
    weights = torch.tensor([[0.5, 0.5], [1, 1], [0.25, 0.75]], device=device)
    result = fused_experts(x, w13, w2, ids, weights)
    torch.testing.assert_close(result, fused_experts_reference(x, w13, w2, ids, weights), rtol=1e-4, atol=1e-4)
    assert result[1].count_nonzero() == 0


def test_no_tokens(device: torch.device) -> None:
    w13, w2, _, _ = experts_of(2, 32, 16, torch.float32, device)
    none = torch.zeros(0, 2, device=device)
    assert fused_experts(torch.zeros(0, 32, device=device), w13, w2, none.int(), none).shape == (0, 32)
