"""Mixture of experts with MXFP4 weights, which are decoded in registers: a quarter of the bytes are read.

A byte holds the weights of two neighbouring inputs. Instead of interleaving the decoded weights, the inputs are split:
even inputs are multiplied by the low halves of the bytes, odd inputs by the high halves, into one accumulator.
"""

from typing import Any

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.launches import Launch, layout_of, once_per_layout
from quire.kernels.common.mxfp4 import GROUP_BYTES, GROUP_SIZE
from quire.kernels.common.triton_runtime import require_launchable
from quire.kernels.dense.gated_activation import ACTIVATIONS
from quire.kernels.moe.fused_experts import EXPERT_DTYPES, ExpertLaunches, pick_tile_pairs, sum_launch
from quire.kernels.moe.moe_routing import max_tiles, sort_pairs

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
    tensors = x, w13_blocks, w13_scales, w2_blocks, w2_scales, expert_ids, weights, bias13, bias2
    launches = _prepare((*map(layout_of, tensors), activation), *tensors, activation)
    num_tokens, hidden_size = x.shape
    out = x.new_empty(num_tokens, hidden_size)
    if num_tokens == 0:
        return out
    num_pairs, width = expert_ids.numel(), w2_blocks.shape[2] * GROUP_SIZE
    tiles = sort_pairs(expert_ids, len(w13_blocks), launches.tile_pairs)
    even_odd = x.view(num_tokens, hidden_size // 2, 2).permute(2, 0, 1).contiguous()
    # Even columns and then odd ones, as the second product reads them.
    gated = x.new_empty(2, num_pairs, width // 2)
    bias = w13_scales if bias13 is None else bias13
    launches.gate_up(even_odd, w13_blocks, w13_scales, bias, gated, tiles.pairs, tiles.experts)
    results = x.new_empty(num_pairs, hidden_size)
    bias = w2_scales if bias2 is None else bias2
    launches.down(gated, w2_blocks, w2_scales, bias, weights, results, tiles.pairs, tiles.experts)
    launches.add(results, expert_ids, out)
    return out


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
    hidden_size, width = _check(x, w13_blocks, w13_scales, w2_blocks, w2_scales, expert_ids, weights, activation)
    num_experts = len(w13_blocks)
    for name, bias, columns in (("bias13", bias13, 2 * width), ("bias2", bias2, hidden_size)):
        if bias is not None:
            check_tensor(name, bias, {"num_experts": num_experts, "columns": columns}, BIAS_DTYPES, x.device)
    kernels, sum_kernel = _kernels(x.device)
    num_tokens, top_k = expert_ids.shape
    num_pairs = num_tokens * top_k
    tile_pairs = min(MAX_TILE_PAIRS, pick_tile_pairs(num_pairs, num_experts, x.dtype))
    num_tiles = max_tiles(num_pairs, num_experts, tile_pairs)
    constants = launch_constants(x.dtype, tile_pairs, hidden_size, width)
    columns = constants["TILE_COLUMNS"]
    first = {"ACTIVATION": ACTIVATIONS[activation], "HAS_BIAS": int(bias13 is not None)} | launch_options()
    second = {"HAS_BIAS": int(bias2 is not None)} | launch_options()
    bias13_stride, bias2_stride = (0 if bias is None else bias.stride(0) for bias in (bias13, bias2))
    return ExpertLaunches(
        tile_pairs,
        Launch(
            kernels.gate_up_mxfp4_kernel,
            (-(-width // columns), num_tiles),
            (num_tokens, num_pairs, top_k, bias13_stride),
            constants | first,
        ),
        Launch(
            kernels.down_mxfp4_kernel,
            (-(-hidden_size // columns), num_tiles),
            (num_pairs, bias2_stride),
            constants | second,
        ),
        sum_launch(sum_kernel, num_tokens, num_experts, hidden_size, top_k),
    )


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
