"""Attention plan of one step on the CPU: index tensors and masks that its layers share, made by vector operations.

Decoding rows are computed in *tiles* of rows of similar length, small enough that the gathered keys and values stay in
the processor's cache. Rows with several new tokens (prefill chunks) are computed one by one.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.model.kv_layout import NULL_BLOCK_ID
from quire.worker_proc.attention.backend import StepBatch

QUERY_TILE = 256
"""Queries of one chunk per call, which limits the mask to ``QUERY_TILE x context``."""

TILE_BYTES_PER_THREAD = 3 << 20
"""Gathered keys and values per decode tile: larger tiles fall out of the processor's cache, smaller ones cost calls."""

PADDED_WORK = 1.3
"""A tile holds rows whose context is shorter than its longest by at most this factor ..."""

TILE_OVERHEAD_BYTES = 384 << 10
"""... or whose padding, in total, costs less than the calls of another tile."""

_Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """Rows with one new token each and contexts of similar length, computed in one call.

    Attributes:
        rows: slice of the decoding rows, in the plan's order.
        cache_rows: int64 ``[2 * rows * num_kv_heads * blocks]``: indices to gather from a cache viewed as
            ``[2 * num_blocks * num_kv_heads, block_size * head_dim]``.
        mask: ``[rows, 1, 1, blocks * block_size]`` in the queries' dtype: 0, or -inf for positions that the row's query
            does not see (past its length, left of its window or before its chunk).
        tail: int64: indices into ``[2 * rows * num_kv_heads * blocks * block_size]`` of the slots in gathered blocks
            that the query does not see.
    """

    rows: slice
    cache_rows: torch.Tensor
    mask: torch.Tensor
    tail: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """A row with several new tokens.

    Attributes:
        tokens: slice of the step's tokens.
        context: number of tokens before them.
        first_keys, last_keys: int64 ``[tokens]``: the first and the last position that each of them sees; never
            decreases.
        fresh: the row has no context, and its attention is causal: its queries see only the step's own keys.
        gathered_from: position of the first gathered key.
        cache_rows: int64 ``[2 * num_kv_heads * blocks]``, as in a tile.
    """

    tokens: slice
    context: int
    first_keys: _Int
    last_keys: _Int
    fresh: bool
    gathered_from: int
    cache_rows: torch.Tensor

    def first_key(self, query: int) -> int:
        """Return the first position that the row's ``query``-th new token sees."""
        return int(self.first_keys[query])

    def hidden(self, first: int, last: int) -> torch.Tensor:
        """Return the mask of queries ``[first, last)``: bool ``[queries, keys]``, true where a key is hidden.

        The keys are those from ``first_key(first)`` to the last one that the last query sees.
        """
        key = torch.arange(self.first_key(first), int(self.last_keys[last - 1]) + 1)
        hidden = key > torch.from_numpy(self.last_keys[first:last])[:, None]
        lowest = self.first_keys[first:last]
        return hidden | (key < torch.from_numpy(lowest)[:, None]) if lowest[-1] > lowest[0] else hidden


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """A step's plan for caches of one shape and queries of one dtype.

    Attributes:
        write_rows: int64: indices of keys, then values, in a cache viewed as ``[.., head_dim]``.
        written: int64: the tokens to write; None: all.
        decode_tokens: int64: tokens of the decoding rows in the tiles' order; None: one tile holds the whole step.
        num_tokens: number of tokens that belong to rows; the others in the flattened batch are padding.
        tiles: the decoding rows.
        chunks: the rows with several new tokens.
        scratch: memory for gathered keys and values, in the cache's dtype. Allocated once per step, because the system
            provides allocations of this size page by page.
    """

    write_rows: torch.Tensor
    written: torch.Tensor | None
    decode_tokens: torch.Tensor | None
    num_tokens: int
    tiles: list[DecodeTile]
    chunks: list[ChunkRow]
    scratch: torch.Tensor


class CpuPlan:
    """A step's batch and its layer plans, each made at the first layer with its heads and dtype."""

    def __init__(self, batch: StepBatch) -> None:
        self.batch = batch
        self._made: dict[tuple[object, ...], LayerPlan] = {}

    def of_layer(self, kv_cache: torch.Tensor, dtype: torch.dtype) -> LayerPlan:
        key = (kv_cache.shape, kv_cache.stride(), kv_cache.dtype, dtype)
        if key not in self._made:
            self._made[key] = _layer_plan(self.batch, kv_cache, dtype)
        return self._made[key]


def _layer_plan(batch: StepBatch, kv_cache: torch.Tensor, dtype: torch.dtype) -> LayerPlan:
    _, _, kv_heads, block_size, head_dim = kv_cache.shape
    query_lens = batch.query_lens_cpu.astype(np.int64)
    seq_lens = batch.seq_lens_cpu.astype(np.int64)
    starts = np.cumsum(query_lens) - query_lens
    slots, written = batch.slot_mapping, None
    if len(slots) and int(slots.min()) < 0:
        written = torch.nonzero(slots >= 0).view(-1)
        slots = slots.index_select(0, written)
    blocks = _head_rows((slots // block_size)[:, None], kv_cache)[..., 0]

    decode = np.flatnonzero(query_lens == 1)
    gathered_lens = seq_lens - batch.first_visible // block_size * block_size
    order, tile_rows = _cut_tiles(gathered_lens[decode], 2 * kv_heads * head_dim * dtype.itemsize)
    decode = decode[order]
    tiles = [decode_tile(batch, decode[rows], rows, kv_cache, dtype) for rows in tile_rows]
    # The usual decode step. Its queries are used as they are, without a copy into the order of the tiles.
    whole = len(tiles) == 1 and len(decode) == len(query_lens)

    several = np.flatnonzero(query_lens > 1).tolist()
    spans = [(row, int(starts[row]), int(query_lens[row]), int(seq_lens[row])) for row in several]
    chunks = [_chunk(batch, row, start, length, total, kv_cache) for row, start, length, total in spans]
    gathered = [len(tile.cache_rows) for tile in tiles] + [len(chunk.cache_rows) for chunk in chunks]
    return LayerPlan(
        write_rows=(blocks * block_size + (slots % block_size)[:, None]).view(-1),
        written=written,
        decode_tokens=None if whole else torch.from_numpy(starts[decode]),
        num_tokens=int(query_lens.sum()),
        tiles=tiles,
        chunks=chunks,
        scratch=torch.empty(max(gathered, default=0) * block_size * head_dim, dtype=kv_cache.dtype),
    )


def _head_rows(block_ids: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
    """Return indices of blocks of heads in a cache's ``flat`` view, for keys and values.

    Args:
        block_ids: int64 ``[rows, blocks]``.

    Returns:
        int64 ``[2, rows, num_kv_heads, blocks]``.
    """
    _, _, kv_heads, block_size, head_dim = kv_cache.shape
    # Whole numbers also in a packed cache, see KVLayout.packed_width.
    values_from, block_stride = (stride // (block_size * head_dim) for stride in kv_cache.stride()[:2])
    of_heads = block_ids[:, None, :] * block_stride + torch.arange(kv_heads)[:, None]
    return torch.stack((of_heads, of_heads + values_from))


def flat(kv_cache: torch.Tensor, width: int) -> torch.Tensor:
    """View a cache ``[.., width]``, other layers' numbers between its blocks included."""
    last = sum((size - 1) * stride for size, stride in zip(kv_cache.shape, kv_cache.stride(), strict=True)) + 1
    return kv_cache.as_strided((last // width, width), (width, 1))


def _cut_tiles(lengths: _Int, token_bytes: int) -> tuple[_Int, list[slice]]:
    """Divide decoding rows into tiles.

    Args:
        lengths: context lengths, including the new token.
        token_bytes: gathered bytes per token and layer.

    Returns:
        An order of the rows (the given order if one tile holds them all), and the slices of it that are tiles.
    """
    # Longest first, so that a tile is padded to its first row. Stable, so that equal lengths keep the order of the
    # batch, and with it the bits of a result.
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    tile_bytes = TILE_BYTES_PER_THREAD * torch.get_num_threads()
    tiles = []
    first = 0
    while first < len(order):
        longest = int(descending[first])
        near = int(np.searchsorted(-descending, -longest / PADDED_WORK, side="right"))
        padding = np.cumsum(longest - descending[first:])
        cheap = first + int(np.searchsorted(padding, TILE_OVERHEAD_BYTES / token_bytes, side="right"))
        fitting = first + max(1, tile_bytes // (longest * token_bytes))
        # Padding is computed and thrown away, which is cheaper than one more call until it exceeds either bound; what
        # does not fit the cache is dearer than both.
        last = min(max(near, cheap), fitting)
        tiles.append(slice(first, last))
        first = last
    return (np.arange(len(lengths)) if len(tiles) <= 1 else order), tiles


def decode_tile(batch: StepBatch, members: _Int, rows: slice, kv_cache: torch.Tensor, dtype: torch.dtype) -> DecodeTile:
    """Make the tile of the batch's rows ``members``, which are the plan's decoding rows ``rows``."""
    _, _, kv_heads, block_size, _ = kv_cache.shape
    lengths = batch.seq_lens_cpu[members].astype(np.int64)[:, None]
    visible = batch.first_visible[members].astype(np.int64)[:, None]
    first_block = visible // block_size
    num_blocks = -(-lengths // block_size) - first_block
    width = int(num_blocks.max())
    used = np.arange(width) < num_blocks
    column = np.where(used, first_block + np.arange(width), 0)
    table = batch.block_table[torch.from_numpy(members)[:, None], torch.from_numpy(column)].long()
    # Padding reads the null block, which is always zero. A block of another row could hold NaN, and NaN times a weight
    # of 0 is NaN.
    cache_rows = _head_rows(torch.where(torch.from_numpy(used), table, NULL_BLOCK_ID), kv_cache)

    tokens = width * block_size
    position = first_block * block_size + np.arange(tokens)
    hidden = (position >= lengths) | (position < visible)
    mask = torch.zeros(len(members), 1, 1, tokens, dtype=dtype)
    mask.masked_fill_(torch.from_numpy(hidden)[:, None, None], float("-inf"))
    member, place = np.nonzero(hidden & (np.arange(tokens) < num_blocks * block_size))
    heads = np.arange(2)[:, None] * len(members) * kv_heads + np.arange(kv_heads)
    tail = (heads[..., None] + member * kv_heads) * tokens + place
    return DecodeTile(rows, cache_rows.view(-1), mask, torch.from_numpy(tail.reshape(-1)))


def _chunk(batch: StepBatch, row: int, start: int, length: int, total: int, kv_cache: torch.Tensor) -> ChunkRow:
    first_block = int(batch.first_visible[row]) // batch.block_size
    block_ids = batch.block_table[row : row + 1, first_block : -(-total // batch.block_size)].long()
    own = np.arange(total - length, total)
    first_keys, last_keys = batch.first_key(own), batch.last_key(slice(start, start + length), own)
    return ChunkRow(
        tokens=slice(start, start + length),
        context=total - length,
        first_keys=first_keys,
        last_keys=last_keys,
        fresh=total == length and first_keys[-1] == 0 and last_keys is own,
        gathered_from=first_block * batch.block_size,
        cache_rows=_head_rows(block_ids, kv_cache).view(-1),
    )
