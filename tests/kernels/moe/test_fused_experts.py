"""A worked example of the expert reference, and errors of the launcher. These tests do not need triton."""

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.common.scaled_weight import ScaledWeight
from quire.kernels.moe.fused_experts import fused_experts, fused_experts_reference, pick_tile_pairs
from quire.kernels.moe.fused_experts_mxfp4 import fused_experts_mxfp4
from quire.kernels.moe.fused_experts_packed import fused_experts_packed


def test_reference_of_a_worked_example() -> None:
    rng = torch.Generator().manual_seed(0)
    x, w13, w2 = (torch.randn(*shape, generator=rng) for shape in [(2, 6), (3, 8, 6), (3, 6, 4)])
    ids = torch.tensor([[2, 0], [1, 9]], dtype=torch.int32)
    weights = torch.tensor([[0.25, 0.75], [0.5, 0.5]])

    def mlp(token: int, expert: int) -> torch.Tensor:
        gate, up = (w13[expert] @ x[token]).chunk(2)
        return w2[expert] @ (F.silu(gate) * up)

    expected = torch.stack([0.25 * mlp(0, 2) + 0.75 * mlp(0, 0), 0.5 * mlp(1, 1)])
    torch.testing.assert_close(fused_experts_reference(x, w13, w2, ids, weights), expected)


def test_tiles_follow_the_pairs_of_an_expert() -> None:
    assert [pick_tile_pairs(n, 8, torch.bfloat16) for n in (8, 128, 200, 512, 10**6)] == [16, 16, 32, 64, 128]


def test_invalid_arguments_are_rejected() -> None:
    x, w13, w2 = torch.zeros(2, 6), torch.zeros(3, 8, 6), torch.zeros(3, 6, 4)
    ids, weights = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 1)
    with pytest.raises(ValueError, match="w13: dimension 1"):
        fused_experts(x, torch.zeros(3, 10, 6), w2, ids, weights)
    with pytest.raises(ValueError, match="w2: dtype"):
        fused_experts(x, w13, w2.double(), ids, weights)
    with pytest.raises(ValueError, match="weights: dimension 1"):
        fused_experts(x, w13, w2, ids, torch.zeros(2, 2))
    with pytest.raises(ValueError, match="bias2: dimension 1"):
        fused_experts(x, w13, w2, ids, weights, bias2=torch.zeros(3, 4))
    with pytest.raises(ValueError, match="relu"):
        fused_experts(x, w13, w2, ids, weights, "relu")


def test_invalid_packed_weights_are_rejected() -> None:
    def packed(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(*shape, 16, dtype=torch.uint8), torch.zeros(*shape, dtype=torch.uint8)

    ids, weights = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 1)
    w13, w2 = packed(3, 64, 2), packed(3, 64, 1)
    with pytest.raises(ValueError, match="w13_blocks: dimension 1"):
        fused_experts_mxfp4(torch.zeros(2, 64), *packed(3, 32, 2), *w2, ids, weights)
    with pytest.raises(ValueError, match="w13_scales: dimension 2"):
        fused_experts_mxfp4(torch.zeros(2, 64), w13[0], w13[1][..., :1], *w2, ids, weights)
    with pytest.raises(ValueError, match="contiguous"):
        fused_experts_mxfp4(torch.zeros(2, 64), *w13, *(t[::2] for t in packed(6, 64, 1)), ids, weights)
    with pytest.raises(ValueError, match="hidden_size"):
        fused_experts_mxfp4(torch.zeros(2, 72), *packed(3, 64, 2), *packed(3, 72, 1), ids, weights)


def test_invalid_weights_with_scales_are_rejected() -> None:
    def weight(outputs: int, inputs: int, size: int = 32, kind: str = "int4") -> ScaledWeight:
        codes = torch.zeros(outputs, inputs // 2, dtype=torch.uint8)
        return ScaledWeight(kind, codes, torch.ones(outputs, inputs // size), size)

    x, ids, weights = torch.zeros(2, 64), torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 1)
    w13, w2 = weight(3 * 64, 64), weight(3 * 64, 32)
    with pytest.raises(ValueError, match=r"w13: codes: dimension 0 \(outputs\) is 128, expected 192"):
        fused_experts_packed(x, weight(2 * 64, 64), w2, ids, weights)
    with pytest.raises(ValueError, match=r"w2: expected int8, int4, fp8 .*got fp4"):
        fused_experts_packed(x, w13, weight(3 * 64, 32, kind="fp4"), ids, weights)
    with pytest.raises(ValueError, match=r"w13: expected .*groups of 16"):
        fused_experts_packed(x, weight(3 * 64, 64, 16), w2, ids, weights)
    with pytest.raises(ValueError, match="expert_ids: dtype"):
        fused_experts_packed(x, w13, w2, ids.long(), weights)
    with pytest.raises(ValueError, match=r"silu, gelu, gelu_tanh .*swiglu_oai"):
        fused_experts_packed(x, w13, w2, ids, weights, "swiglu_oai")
