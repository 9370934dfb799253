"""The packed expert kernels against the plain reference on dequantised weights; run by test_triton.py."""

import pytest
import torch

from quire.kernels.common.scaled_weight import CODE_DTYPES, ScaledWeight
from quire.kernels.moe.fused_experts import TOLERANCES, fused_experts_reference
from quire.kernels.moe.fused_experts_packed import fused_experts_packed
from quire.kernels.moe.moe_routing import route


def random_weight(
    kind: str, outputs: int, inputs: int, size: int, rng: torch.Generator, device: torch.device
) -> ScaledWeight:
    """Return a weight whose numbers have a magnitude of about 0.1; int4 has zero points."""
    octets = torch.randint(0, 256, (outputs, inputs // 2 if kind == "int4" else inputs), generator=rng)
    if kind == "fp8":
        octets &= 0xBF
    scales = torch.rand(outputs, inputs // size, generator=rng) + 0.5
    scales *= {"int4": 0.02, "int8": 1e-3, "fp8": 0.2}[kind]
    zeros = torch.randint(6, 10, scales.shape, generator=rng, dtype=torch.int8).to(device) if kind == "int4" else None
    codes = octets.to(torch.uint8).view(CODE_DTYPES[kind])
    return ScaledWeight(kind, codes.to(device), scales.half().to(device), size, zeros)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden_size", "width", "sizes", "kinds"),
    [
        # Few tokens and many; groups, one group, and inputs that end within a tile; a type for each product.
        (4, 3, 2, 96, 64, (32, 32), ("int4", "int8")),
        (40, 2, 1, 64, 40, (64, 40), ("int8", "int8")),
        (5, 4, 2, 128, 96, (64, 96), ("fp8", "int4")),
        (90, 2, 2, 72, 128, (72, 64), ("int4", "fp8")),
    ],
)
def test_equals_reference(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    width: int,
    sizes: tuple[int, int],
    kinds: tuple[str, str],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, hidden_size, generator=rng).to(dtype).to(device)
    ids, weights = route(torch.randn(num_tokens, num_experts, generator=rng).to(device), top_k)
    ids[0, 0] = num_experts  # another rank's expert
    w13 = random_weight(kinds[0], num_experts * 2 * width, hidden_size, sizes[0], rng, device)
    w2 = random_weight(kinds[1], num_experts * hidden_size, width, sizes[1], rng, device)
    result = fused_experts_packed(x, w13, w2, ids, weights, "gelu_tanh")
    plain = (w13.dequantise().view(num_experts, 2 * width, hidden_size), w2.dequantise())
    expected = fused_experts_reference(
        x, plain[0], plain[1].view(num_experts, hidden_size, width), ids, weights, "gelu_tanh"
    )
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(result, expected, rtol=rtol, atol=atol * float(expected.abs().mean()))


def test_the_inputs_of_both_products_are_rounded(device: torch.device) -> None:
    """Twice the inputs of the second product are twice the result."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(3, 64, generator=rng).to(device)
    ids, weights = route(torch.randn(3, 2, generator=rng).to(device), 1)
    w13 = random_weight("fp8", 2 * 2 * 32, 64, 64, rng, device)
    w2 = random_weight("fp8", 2 * 64, 32, 32, rng, device)
    twice = fused_experts_packed(x, w13, w2, ids, weights, round_inputs=lambda part: 2 * part)
    torch.testing.assert_close(twice, 2 * fused_experts_packed(2 * x, w13, w2, ids, weights))
