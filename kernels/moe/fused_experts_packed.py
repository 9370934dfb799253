"""Mixture of experts with int8, int4 or fp8 weights, which the product of ``packed_linear`` decodes in registers."""

from collections.abc import Callable
from typing import Any

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.launches import Launch, layout_of, once_per_layout
from quire.kernels.common.scaled_weight import ScaledWeight
from quire.kernels.common.triton_runtime import require_launchable
from quire.kernels.dense import packed_linear
from quire.kernels.dense.gated_activation import ACTIVATIONS
from quire.kernels.moe.fused_experts import EXPERT_DTYPES, ExpertLaunches, pick_tile_pairs, sum_launch
from quire.kernels.moe.moe_routing import max_tiles, sort_pairs


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
    num_tokens, hidden_size = x.shape
    out = x.new_empty(num_tokens, hidden_size)
    if num_tokens == 0:
        return out
    width = w2.shape[1]
    tiles = sort_pairs(expert_ids, len(codes2) // hidden_size, launches.tile_pairs)
    gated = x.new_empty(expert_ids.numel(), width)
    launches.gate_up(x, codes13, w13.scales, w13.zeros, gated, tiles.pairs, tiles.experts)
    gated = gated if round_inputs is None else round_inputs(gated)
    results = x.new_empty(expert_ids.numel(), hidden_size)
    launches.down(gated, codes2, w2.scales, w2.zeros, weights, results, tiles.pairs, tiles.experts)
    launches.add(results, expert_ids, out)
    return out


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
    check_tensor("x", x, {"num_tokens": None, "hidden_size": None}, EXPERT_DTYPES, x.device)
    num_tokens, hidden_size = x.shape
    rows, width = w2.shape
    num_experts = rows // hidden_size
    packed_linear.check_weight("w13", w13, (num_experts * 2 * width, hidden_size), x.device)
    packed_linear.check_weight("w2", w2, (num_experts * hidden_size, width), x.device)
    check_tensor("expert_ids", expert_ids, {"num_tokens": num_tokens, "top_k": None}, (torch.int32,), x.device)
    dims = {"num_tokens": num_tokens, "top_k": expert_ids.shape[1]}
    check_tensor("weights", weights, dims, (torch.float32,), x.device)
    for name, tensor in (("expert_ids", expert_ids), ("weights", weights)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, strides are {tensor.stride()}")
    allowed = [name for name in ACTIVATIONS if name != "swiglu_oai"]
    if activation not in allowed:
        raise ValueError(f"activation must be one of {', '.join(allowed)} (got {activation!r})")
    kernels, sum_kernel = _kernels(x.device)
    top_k, num_pairs = expert_ids.shape[1], expert_ids.numel()
    tile_pairs = tile_rows(num_pairs, num_experts, x.dtype)
    num_tiles = max_tiles(num_pairs, num_experts, tile_pairs)
    first, second = (packed_linear.weight_constants(weight, x.dtype, tile_pairs) for weight in (w13, w2))
    options = launch_options(tile_pairs)
    return ExpertLaunches(
        tile_pairs,
        Launch(
            kernels.gate_up_packed_kernel,
            (-(-width // first["TILE_COLUMNS"]), num_tiles),
            (top_k, width, hidden_size, w13.scales.shape[1], x.stride(0), w13.codes.stride(0)),
            first | {"ACTIVATION": ACTIVATIONS[activation]} | options,
        ),
        Launch(
            kernels.down_packed_kernel,
            (-(-hidden_size // second["TILE_COLUMNS"]), num_tiles),
            (hidden_size, width, w2.scales.shape[1], w2.codes.stride(0)),
            second | options,
        ),
        sum_launch(sum_kernel, num_tokens, num_experts, hidden_size, top_k),
    )


def tile_rows(num_pairs: int, num_experts: int, dtype: torch.dtype) -> int:
    """Return the pairs per tile: 16 or 64, for which ``packed_linear`` has tiles of weights."""
    return 16 if pick_tile_pairs(num_pairs, num_experts, dtype) == 16 else 64


def launch_options(tile_pairs: int) -> dict[str, int]:
    """Return the warps and pipeline stages; with four warps, tiles of 64 spill registers on sm_100."""
    return {"num_warps": 4, "num_stages": 4} if tile_pairs == 16 else {"num_warps": 8, "num_stages": 3}


def _kernels(device: torch.device) -> tuple[Any, Any]:
    require_launchable(device.type)
    from quire.kernels.moe import fused_experts_packed_triton, fused_experts_triton

    return fused_experts_packed_triton, fused_experts_triton.sum_experts_kernel
