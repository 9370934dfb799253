"""Mixture of experts with int8, int4 or fp8 weights, which the product of ``packed_linear`` decodes in registers."""

from collections.abc import Callable

import torch

from quire.kernels.common.launches import layout_of, once_per_layout
from quire.kernels.common.scaled_weight import ScaledWeight
from quire.kernels.dense import packed_linear
from quire.kernels.dense.gated_activation import ACTIVATIONS
from quire.kernels.moe.fused_experts import ExpertLaunches, check_routing, pick_tile_pairs, prepare_launches


def fused_experts_packed(
    x: torch.Tensor,
    w13: ScaledWeight,
    w2: ScaledWeight,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    activation: str = "silu",
    round_inputs: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute ``fused_experts`` from packed weights, which are not rounded.

    Args:
        x: float32, float16 or bfloat16 ``[num_tokens, hidden_size]``, rows may be strided.
        w13: the rows of all experts, ``[num_experts * 2 * width, hidden_size]``: of each, gate rows, then up rows.
        w2: ``[num_experts * hidden_size, width]``. Both must be weights that ``packed_linear`` accepts.
        activation: as ``gated_activation.gate``, except swiglu_oai.
        round_inputs: rounds the inputs of both products, if given.

    Other arguments, the result and errors are those of ``fused_experts``.
    """
    x = x if round_inputs is None else round_inputs(x)
    codes13, codes2 = packed_linear.stored_codes(w13), packed_linear.stored_codes(w2)
    tensors = x, codes13, w13.scales, w13.zeros, codes2, w2.scales, w2.zeros, expert_ids, weights
    kinds = w13.kind, w13.group_size, w2.kind, w2.group_size, activation
    launches = _prepare((*map(layout_of, tensors), *kinds), x, w13, w2, expert_ids, weights, activation)
    first, second = (codes13, w13.scales, w13.zeros, None), (codes2, w2.scales, w2.zeros, None)
    return launches(x, first, second, expert_ids, weights, round_inputs)


@once_per_layout
def _prepare(
    x: torch.Tensor,
    w13: ScaledWeight,
    w2: ScaledWeight,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
) -> ExpertLaunches:
    """Check the arguments of ``fused_experts_packed`` and return its launches."""
    hidden_size = x.shape[-1]
    check_routing(x, hidden_size, expert_ids, weights, activation, [a for a in ACTIVATIONS if a != "swiglu_oai"])
    rows, width = w2.shape
    num_experts = rows // hidden_size
    packed_linear.check_weight("w13", w13, (num_experts * 2 * width, hidden_size), x.device)
    packed_linear.check_weight("w2", w2, (num_experts * hidden_size, width), x.device)
    tile_pairs = tile_rows(expert_ids.numel(), num_experts, x.dtype)
    return prepare_launches(
        expert_ids,
        (num_experts, hidden_size, width),
        activation,
        (None, None),
        strides=(
            (x.stride(0), 0, 0, w13.codes.stride(0), w13.scales.shape[1]),
            (width, 0, 0, w2.codes.stride(0), w2.scales.shape[1]),
        ),
        constants=[packed_linear.weight_constants(weight, x.dtype, tile_pairs) for weight in (w13, w2)],
        options=launch_options(tile_pairs),
    )


def tile_rows(num_pairs: int, num_experts: int, dtype: torch.dtype) -> int:
    """Return the pairs per tile: 16 or 64, for which ``packed_linear`` has tiles of weights."""
    return 16 if pick_tile_pairs(num_pairs, num_experts, dtype) == 16 else 64


def launch_options(tile_pairs: int) -> dict[str, int]:
    """Return the warps and pipeline stages; with four warps, tiles of 64 spill registers on sm_100."""
    return {"num_warps": 4, "num_stages": 4} if tile_pairs == 16 else {"num_warps": 8, "num_stages": 3}
