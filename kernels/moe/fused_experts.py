"""Mixture of experts: the gated MLPs of each token's experts, as grouped products over tiles of one expert."""

from dataclasses import dataclass
from typing import Any

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.launches import Launch, layout_of, once_per_layout
from quire.kernels.common.triton_runtime import require_launchable
from quire.kernels.dense.gated_activation import ACTIVATIONS, gate_reference
from quire.kernels.moe.moe_routing import max_tiles, sort_pairs

EXPERT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

TOLERANCES = {torch.float32: (1e-4, 1e-4), torch.float16: (1e-2, 1e-2), torch.bfloat16: (4e-2, 4e-2)}
"""Relative and absolute tolerance of kernel against reference, for outputs around 1. The gated activations and each
pair's result are rounded to the dtype, and sums over a few thousand elements may have another order."""


def fused_experts_reference(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    activation: str = "silu",
    *,
    bias13: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of ``fused_experts``, one expert at a time; rounded after the activation and at the end."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(w13)):
        token, choice = (expert_ids == expert).nonzero(as_tuple=True)
        gate_up = x[token].float() @ w13[expert].float().t()
        if bias13 is not None:
            gate_up += bias13[expert].float()
        result = gate_reference(gate_up, activation).to(x.dtype).float() @ w2[expert].float().t()
        if bias2 is not None:
            result += bias2[expert].float()
        total.index_add_(0, token, result * weights[token, choice, None])
    return total.to(x.dtype)


def fused_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    activation: str = "silu",
    *,
    bias13: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute every token's weighted sum over its experts, by Triton kernels.

    Can be captured in a CUDA graph. The result is the same in every run.

    Args:
        x: float32, float16 or bfloat16 ``[num_tokens, hidden_size]``, rows may be strided.
        w13: ``[num_experts, 2 * width, hidden_size]``, converted to ``x``'s dtype: gate rows, then up rows; even and
            odd rows for ``swiglu_oai``.
        w2: ``[num_experts, hidden_size, width]``, converted to ``x``'s dtype.
        expert_ids: int32 ``[num_tokens, top_k]``, contiguous, without duplicates in a row. An id outside the range is
            an expert of another rank, and adds nothing.
        weights: float32 ``[num_tokens, top_k]``, contiguous.
        activation: as ``gated_activation.gate``.
        bias13, bias2: ``[num_experts, 2 * width]`` and ``[num_experts, hidden_size]``, in any of the three dtypes.

    Returns:
        ``[num_tokens, hidden_size]``; a token's sum runs in the order of ``expert_ids``.

    Raises:
        ValueError: a tensor does not have this shape, dtype or device, or the activation is unknown.
        RuntimeError: Triton cannot launch here.
    """
    tensors = x, w13, w2, expert_ids, weights, bias13, bias2
    launches = _prepare((*map(layout_of, tensors), activation), *tensors, activation)
    num_tokens, hidden_size = x.shape
    out = x.new_empty(num_tokens, hidden_size)
    if num_tokens == 0:
        return out
    num_experts, _, width = w2.shape
    tiles = sort_pairs(expert_ids, num_experts, launches.tile_pairs)
    gated = x.new_empty(expert_ids.numel(), width)
    launches.gate_up(x, w13, w13 if bias13 is None else bias13, gated, tiles.pairs, tiles.experts)
    # Pairs of other ranks are not written.
    results = x.new_empty(expert_ids.numel(), hidden_size)
    launches.down(gated, w2, w2 if bias2 is None else bias2, weights, results, tiles.pairs, tiles.experts)
    launches.add(results, expert_ids, out)
    return out


@dataclass(frozen=True, slots=True)
class ExpertLaunches:
    """The products of a layer's experts, and the sum of each token's results."""

    tile_pairs: int
    gate_up: Launch
    down: Launch
    add: Launch


@once_per_layout
def _prepare(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    bias13: torch.Tensor | None,
    bias2: torch.Tensor | None,
    activation: str,
) -> ExpertLaunches:
    """Check the arguments of ``fused_experts`` and return its launches."""
    _check(x, w13, w2, expert_ids, weights, activation, bias13, bias2)
    kernels = _kernels(x.device)
    num_experts, hidden_size, width = w2.shape
    num_tokens, top_k = expert_ids.shape
    tile_pairs = pick_tile_pairs(expert_ids.numel(), num_experts, x.dtype)
    num_tiles = max_tiles(expert_ids.numel(), num_experts, tile_pairs)
    first = launch_constants(x.dtype, tile_pairs, hidden_size, width, down=False)
    second = launch_constants(x.dtype, tile_pairs, hidden_size, width, down=True)
    options = launch_options(x.dtype, tile_pairs)
    return ExpertLaunches(
        tile_pairs,
        Launch(
            kernels.gate_up_kernel,
            (-(-width // first["TILE_COLUMNS"]), num_tiles),
            (top_k, x.stride(0), *w13.stride()[:2], 0 if bias13 is None else bias13.stride(0)),
            first | {"ACTIVATION": ACTIVATIONS[activation], "HAS_BIAS": int(bias13 is not None)} | options,
        ),
        Launch(
            kernels.down_kernel,
            (-(-hidden_size // second["TILE_COLUMNS"]), num_tiles),
            (*w2.stride()[:2], 0 if bias2 is None else bias2.stride(0)),
            second | {"HAS_BIAS": int(bias2 is not None)} | options,
        ),
        sum_launch(kernels.sum_experts_kernel, num_tokens, num_experts, hidden_size, top_k),
    )


def pick_tile_pairs(num_pairs: int, num_experts: int, dtype: torch.dtype) -> int:
    """Choose the pairs per tile: about an expert's pairs, so that few rows are empty and weights are read once."""
    each = num_pairs // num_experts
    limit = 64 if dtype == torch.float32 else 128
    return min(limit, max(16, 1 << max(each - 1, 0).bit_length()))


def launch_constants(dtype: torch.dtype, tile_pairs: int, hidden_size: int, width: int, down: bool) -> dict[str, int]:
    """Compile-time constants of a product; shared with the test that compiles both ahead of time.

    The first product has two accumulators, so its tiles have half the columns of the second (``down``).
    """
    sizes = {"HIDDEN_SIZE": hidden_size, "WIDTH": width, "TILE_PAIRS": tile_pairs}
    if dtype == torch.float32:
        return sizes | {"TILE_COLUMNS": 32, "TILE_INNER": 32}
    # With few rows a long inner tile keeps more bytes of the weights in flight, which limits the speed.
    columns = 128 if down and tile_pairs >= 64 else 64
    return sizes | {"TILE_COLUMNS": columns, "TILE_INNER": 128 if tile_pairs <= 32 else 64}


def launch_options(dtype: torch.dtype, tile_pairs: int) -> dict[str, int]:
    """Return the warps that share the accumulators, and the pipeline stages of tiles in flight."""
    return {"num_warps": 8 if tile_pairs >= 128 else 4, "num_stages": 2 if dtype == torch.float32 else 3}


def sum_launch(kernel: Any, num_tokens: int, num_experts: int, hidden_size: int, top_k: int) -> Launch:
    """Return the launch for results, expert_ids and out."""
    constants = sum_launch_constants(hidden_size, top_k)
    grid = (num_tokens, -(-hidden_size // constants["TILE_ELEMENTS"]))
    return Launch(kernel, grid, (num_experts, hidden_size), constants)


def sum_launch_constants(hidden_size: int, top_k: int) -> dict[str, int]:
    return {"TOP_K": top_k, "TILE_ELEMENTS": min(1 << (hidden_size - 1).bit_length(), 1024)}


def _check(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
    bias13: torch.Tensor | None,
    bias2: torch.Tensor | None,
) -> None:
    device = x.device
    check_tensor("x", x, {"num_tokens": None, "hidden_size": None}, EXPERT_DTYPES, device)
    num_tokens, hidden_size = x.shape
    check_tensor("w2", w2, {"num_experts": None, "hidden_size": hidden_size, "width": None}, EXPERT_DTYPES, device)
    num_experts, _, width = w2.shape
    w13_dims = {"num_experts": num_experts, "2 * width": 2 * width, "hidden_size": hidden_size}
    check_tensor("w13", w13, w13_dims, EXPERT_DTYPES, device)
    check_tensor("expert_ids", expert_ids, {"num_tokens": num_tokens, "top_k": None}, (torch.int32,), device)
    dims = {"num_tokens": num_tokens, "top_k": expert_ids.shape[1]}
    check_tensor("weights", weights, dims, (torch.float32,), device)
    for name, tensor in (("expert_ids", expert_ids), ("weights", weights)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, strides are {tensor.stride()}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)} (got {activation!r})")
    for name, bias, columns in (("bias13", bias13, 2 * width), ("bias2", bias2, hidden_size)):
        if bias is not None:
            bias_dims = {"num_experts": num_experts, "columns": columns}
            check_tensor(name, bias, bias_dims, EXPERT_DTYPES, device)


def _kernels(device: torch.device) -> Any:
    require_launchable(device.type)
    from quire.kernels.moe import fused_experts_triton

    return fused_experts_triton
