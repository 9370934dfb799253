"""Mixture of experts with MXFP4 weights, which are decoded in registers: a quarter of the bytes are read.

The products read even and odd inputs apart (``mxfp4_products`` says why), so each row is rearranged once, here, and the
first product writes its result in that order.
"""

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.launches import layout_of, once_per_layout
from quire.kernels.common.mxfp4 import GROUP_BYTES, GROUP_SIZE
from quire.kernels.moe.fused_experts import (
    MXFP4,
    ExpertLaunches,
    check_contiguous,
    check_routing,
    pick_tile_pairs,
    prepare_launches,
)

MAX_TILE_PAIRS = 64
"""Larger tiles do not fit in registers. For experts with more tokens, dequantise and use ``fused_experts``."""


def fused_experts_mxfp4(
    x: torch.Tensor,
    w13_blocks: torch.Tensor,
    w13_scales: torch.Tensor,
    w2_blocks: torch.Tensor,
    w2_scales: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    activation: str = "swiglu_oai",
    *,
    bias13: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``fused_experts`` from MXFP4 weights, decoded as by ``dequantise_mxfp4`` and rounded to ``x``'s dtype.

    Args:
        x: float32, float16 or bfloat16 ``[num_tokens, hidden_size]``.
        w13_blocks: uint8 ``[num_experts, 2 * width, hidden_size / 32, 16]``, contiguous; rows as in ``fused_experts``.
        w13_scales: uint8 ``[num_experts, 2 * width, hidden_size / 32]``, contiguous.
        w2_blocks: uint8 ``[num_experts, hidden_size, width / 32, 16]``, contiguous.
        w2_scales: uint8 ``[num_experts, hidden_size, width / 32]``, contiguous.

    Other arguments, the result and errors are those of ``fused_experts``. float16 is for tests: it cannot represent all
    MXFP4 numbers.
    """
    tensors = x, w13_blocks, w13_scales, w2_blocks, w2_scales, expert_ids, weights, bias13, bias2
    launches = _prepare((*map(layout_of, tensors), activation), *tensors, activation)
    even_odd = x.view(len(x), x.shape[1] // 2, 2).permute(2, 0, 1).contiguous()
    first, second = (w13_blocks, w13_scales, None, bias13), (w2_blocks, w2_scales, None, bias2)
    return launches(even_odd, first, second, expert_ids, weights)


@once_per_layout
def _prepare(
    x: torch.Tensor,
    w13_blocks: torch.Tensor,
    w13_scales: torch.Tensor,
    w2_blocks: torch.Tensor,
    w2_scales: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    bias13: torch.Tensor | None,
    bias2: torch.Tensor | None,
    activation: str,
) -> ExpertLaunches:
    """Check the arguments of ``fused_experts_mxfp4`` and return its launches."""
    byte, device = (torch.uint8,), x.device
    w2_dims = {"num_experts": None, "hidden_size": None, "width / 32": None, "bytes": GROUP_BYTES}
    check_tensor("w2_blocks", w2_blocks, w2_dims, byte, device)
    num_experts, hidden_size, groups, _ = w2_blocks.shape
    check_routing(x, hidden_size, expert_ids, weights, activation)
    width = groups * GROUP_SIZE
    dims = {"num_experts": num_experts, "2 * width": 2 * width, "hidden_size / 32": hidden_size // GROUP_SIZE}
    check_tensor("w13_blocks", w13_blocks, dims | {"bytes": GROUP_BYTES}, byte, device)
    check_tensor("w13_scales", w13_scales, dims, byte, device)
    dims = {"num_experts": num_experts, "hidden_size": hidden_size, "width / 32": groups}
    check_tensor("w2_scales", w2_scales, dims, byte, device)
    if hidden_size % GROUP_SIZE != 0:
        raise ValueError(f"x: dimension 1 (hidden_size) is {hidden_size}, expected a multiple of {GROUP_SIZE}")
    check_contiguous(w13_blocks=w13_blocks, w13_scales=w13_scales, w2_blocks=w2_blocks, w2_scales=w2_scales)
    num_pairs = expert_ids.numel()
    constants = launch_constants(x.dtype, min(MAX_TILE_PAIRS, pick_tile_pairs(num_pairs, num_experts, x.dtype)))
    halves = hidden_size // 2, width // 2
    return prepare_launches(
        expert_ids,
        (num_experts, hidden_size, width),
        activation,
        (bias13, bias2),
        strides=((halves[0], len(x) * halves[0], 0, 0, 0), (halves[1], num_pairs * halves[1], 0, 0, 0)),
        constants=[constants, constants],
        options=launch_options(),
    )


def launch_constants(dtype: torch.dtype, tile_pairs: int) -> dict[str, int]:
    """Compile-time constants of both products; shared with the test that compiles them ahead of time."""
    columns = 32 if dtype == torch.float32 else 64
    return {"KIND": MXFP4, "TILE_ROWS": tile_pairs, "TILE_COLUMNS": columns, "TILE_INPUTS": 64}


def launch_options() -> dict[str, int]:
    return {"num_warps": 4, "num_stages": 3}
