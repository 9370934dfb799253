"""Mixture of experts: routing of tokens to experts, and sorting of (token, expert) pairs into tiles of one expert.

A *pair* is one token with one of its ``top_k`` experts: pair ``token * top_k + j`` is the token's ``j``-th choice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.launches import Launch, launch_nothing, layout_of, once_per_layout
from quire.kernels.common.triton_runtime import require_launchable

LOGITS_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

MAX_EXPERTS = 1024
MAX_TOP_K = 32

SCAN_PAIRS = 2048
"""Pairs that a program reads at a time. One program per expert reads all pairs: 65,536 pairs take 32 iterations."""

TOLERANCE = (1e-5, 1e-7)
"""Relative and absolute tolerance of the kernel's weights against the reference; expert ids must be equal."""


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The pairs sorted by expert, in tiles of ``tile_pairs`` pairs; all pairs of a tile have the same expert.

    Sizes are those of the worst case: they depend only on the number of pairs, so the host does not wait for a count.

    Attributes:
        pairs: int32 ``[max_tiles * tile_pairs]``, ascending within an expert; tiles are padded with NO_PAIR.
        experts: int32 ``[max_tiles]``, ascending; NO_PAIR for unused tiles.
        tile_pairs: a power of two.
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    tile_pairs: int


NO_PAIR = -1


def route_reference(logits: torch.Tensor, top_k: int, *, renormalise: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of ``route``."""
    wide = logits.float()
    # A stable sort, because torch.topk does not define which of several equal values it returns.
    ids = wide.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = torch.softmax(wide, -1).gather(-1, ids)
    if renormalise:
        weights = torch.softmax(wide.gather(-1, ids), -1)
    return ids.int(), weights


def sort_pairs_reference(expert_ids: torch.Tensor, num_experts: int, tile_pairs: int) -> ExpertTiles:
    """Reference of ``sort_pairs``; the results are equal."""
    flat = expert_ids.flatten()
    tiles, experts = [], []
    for expert in range(num_experts):
        own = (flat == expert).nonzero()[:, 0].int()
        for start in range(0, len(own), tile_pairs):
            tile = torch.full((tile_pairs,), NO_PAIR, dtype=torch.int32, device=flat.device)
            part = own[start : start + tile_pairs]
            tile[: len(part)] = part
            tiles.append(tile)
            experts.append(expert)
    num_tiles = max_tiles(flat.numel(), num_experts, tile_pairs)
    pairs = torch.full((num_tiles * tile_pairs,), NO_PAIR, dtype=torch.int32, device=flat.device)
    if tiles:
        pairs[: len(tiles) * tile_pairs] = torch.cat(tiles)
    experts += [NO_PAIR] * (num_tiles - len(experts))
    return ExpertTiles(pairs, torch.tensor(experts, dtype=torch.int32, device=flat.device), tile_pairs)


def max_tiles(num_pairs: int, num_experts: int, tile_pairs: int) -> int:
    """Return the maximum number of tiles: each expert with pairs may have one tile that is not full."""
    with_pairs = min(num_pairs, num_experts)
    return with_pairs + (num_pairs - with_pairs) // tile_pairs


def route(logits: torch.Tensor, top_k: int, *, renormalise: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's ``top_k`` best experts, by the Triton kernel; of equal logits the lower expert id.

    Args:
        logits: the router's logits, float32, float16 or bfloat16 ``[num_tokens, num_experts]``, rows may be strided.
        renormalise: weights are the softmax over the chosen experts, so that they sum to 1 (Mixtral, gpt-oss,
            Qwen3-MoE with ``norm_topk_prob``). Otherwise they are taken from the softmax over all experts.

    Returns:
        Expert ids int32 ``[num_tokens, top_k]``, best first, and weights float32 of the same shape. A row with NaN
        has NaN weights and valid expert ids.

    Raises:
        ValueError: the tensor does not have this shape, dtype or device, or a number is out of range.
        RuntimeError: Triton cannot launch here.
    """
    launch = _prepare_route((layout_of(logits), top_k, renormalise), logits, top_k, renormalise)
    ids = logits.new_empty(logits.shape[0], top_k, dtype=torch.int32)
    weights = logits.new_empty(logits.shape[0], top_k, dtype=torch.float32)
    launch(logits, ids, weights)
    return ids, weights


@once_per_layout
def _prepare_route(logits: torch.Tensor, top_k: int, renormalise: bool) -> Callable[..., None]:
    """Check the arguments of ``route`` and return its launch, for logits, ids and weights."""
    check_tensor("logits", logits, {"num_tokens": None, "num_experts": None}, LOGITS_DTYPES, logits.device)
    num_tokens, num_experts = logits.shape
    if not 0 < num_experts <= MAX_EXPERTS:
        raise ValueError(f"logits: dimension 1 (num_experts) is {num_experts}, expected 1 to {MAX_EXPERTS}")
    if not 0 < top_k <= min(num_experts, MAX_TOP_K):
        raise ValueError(f"top_k: {top_k} of {num_experts} experts, expected 1 to {min(num_experts, MAX_TOP_K)}")
    kernel = _kernels(logits.device).route_kernel
    if num_tokens == 0:
        return launch_nothing
    constants = route_constants(num_experts, top_k, renormalise)
    grid = (-(-num_tokens // constants["TILE_TOKENS"]),)
    return Launch(kernel, grid, (num_tokens, num_experts, logits.stride(0)), constants)


def sort_pairs(expert_ids: torch.Tensor, num_experts: int, tile_pairs: int) -> ExpertTiles:
    """Sort a step's pairs into tiles of one expert each, by Triton kernels, without waiting on the host.

    Args:
        expert_ids: int32 ``[num_tokens, top_k]``, contiguous. An id outside ``[0, num_experts)`` is an expert of
            another rank: its pair is in no tile.
        tile_pairs: a power of two.

    Raises:
        ValueError: the tensor does not have this shape, dtype or device, or a number is out of range.
        RuntimeError: Triton cannot launch here.
    """
    layouts = layout_of(expert_ids), num_experts, tile_pairs
    num_tiles, count, place = _prepare_sort(layouts, expert_ids, num_experts, tile_pairs)
    filled = torch.full((num_tiles * (tile_pairs + 1),), NO_PAIR, dtype=torch.int32, device=expert_ids.device)
    tiles = ExpertTiles(filled[: num_tiles * tile_pairs], filled[num_tiles * tile_pairs :], tile_pairs)
    counts = expert_ids.new_empty(num_experts)
    count(expert_ids, counts)
    place(expert_ids, counts, tiles.pairs, tiles.experts)
    return tiles


@once_per_layout
def _prepare_sort(
    expert_ids: torch.Tensor, num_experts: int, tile_pairs: int
) -> tuple[int, Callable[..., None], Callable[..., None]]:
    """Check the arguments of ``sort_pairs``; return the number of tiles, and the launches that count and place."""
    check_tensor("expert_ids", expert_ids, {"num_tokens": None, "top_k": None}, (torch.int32,), expert_ids.device)
    if not expert_ids.is_contiguous():
        raise ValueError(f"expert_ids: expected a contiguous tensor, strides are {expert_ids.stride()}")
    if not 0 < num_experts <= MAX_EXPERTS or tile_pairs < 1 or tile_pairs & (tile_pairs - 1) != 0:
        raise ValueError(
            f"num_experts must be between 1 and {MAX_EXPERTS} and tile_pairs a power of two "
            f"(got {num_experts} and {tile_pairs})"
        )
    kernels = _kernels(expert_ids.device)
    num_pairs = expert_ids.numel()
    num_tiles = max_tiles(num_pairs, num_experts, tile_pairs)
    if num_pairs == 0:
        return num_tiles, launch_nothing, launch_nothing
    scan = {"SCAN_PAIRS": SCAN_PAIRS}
    tiles = {"TILE_PAIRS": tile_pairs, "TILE_EXPERTS": 1 << (num_experts - 1).bit_length()}
    count = Launch(kernels.count_pairs_kernel, (num_experts,), (num_pairs,), scan)
    place = Launch(kernels.place_pairs_kernel, (num_experts,), (num_pairs, num_experts), tiles | scan)
    return num_tiles, count, place


def route_constants(num_experts: int, top_k: int, renormalise: bool) -> dict[str, int]:
    """Compile-time constants of the routing kernel; shared with the test that compiles it ahead of time."""
    tile_experts = 1 << (num_experts - 1).bit_length()
    return {
        "TOP_K": top_k,
        "RENORMALISE": int(renormalise),
        "TILE_TOKENS": max(1, 512 // tile_experts),
        "TILE_EXPERTS": tile_experts,
        "TILE_TOP_K": 1 << (top_k - 1).bit_length(),
    }


def _kernels(device: torch.device) -> Any:
    require_launchable(device.type)
    from quire.kernels.moe import moe_routing_triton

    return moe_routing_triton
