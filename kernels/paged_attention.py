"""Paged attention: causal attention of a step's tokens, prefill and decode alike, over the blocks of their rows.

The softmax is accumulated tile by tile over the keys: Milakov and Gimelshein, "Online normalizer calculation for
softmax" (2018), in the tiling of Dao et al., "FlashAttention" (2022). Keys are found through a block table as in Kwon
et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023).
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.checks import check_kv_cache, check_tensor
from quire.kernels.triton_runtime import require_launchable

QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}
"""How far an implementation may be from the reference, for standard normal inputs: the result is rounded to the dtype,
and so are the softmax weights where they are multiplied with the values."""

TILE_TOKENS = (1, 8, 64)
"""Tokens in a query tile: pure decode, verification of drafts, prefill. Few choices, since each is compiled."""


def paged_attention_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """What ``paged_attention`` computes, in plain torch and float64; they agree within ``TOLERANCES``."""
    block_size, num_kv_heads = kv_cache.shape[2:4]
    group = query.shape[1] // num_kv_heads
    out = torch.zeros_like(query)
    for row, (start, end) in enumerate(pairwise(query_start_loc.tolist())):
        seq_len = int(seq_lens[row])
        position = torch.arange(seq_len, device=query.device)
        block_id = block_table[row, position // block_size].long()
        key, value = kv_cache[:, block_id, position % block_size].double().repeat_interleave(group, dim=2)
        scores = torch.einsum("qhd,khd->hqk", query[start:end].double(), key) * scale
        query_position = position[seq_len - (end - start) :]
        scores = scores.masked_fill(position > query_position[:, None], -math.inf)
        out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(query.dtype)
    return out


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """How the tokens of a step are cut into tiles; the same for all layers.

    Attributes:
        table: int32 ``[num_tiles, 2]`` on the device: the tile's row, and its first token counted within the row.
        tile_tokens: tokens in a full tile; a row's last tile may have fewer.
        num_tokens: tokens of all rows, without padding.
    """

    table: torch.Tensor
    tile_tokens: int
    num_tokens: int


def plan_tiles(query_lens: npt.NDArray[np.int32], device: torch.device) -> QueryTiles:
    """Cut rows of ``query_lens`` tokens (int32 ``[num_rows]``, on the host) into tiles. A row may be empty."""
    longest = int(query_lens.max(initial=0))
    tile_tokens = next((size for size in TILE_TOKENS if longest <= size), TILE_TOKENS[-1])
    tiles_of_row = -(-query_lens.astype(np.int64) // tile_tokens)
    first_tile_of_row = np.cumsum(tiles_of_row) - tiles_of_row
    row_of_tile = np.repeat(np.arange(len(query_lens)), tiles_of_row)
    index_in_row = np.arange(len(row_of_tile)) - first_tile_of_row[row_of_tile]
    table = np.stack([row_of_tile, index_in_row * tile_tokens], axis=1).astype(np.int32)
    return QueryTiles(torch.from_numpy(table).to(device), tile_tokens, int(query_lens.sum()))


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    tiles: QueryTiles,
    scale: float,
) -> torch.Tensor:
    """Attend, by the Triton kernel. The last ``query_len`` of a row's ``seq_len`` tokens are its query.

    Args:
        query: float32, float16 or bfloat16 ``[num_tokens, num_heads, head_dim]``, tokens and heads possibly strided.
        kv_cache: query's dtype, ``[2, num_blocks, block_size, num_kv_heads, head_dim]``, this step's tokens written.
        block_table: int32 ``[num_rows, max_blocks]``, read up to each row's ``ceil(seq_len / block_size)``.
        query_start_loc: int32 ``[num_rows + 1]``.
        seq_lens: int32 ``[num_rows]``, each at least the row's query length.
        tiles: ``plan_tiles`` of the same query lengths.
        scale: factor on the scores.

    Returns:
        ``[num_tokens, num_heads, head_dim]`` in query's dtype, contiguous; zeros for padding behind the last row.

    Raises:
        ValueError: a tensor does not have the shape, dtype or place above, or the heads do not divide into groups.
        RuntimeError: Triton cannot launch here.
    """
    _check(query, kv_cache, block_table, query_start_loc, seq_lens, tiles)
    kernel = _kernel(query.device)
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = kv_cache.shape[2:4]
    allocate = torch.empty if tiles.num_tokens == num_tokens else torch.zeros
    out = allocate(query.shape, dtype=query.dtype, device=query.device)
    if len(tiles.table) == 0:
        return out
    group = num_heads // num_kv_heads
    constants = launch_constants(query.dtype, head_dim, group, block_size, tiles.tile_tokens)
    chunks = -(-group * tiles.tile_tokens // constants["TILE_LANES"])
    kernel[(len(tiles.table), num_kv_heads, chunks)](
        query,
        kv_cache,
        block_table,
        query_start_loc,
        seq_lens,
        tiles.table,
        out,
        scale * math.log2(math.e),
        *query.stride()[:2],
        *kv_cache.stride()[:4],
        block_table.stride(0),
        *out.stride()[:2],
        **constants,
        **launch_options(query.dtype, constants),
    )
    return out


def launch_constants(
    dtype: torch.dtype, head_dim: int, group: int, block_size: int, tile_tokens: int
) -> dict[str, int]:
    """What the kernel is compiled for; shared with the test that compiles it ahead.

    A tensor core wants at least 16 in every dimension. Above that, the tiles are the largest with which next to
    nothing spills from registers; exact float32 products are made outside the tensor cores, which takes more of them.
    """
    dims = max(16, _next_power_of_two(head_dim))
    full = dtype == torch.float32
    most_lanes = max(16, min(64, (4096 if full else 8192) // dims))
    most_keys = max(16, min(64, (2048 if full else 8192) // dims))
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "TILE_TOKENS": tile_tokens,
        "TILE_LANES": min(most_lanes, max(16, _next_power_of_two(group * tile_tokens))),
        "TILE_KEYS": most_keys,
        "TILE_DIMS": dims,
    }


def launch_options(dtype: torch.dtype, constants: dict[str, int]) -> dict[str, int]:
    """Warps that share a program's accumulator, and stages of keys and values in flight."""
    large = dtype == torch.float32 or constants["TILE_LANES"] * constants["TILE_DIMS"] >= 8192
    return {"num_warps": 8 if large else 4, "num_stages": 2}


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _check(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    tiles: QueryTiles,
) -> None:
    device = query.device
    query_dims = {"num_tokens": None, "num_heads": None, "head_dim": None}
    check_tensor("query", query, query_dims, QUERY_DTYPES, device)
    num_tokens, num_heads, head_dim = query.shape
    check_kv_cache(kv_cache, None, head_dim, like=query)
    num_kv_heads = kv_cache.shape[3]
    if num_heads % num_kv_heads != 0:
        raise ValueError(f"query: dimension 1 (num_heads) is {num_heads}, not a multiple of {num_kv_heads} KV heads")
    check_tensor("seq_lens", seq_lens, {"num_rows": None}, (torch.int32,), device)
    num_rows = len(seq_lens)
    check_tensor("query_start_loc", query_start_loc, {"num_rows + 1": num_rows + 1}, (torch.int32,), device)
    check_tensor("block_table", block_table, {"num_rows": num_rows, "max_blocks": None}, (torch.int32,), device)
    check_tensor("tiles.table", tiles.table, {"num_tiles": None, "row and first token": 2}, (torch.int32,), device)
    if tiles.num_tokens > num_tokens:
        raise ValueError(f"query: dimension 0 (num_tokens) is {num_tokens}, but the tiles are of {tiles.num_tokens}")


def _kernel(device: torch.device) -> Any:
    require_launchable(device.type)
    from quire.kernels.paged_attention_triton import paged_attention_kernel

    return paged_attention_kernel
