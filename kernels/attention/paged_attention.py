"""Paged attention: causal attention of a step's tokens, prefill and decode alike, over the blocks of their rows.

The softmax is accumulated tile by tile over the keys: Milakov and Gimelshein, "Online normalizer calculation for
softmax" (2018), in the tiling of Dao et al., "FlashAttention" (2022). Keys are found through a block table as in Kwon
et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023). Long rows are cut
over their keys as in "Flash-Decoding" (Dao et al., 2023). The work list, and attending once to a prefix that rows
share, follow FlashInfer (Ye et al., arXiv 2501.01005).
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from quire.kernels.attention.attention_plan import AttentionPlan, Section
from quire.kernels.attention.attention_tiles import (
    KEY_ALIGN,
    MAX_HEAD_DIM,
    AttentionShape,
    Tiles,
    lane_chunks,
    launch_options,
    next_power_of_two,
    tiles_of,
)
from quire.kernels.common.checks import check_kv_cache, check_scale, check_tensor
from quire.kernels.common.fp8 import FP8_DTYPES, as_bits
from quire.kernels.common.launches import Launch
from quire.kernels.common.triton_runtime import require_launchable

LOG2_E = math.log2(math.e)
"""The kernels' scores are in units of log2."""

QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}
"""Allowed difference from the reference for standard normal inputs: the result is rounded to the dtype, and so are the
softmax weights before they are multiplied with the values."""


def paged_attention_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    chunk: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    value_dim: int = 0,
    last_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``PagedAttention`` in plain torch and float64; the two agree within ``TOLERANCES``.

    ``window``, ``chunk`` and ``last_keys`` are those of the plan.
    """
    block_size, num_kv_heads = kv_cache.shape[2:4]
    group = query.shape[1] // num_kv_heads
    out = query.new_zeros(*query.shape[:2], value_dim or query.shape[2])
    for row, (start, end) in enumerate(pairwise(query_start_loc.tolist())):
        seq_len = int(seq_lens[row])
        query_position = torch.arange(seq_len - (end - start), seq_len, device=query.device)[:, None]
        lowest = query_position - window + 1 if window else torch.zeros_like(query_position)
        lowest = query_position // chunk * chunk if chunk else lowest
        highest = query_position if last_keys is None else last_keys[start:end, None]
        first = max(0, int(lowest.min())) if len(query_position) else seq_len
        position = torch.arange(first, seq_len, device=query.device)
        block_id = block_table[row, position // block_size].long()
        gathered = as_bits(kv_cache)[:, block_id, position % block_size].view(kv_cache.dtype)
        parts = gathered.to(torch.float32).double() if kv_cache.dtype in FP8_DTYPES else gathered.double()
        key, value = parts[0], parts[-1][..., -out.shape[2] :]
        key = key if k_scale is None else key * k_scale.double()[:, None]
        value = value if v_scale is None else value * v_scale.double()[:, None]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[start:end].double(), key) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill((position > highest) | (position < lowest), -math.inf)
        if sinks is not None:
            sink = sinks.double()[:, None, None].expand(-1, end - start, 1)
            scores = torch.cat((scores, sink), dim=-1)
        weights = scores.softmax(-1)[:, :, : len(position)]
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)
    return out


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Checked launches for one plan, and for layers whose tensors have the layouts of those that were checked.

    Attributes:
        padded: the query has tokens that the plan does not compute, or may have them.
    """

    out_shape: tuple[int, ...]
    padded: bool
    sections: tuple[Launch, ...] = ()
    merge: Launch | None = None

    def __call__(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        sinks: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention.

        Args:
            kv_cache: given ``as_bits``.

        Returns:
            ``[num_tokens, num_heads, head_dim]`` (``value_dim`` with latents) in query's dtype, contiguous, with zeros
            for padding.
        """
        out = (query.new_zeros if self.padded else query.new_empty)(*self.out_shape)
        for attend in self.sections:
            attend(query, kv_cache, out, sinks, k_scale, v_scale)
        if self.merge is not None:
            self.merge(out, sinks)
        return out


def prepare_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    *,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    value_dim: int = 0,
) -> PagedAttention:
    """Check a layer's tensors, and return the launches of attention with the Triton kernels.

    The launches keep the step's tensors: block table, lengths and plan. The last ``query_len`` of a row's ``seq_len``
    tokens are its query.

    With a plan made with ``fixed_split``, on one device and with one compiler, a query's result depends, bit for bit,
    on its own keys alone: not on the other rows, on the chunks in which the prompt was computed, or on the blocks it
    uses. Four properties guarantee this. Each lane of a tile is computed by itself. Every tile runs the same compiled
    code with the same boundaries between its keys. Keys that only other lanes see add zeros. Pieces are added from left
    to right by the same rounded operations, in a program's registers (``fold``) or in the merge.

    Args:
        query: float32, float16 or bfloat16 ``[num_tokens, num_heads, head_dim]``, tokens and heads possibly strided.
        kv_cache: query's dtype, float8_e4m3fn or float8_e5m2
            ``[2, num_blocks, block_size, num_kv_heads, head_dim]``, with this step's tokens written.
        block_table: int32 ``[num_rows, max_blocks]``, read up to each row's ``ceil(seq_len / block_size)``, and not
            left of the first key that the row's first query sees.
        query_start_loc: int32 ``[num_rows + 1]``.
        seq_lens: int32 ``[num_rows]``, each at least the row's query length.
        plan: from ``plan_attention`` or ``plan_decode`` for the same lengths; holds the window or the chunk.
        scale: factor on the scores.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``; 0 leaves them unchanged.
        sinks: float32 ``[num_heads]``: an additional score per head in the softmax's sum, without a value.
        k_scale, v_scale: float32 ``[1]`` or ``[num_kv_heads]``: factors on an fp8 cache; None means 1.
        value_dim: the cache has one part, keys, whose last ``value_dim`` numbers are the values; 0: it has both.

    Raises:
        ValueError: a tensor does not have the shape, dtype or device above, or does not fit the plan.
        RuntimeError: Triton cannot launch in this process.
    """
    shape = _check_shape(query, kv_cache, value_dim)
    _check_rows(query, block_table, query_start_loc, seq_lens, plan, shape)
    _check_extras(query, kv_cache, sinks, k_scale, v_scale)
    require_launchable(query.device.type)
    from quire.kernels.attention.paged_attention_triton import attention_kernel, merge_kernel

    padded = plan.num_tokens != len(query)
    out_shape = (*query.shape[:2], shape.out_dim)
    if not plan.num_rows:
        return PagedAttention(out_shape, padded)
    # With a cap the kernel computes tanh(x) from exp2(2 * x * log2(e)), hence the factor 2 / cap.
    factor = (2 / soft_cap if soft_cap else 1) * scale * LOG2_E
    out_strides = (shape.num_heads * shape.out_dim, shape.out_dim)
    sections = []
    for section in plan.sections:
        tiles = tiles_of(shape, section.regime, section.tile_tokens, plan.capability)
        chunks = lane_chunks(shape, tiles, section.tile_tokens)
        last = (
            block_table, query_start_loc, seq_lens, plan.positions, plan.last_keys, section.pieces,
            plan.scratch.acc, plan.scratch.stats, factor, soft_cap * LOG2_E, plan.visible.reach, plan.num_rows,
            shape.num_kv_heads, section.tile_tokens, chunks, *query.stride()[:2], *kv_cache.stride()[:4],
            block_table.stride(0), *out_strides,
        )  # fmt: skip
        constants = {"SOFT_CAP": soft_cap > 0} | cache_constants(kv_cache.dtype, k_scale, v_scale)
        constants |= launch_constants(shape, kv_cache.shape[2], section, tiles, plan) | launch_options(tiles)
        if len(section.pieces):
            grid = (len(section.pieces) * shape.num_kv_heads * chunks,)
            sections.append(Launch(attention_kernel, grid, last, constants))
    merge = None
    if len(plan.merges):
        counts = (shape.num_heads, plan.num_prefix, plan.prefix_stride)
        last = (plan.scratch.acc, plan.scratch.stats, plan.merges, *counts, *out_strides)
        constants = merge_constants(shape.out_dim, plan.fixed_split)
        merge = Launch(merge_kernel, (len(plan.merges), shape.num_heads), last, constants)
    return PagedAttention(out_shape, padded, tuple(sections), merge)


def launch_constants(
    shape: AttentionShape, block_size: int, section: Section, tiles: Tiles, plan: AttentionPlan
) -> dict[str, Any]:
    """Return compile-time constants of the attention kernel, together with ``cache_constants``.

    The ahead-of-time compilation test uses them too.
    """
    return {
        "GROUP": shape.group,
        "HEAD_DIM": shape.out_dim,
        "ROPE_DIM": shape.head_dim - shape.out_dim,
        "BLOCK_SIZE": block_size,
        **plan.visible.constants,
        "SHARED": section.shared,
        "LEAD": plan.visible.reach > 0 or plan.visible.prefix_len % KEY_ALIGN != 0,
        "WHOLE_TILES": section.regime == "prefill",
        "SEGMENT": plan.fixed_split,
        "TILE_LANES": tiles.lanes,
        "TILE_KEYS": tiles.keys,
        "TILE_DIMS": max(16, next_power_of_two(shape.out_dim)),
        "TILE_ROPE": max(16, next_power_of_two(max(1, shape.head_dim - shape.out_dim))),
    }


def cache_constants(
    cache_dtype: torch.dtype, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> dict[str, Any]:
    """Return the compile-time constants for reading cache elements in the query's dtype."""
    return {
        "CACHE": {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}.get(cache_dtype, "same"),
        "K_SCALE_STRIDE": int(k_scale is not None and len(k_scale) > 1),
        "V_SCALE_STRIDE": int(v_scale is not None and len(v_scale) > 1),
    }


def merge_constants(head_dim: int, fixed_split: int) -> dict[str, Any]:
    """Return the compile-time constants of the kernel that merges the partial results of a row's pieces of keys.

    Args:
        fixed_split: keys per piece in deterministic mode, else 0. With it, the kernel adds one partial result at a
            time. This is slower, but the rounding no longer depends on how many results are added at once.
    """
    return {
        "HEAD_DIM": head_dim,
        "TILE_PARTIALS": 1 if fixed_split else 16,
        "TILE_DIMS": max(16, next_power_of_two(head_dim)),
    }


def _check_shape(query: torch.Tensor, kv_cache: torch.Tensor, value_dim: int) -> AttentionShape:
    query_dims = {"num_tokens": None, "num_heads": None, "head_dim": None}
    check_tensor("query", query, query_dims, QUERY_DTYPES, query.device)
    _, num_heads, head_dim = query.shape
    if not 0 < (value_dim or head_dim) <= MAX_HEAD_DIM:
        raise ValueError(f"query: dimension 2 (head_dim) is {value_dim or head_dim}, not in [1, {MAX_HEAD_DIM}]")
    check_kv_cache(kv_cache, None, head_dim, query, (query.dtype, *FP8_DTYPES), parts=1 if value_dim else 2)
    num_kv_heads = kv_cache.shape[3]
    if num_kv_heads == 0 or num_heads % num_kv_heads != 0:
        raise ValueError(f"query: dimension 1 (num_heads) is {num_heads}, not a multiple of {num_kv_heads} KV heads")
    return AttentionShape(num_heads, num_kv_heads, head_dim, query.dtype, value_dim)


def _check_rows(
    query: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: AttentionPlan,
    shape: AttentionShape,
) -> None:
    device, num_rows = query.device, len(seq_lens)
    check_tensor("seq_lens", seq_lens, {"num_rows": None}, (torch.int32,), device)
    check_tensor("query_start_loc", query_start_loc, {"num_rows + 1": num_rows + 1}, (torch.int32,), device)
    check_tensor("block_table", block_table, {"num_rows": num_rows, "max_blocks": None}, (torch.int32,), device)
    if plan.shape != shape:
        raise ValueError(f"plan: shape is {plan.shape}, expected {shape}")
    if plan.num_rows != num_rows:
        raise ValueError(f"seq_lens: dimension 0 (num_rows) is {num_rows}, but the plan is for {plan.num_rows}")
    if plan.num_tokens is not None and plan.num_tokens > len(query):
        raise ValueError(f"query: dimension 0 (num_tokens) is {len(query)}, but the plan is for {plan.num_tokens}")
    if plan.num_prefix and plan.prefix_stride != len(query):
        raise ValueError(
            f"query: dimension 0 (num_tokens) is {len(query)}, but the prefix is planned for {plan.prefix_stride}"
        )


def _check_extras(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    if sinks is not None:
        check_tensor("sinks", sinks, {"num_heads": query.shape[1]}, (torch.float32,), query.device)
    if kv_cache.dtype not in FP8_DTYPES and not (k_scale is None and v_scale is None):
        raise ValueError(f"k_scale, v_scale: a cache of {kv_cache.dtype} has no scales")
    num_kv_heads = kv_cache.shape[3]
    check_scale("k_scale", k_scale, num_kv_heads, query.device)
    check_scale("v_scale", v_scale, num_kv_heads, query.device)
