"""Mixture of experts: the gated MLPs of each token's experts, as grouped products over tiles of one expert."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.launches import Launch, layout_of, once_per_layout
from quire.kernels.common.triton_runtime import require_launchable
from quire.kernels.dense.gated_activation import ACTIVATIONS, gate_reference
from quire.kernels.moe.moe_routing import max_tiles, sort_pairs

EXPERT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

PLAIN, MXFP4 = 3, 4
"""KIND of the kernel; smaller numbers are those of ``packed_linear.KINDS``."""

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
    return launches(x, (w13, None, None, bias13), (w2, None, None, bias2), expert_ids, weights)


@dataclass(frozen=True, slots=True)
class ExpertLaunches:
    """The launches of a layer: both products of its experts, and the sum of each token's results."""

    num_experts: int
    hidden_size: int
    width: int
    tile_pairs: int
    gate_up: Launch
    down: Launch
    add: Launch

    def __call__(
        self,
        x: torch.Tensor,
        first: tuple[torch.Tensor | None, ...],
        second: tuple[torch.Tensor | None, ...],
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        round_inputs: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Launch. ``first`` and ``second`` are codes, scales, zeros and bias of the weights of each product."""
        num_tokens, top_k = expert_ids.shape
        out = x.new_empty(num_tokens, self.hidden_size)
        if num_tokens == 0:
            return out
        tiles = sort_pairs(expert_ids, self.num_experts, self.tile_pairs)
        gated = x.new_empty(num_tokens * top_k, self.width)
        self.gate_up(x, *first, weights, gated, tiles.pairs, tiles.experts)
        gated = gated if round_inputs is None else round_inputs(gated)
        # Pairs of other ranks are not written.
        results = x.new_empty(num_tokens * top_k, self.hidden_size)
        self.down(gated, *second, weights, results, tiles.pairs, tiles.experts)
        self.add(results, expert_ids, out)
        return out


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
    check_tensor("w2", w2, {"num_experts": None, "hidden_size": None, "width": None}, EXPERT_DTYPES, x.device)
    num_experts, hidden_size, width = w2.shape
    check_routing(x, hidden_size, expert_ids, weights, activation)
    w13_dims = {"num_experts": num_experts, "2 * width": 2 * width, "hidden_size": hidden_size}
    check_tensor("w13", w13, w13_dims, EXPERT_DTYPES, x.device)
    tile_pairs = pick_tile_pairs(expert_ids.numel(), num_experts, x.dtype)
    return prepare_launches(
        expert_ids,
        w2.shape,
        activation,
        (bias13, bias2),
        strides=((x.stride(0), 0, *w13.stride()[:2], 0), (width, 0, *w2.stride()[:2], 0)),
        constants=[launch_constants(x.dtype, tile_pairs, down) for down in (False, True)],
        options=launch_options(x.dtype, tile_pairs),
    )


def prepare_launches(
    expert_ids: torch.Tensor,
    sizes: tuple[int, ...],
    activation: str,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    *,
    strides: tuple[tuple[int, ...], tuple[int, ...]],
    constants: list[dict[str, int]],
    options: dict[str, int],
) -> ExpertLaunches:
    """Check the biases, and return the launches of a layer whose weights may have any form.

    Args:
        sizes: number of experts, hidden size and width.
        strides: for each product, the first five numbers among the arguments of ``experts_kernel``.
        constants: for each product, those that depend on the form of its weights.
    """
    num_experts, hidden_size, width = sizes
    num_tokens, top_k = expert_ids.shape
    for name, bias, columns in (("bias13", biases[0], 2 * width), ("bias2", biases[1], hidden_size)):
        if bias is not None:
            dims = {"num_experts": num_experts, "columns": columns}
            check_tensor(name, bias, dims, EXPERT_DTYPES, expert_ids.device)
    require_launchable(expert_ids.device.type)
    from quire.kernels.moe.fused_experts_triton import experts_kernel, sum_experts_kernel

    tile_pairs = constants[0]["TILE_ROWS"]
    num_tiles = max_tiles(num_tokens * top_k, num_experts, tile_pairs)
    products = []
    for down, bias, own_strides, own in zip((False, True), biases, strides, constants, strict=True):
        outputs = hidden_size if down else width
        # 0 for other forms, because Triton would compile variants for some numbers of tokens.
        out_odd_stride = num_tokens * top_k * (width // 2) if own["KIND"] == MXFP4 else 0
        last = (*own_strides, 0 if bias is None else bias.stride(0), out_odd_stride)
        grid = (-(-outputs // own["TILE_COLUMNS"]), num_tiles)
        common = product_constants(activation, down, top_k, hidden_size, width, bias is not None)
        products.append(Launch(experts_kernel, grid, last, common | own | options))
    total = sum_launch_constants(hidden_size, top_k)
    grid = (num_tokens, -(-hidden_size // total["TILE_ELEMENTS"]))
    add = Launch(sum_experts_kernel, grid, (num_experts, hidden_size), total)
    return ExpertLaunches(num_experts, hidden_size, width, tile_pairs, products[0], products[1], add)


def pick_tile_pairs(num_pairs: int, num_experts: int, dtype: torch.dtype) -> int:
    """Choose the pairs per tile: about an expert's pairs, so that few rows are empty and weights are read once."""
    each = num_pairs // num_experts
    limit = 64 if dtype == torch.float32 else 128
    return min(limit, max(16, 1 << max(each - 1, 0).bit_length()))


def product_constants(
    activation: str, down: bool, top_k: int, hidden_size: int, width: int, has_bias: bool
) -> dict[str, int]:
    """Compile-time constants of a product over any form of weights; shared with the ahead-of-time test."""
    sizes = {"INPUTS": width, "OUTPUTS": hidden_size} if down else {"INPUTS": hidden_size, "OUTPUTS": width}
    return sizes | {
        "ACTIVATION": -1 if down else ACTIVATIONS[activation],
        "TOP_K": top_k,
        "HAS_BIAS": int(has_bias),
        "GROUP_SIZE": 0,
        "HAS_ZEROS": 0,
        "MASKED": 0,
    }


def launch_constants(dtype: torch.dtype, tile_pairs: int, down: bool) -> dict[str, int]:
    """Compile-time constants of a product over plain weights.

    The first product has two accumulators, so its tiles have half the columns of the second (``down``).
    """
    constants = {"KIND": PLAIN, "TILE_ROWS": tile_pairs}
    if dtype == torch.float32:
        return constants | {"TILE_COLUMNS": 32, "TILE_INPUTS": 32}
    # With few rows a long inner tile keeps more bytes of the weights in flight, which limits the speed.
    columns = 128 if down and tile_pairs >= 64 else 64
    return constants | {"TILE_COLUMNS": columns, "TILE_INPUTS": 128 if tile_pairs <= 32 else 64}


def launch_options(dtype: torch.dtype, tile_pairs: int) -> dict[str, int]:
    """Return the warps that share the accumulators, and the pipeline stages of tiles in flight."""
    return {"num_warps": 8 if tile_pairs >= 128 else 4, "num_stages": 2 if dtype == torch.float32 else 3}


def sum_launch_constants(hidden_size: int, top_k: int) -> dict[str, int]:
    return {"TOP_K": top_k, "TILE_ELEMENTS": min(1 << (hidden_size - 1).bit_length(), 1024)}


def check_routing(
    x: torch.Tensor,
    hidden_size: int,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
    allowed: Collection[str] = ACTIVATIONS,
) -> None:
    """Check the arguments that are the same for all forms of weights."""
    check_tensor("x", x, {"num_tokens": None, "hidden_size": hidden_size}, EXPERT_DTYPES, x.device)
    check_tensor("expert_ids", expert_ids, {"num_tokens": len(x), "top_k": None}, (torch.int32,), x.device)
    dims = {"num_tokens": len(x), "top_k": expert_ids.shape[1]}
    check_tensor("weights", weights, dims, (torch.float32,), x.device)
    check_contiguous(expert_ids=expert_ids, weights=weights)
    if activation not in allowed:
        raise ValueError(f"activation must be one of {', '.join(allowed)} (got {activation!r})")


def check_contiguous(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, strides are {tensor.stride()}")
