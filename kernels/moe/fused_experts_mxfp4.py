"""Mixture of experts with MXFP4 weights, which are decoded in registers: a quarter of the bytes are read.

A byte holds the weights of two neighbouring inputs. Instead of interleaving the decoded weights, the inputs are split:
even inputs are multiplied by the low halves of the bytes, odd inputs by the high halves, into one accumulator.
"""

from typing import Any

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.mxfp4 import GROUP_BYTES, GROUP_SIZE
from quire.kernels.common.triton_runtime import require_launchable
from quire.kernels.dense.gated_activation import ACTIVATIONS
from quire.kernels.moe.fused_experts import EXPERT_DTYPES, pick_tile_pairs, sum_launch_constants
from quire.kernels.moe.moe_routing import ExpertTiles, sort_pairs

MAX_TILE_PAIRS = 64
"""Larger tiles do not fit in registers. For experts with more tokens, dequantise and use ``fused_experts``."""

BIAS_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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
    hidden_size, width = _check(x, w13_blocks, w13_scales, w2_blocks, w2_scales, expert_ids, weights, activation)
    num_experts = len(w13_blocks)
    for name, bias, columns in (("bias13", bias13, 2 * width), ("bias2", bias2, hidden_size)):
        if bias is not None:
            check_tensor(name, bias, {"num_experts": num_experts, "columns": columns}, BIAS_DTYPES, x.device)
    kernels, sum_kernel = _kernels(x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x) == 0:
        return out
    pairs = min(MAX_TILE_PAIRS, pick_tile_pairs(expert_ids.numel(), num_experts, x.dtype))
    tiles = sort_pairs(expert_ids, num_experts, pairs)
    gated = _gate_up(kernels, x, w13_blocks, w13_scales, bias13, activation, tiles, expert_ids)
    results = _down(kernels, gated, w2_blocks, w2_scales, bias2, weights, tiles)
    constants = sum_launch_constants(hidden_size, expert_ids.shape[1])
    sum_kernel[(len(x), -(-hidden_size // constants["TILE_ELEMENTS"]))](
        results, expert_ids, out, num_experts, hidden_size, **constants
    )
    return out


def _gate_up(
    kernels: Any,
    x: torch.Tensor,
    blocks: torch.Tensor,
    scales: torch.Tensor,
    bias13: torch.Tensor | None,
    activation: str,
    tiles: ExpertTiles,
    expert_ids: torch.Tensor,
) -> torch.Tensor:
    """Compute each pair's activated hidden state, even columns and then odd ones: ``[2, num_pairs, width / 2]``."""
    num_tokens, hidden_size = x.shape
    width = blocks.shape[1] // 2
    constants = launch_constants(x.dtype, tiles.tile_pairs, hidden_size, width)
    even_odd = x.view(num_tokens, hidden_size // 2, 2).permute(2, 0, 1).contiguous()
    gated = torch.empty(2, expert_ids.numel(), width // 2, dtype=x.dtype, device=x.device)
    kernels.gate_up_mxfp4_kernel[(-(-width // constants["TILE_COLUMNS"]), len(tiles.experts))](
        even_odd, blocks, scales, scales if bias13 is None else bias13, gated, tiles.pairs, tiles.experts, num_tokens,
        expert_ids.numel(), expert_ids.shape[1], 0 if bias13 is None else bias13.stride(0),
        **constants, ACTIVATION=ACTIVATIONS[activation], HAS_BIAS=int(bias13 is not None), **launch_options(),
    )  # fmt: skip
    return gated


def _down(
    kernels: Any,
    gated: torch.Tensor,
    blocks: torch.Tensor,
    scales: torch.Tensor,
    bias2: torch.Tensor | None,
    weights: torch.Tensor,
    tiles: ExpertTiles,
) -> torch.Tensor:
    """Compute each pair's weighted output: ``[num_pairs, hidden_size]``."""
    num_pairs, hidden_size = gated.shape[1], blocks.shape[1]
    constants = launch_constants(gated.dtype, tiles.tile_pairs, hidden_size, 2 * gated.shape[2])
    results = torch.empty(num_pairs, hidden_size, dtype=gated.dtype, device=gated.device)
    kernels.down_mxfp4_kernel[(-(-hidden_size // constants["TILE_COLUMNS"]), len(tiles.experts))](
        gated, blocks, scales, scales if bias2 is None else bias2, weights, results, tiles.pairs, tiles.experts,
        num_pairs, 0 if bias2 is None else bias2.stride(0),
        **constants, HAS_BIAS=int(bias2 is not None), **launch_options(),
    )  # fmt: skip
    return results


def launch_constants(dtype: torch.dtype, tile_pairs: int, hidden_size: int, width: int) -> dict[str, int]:
    """Compile-time constants of both products; shared with the test that compiles them ahead of time.

    Each of the TILE_BYTES bytes holds the weights of two inputs.
    """
    return {
        "HIDDEN_SIZE": hidden_size,
        "WIDTH": width,
        "TILE_PAIRS": tile_pairs,
        "TILE_COLUMNS": 32 if dtype == torch.float32 else 64,
        "TILE_BYTES": 32,
    }


def launch_options() -> dict[str, int]:
    return {"num_warps": 4, "num_stages": 3}


def _check(
    x: torch.Tensor,
    w13_blocks: torch.Tensor,
    w13_scales: torch.Tensor,
    w2_blocks: torch.Tensor,
    w2_scales: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
) -> tuple[int, int]:
    """Check the arguments; return the hidden size and the experts' width."""
    byte, device = (torch.uint8,), x.device
    check_tensor("x", x, {"num_tokens": None, "hidden_size": None}, EXPERT_DTYPES, device)
    num_tokens, hidden_size = x.shape
    w2_dims = {"num_experts": None, "hidden_size": hidden_size, "width / 32": None, "bytes": GROUP_BYTES}
    check_tensor("w2_blocks", w2_blocks, w2_dims, byte, device)
    num_experts, width = len(w2_blocks), w2_blocks.shape[2] * GROUP_SIZE
    sizes = {"num_experts": num_experts, "2 * width": 2 * width, "hidden_size / 32": hidden_size // GROUP_SIZE}
    check_tensor("w13_blocks", w13_blocks, sizes | {"bytes": GROUP_BYTES}, byte, device)
    check_tensor("w13_scales", w13_scales, sizes, byte, device)
    sizes = {"num_experts": num_experts, "hidden_size": hidden_size, "width / 32": width // GROUP_SIZE}
    check_tensor("w2_scales", w2_scales, sizes, byte, device)
    check_tensor("expert_ids", expert_ids, {"num_tokens": num_tokens, "top_k": None}, (torch.int32,), device)
    dims = {"num_tokens": num_tokens, "top_k": expert_ids.shape[1]}
    check_tensor("weights", weights, dims, (torch.float32,), device)
    if hidden_size % GROUP_SIZE != 0:
        raise ValueError(f"x: dimension 1 (hidden_size) is {hidden_size}, expected a multiple of {GROUP_SIZE}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)} (got {activation!r})")
    names = ("w13_blocks", "w13_scales", "w2_blocks", "w2_scales", "expert_ids", "weights")
    tensors = (w13_blocks, w13_scales, w2_blocks, w2_scales, expert_ids, weights)
    for name, tensor in zip(names, tensors, strict=True):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, strides are {tensor.stride()}")
    return hidden_size, width


def _kernels(device: torch.device) -> tuple[Any, Any]:
    require_launchable(device.type)
    from quire.kernels.moe import fused_experts_mxfp4_triton, fused_experts_triton

    return fused_experts_mxfp4_triton, fused_experts_triton.sum_experts_kernel
