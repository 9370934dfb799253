"""Attention over a paged cache with torch operators on the CPU.

Cache of one layer: ``[2, num_kv_heads, num_blocks, block_size, head_dim]`` (keys, values). With blocks inside heads,
one ``index_select`` over the block dimension yields each head's keys of a row back to back, and the indices do not
depend on the number of heads, so that all layers of a step share them.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from quire.worker_proc.attention.backend import StepBatch

QUERY_TILE = 256
"""Queries of one chunk that attend together: bounds the mask to ``QUERY_TILE x context``."""

PADDED_WORK = 1.3
"""A decode bucket holds rows whose context is at most this factor shorter than its longest."""

BUCKET_OVERHEAD_TOKENS = 512
"""Padding, in tokens of context, that costs less than the calls of another bucket."""

_Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Rows with one new token each and contexts of similar length, attended to in one call.

    Attributes:
        tokens: int64 ``[rows]``, the tokens of these rows, or None: all tokens of the step in order.
        block_ids: int64 ``[rows * blocks]``, each row's blocks, padded with a block that is written to the end.
        mask: float32 ``[1, rows, 1, blocks * block_size]``: 0, or -inf past the row's length.
        tail: int64, places in ``[rows * blocks * block_size]`` of the last blocks' unwritten slots.
    """

    tokens: torch.Tensor | None
    block_ids: torch.Tensor
    mask: torch.Tensor
    tail: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """A row with several new tokens, at ``start`` of the step's tokens, after ``context`` earlier ones.

    Attributes:
        block_ids: int64 ``[ceil((context + length) / block_size)]``; empty without context, when the step's own
            keys and values are all there is.
    """

    start: int
    length: int
    context: int
    block_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """What the layers of one KV group share in one step.

    Attributes:
        slots: int64, slots to write, none negative.
        written: int64, the tokens that go there, or None: all, in order.
        num_tokens: tokens that belong to rows; what follows them in the flattened batch is padding.
        band: float32 ``[QUERY_TILE, longest]``, -inf above the diagonal that ends in the lower right corner. The
            lower right part of it is the causal mask of any tile of queries at the end of its keys.
    """

    slots: torch.Tensor
    written: torch.Tensor | None
    num_tokens: int
    buckets: list[DecodeBucket]
    chunks: list[ChunkRow]
    band: torch.Tensor | None
    _masks: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def mask(self, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """One of this plan's masks in the dtype of the queries, converted once per step."""
        if mask.dtype is dtype:
            return mask
        key = (id(mask), dtype)
        if key not in self._masks:
            self._masks[key] = mask.to(dtype)
        return self._masks[key]


class CpuBackend:
    """``AttentionBackend`` on torch's CPU operators. Stateless: the cache is the caller's, the plan is per step."""

    name = "cpu"

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (2, num_kv_heads, num_blocks, block_size, head_dim)

    def plan(self, batch: StepBatch) -> CpuPlan:
        query_lens = batch.query_lens_cpu.astype(np.int64)
        seq_lens = batch.seq_lens_cpu.astype(np.int64)
        starts = np.cumsum(query_lens) - query_lens
        slots, written = batch.slot_mapping, None
        if len(slots) and int(slots.min()) < 0:
            written = torch.nonzero(slots >= 0).view(-1)
            slots = slots.index_select(0, written)
        decode = np.flatnonzero(query_lens == 1)
        buckets = _decode_buckets(batch, decode, seq_lens, starts, alone=len(decode) == len(query_lens))
        chunks = []
        for row in np.flatnonzero(query_lens > 1):
            length, context = int(query_lens[row]), int(seq_lens[row] - query_lens[row])
            blocks = -(-(context + length) // batch.block_size) if context else 0
            chunks.append(ChunkRow(int(starts[row]), length, context, batch.block_table[row, :blocks].long()))
        longest = max((c.context + c.length for c in chunks if c.context), default=0)
        return CpuPlan(slots, written, int(query_lens.sum()), buckets, chunks, _band(longest) if longest else None)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: CpuPlan,
        scale: float,
    ) -> torch.Tensor:
        _write(kv_cache, key, value, plan)
        if len(plan.buckets) == 1 and plan.buckets[0].tokens is None and plan.num_tokens == len(query):
            return _decode(query, kv_cache, plan, plan.buckets[0], scale)
        out = torch.empty(query.shape, dtype=query.dtype)
        out[plan.num_tokens :].zero_()
        for bucket in plan.buckets:
            tokens = slice(0, plan.num_tokens) if bucket.tokens is None else bucket.tokens
            out[tokens] = _decode(query[tokens], kv_cache, plan, bucket, scale)
        for chunk in plan.chunks:
            tokens = slice(chunk.start, chunk.start + chunk.length)
            _attend_chunk(query[tokens], key[tokens], value[tokens], kv_cache, plan, chunk, scale, out[tokens])
        return out


def _write(kv_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: CpuPlan) -> None:
    """Copy keys and values ``[num_tokens, num_kv_heads, head_dim]`` to their slots."""
    _, kv_heads, num_blocks, block_size, head_dim = kv_cache.shape
    for cache, new in zip(kv_cache.view(2, kv_heads, num_blocks * block_size, head_dim), (key, value), strict=True):
        source = new if plan.written is None else new.index_select(0, plan.written)
        cache.index_copy_(1, plan.slots, source.transpose(0, 1).to(cache.dtype))


def _gather(kv_cache: torch.Tensor, block_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The blocks' keys and values: ``[2, num_kv_heads, len(block_ids) * block_size, head_dim]``."""
    _, kv_heads, num_blocks, block_size, head_dim = kv_cache.shape
    rows = kv_cache.view(2 * kv_heads, num_blocks, block_size * head_dim).index_select(1, block_ids)
    return rows.to(dtype).view(2, kv_heads, len(block_ids) * block_size, head_dim)


def _decode(
    query: torch.Tensor, kv_cache: torch.Tensor, plan: CpuPlan, bucket: DecodeBucket, scale: float
) -> torch.Tensor:
    """One query per row: ``[rows, num_heads, head_dim]`` → the same.

    The query heads that share a KV head stand where the sequence usually does: each key is read once for all of them.
    """
    rows, heads, head_dim = query.shape
    kv_heads = kv_cache.shape[1]
    gathered = _gather(kv_cache, bucket.block_ids, query.dtype)
    # Stale slots may hold NaN, which no additive mask removes.
    gathered.view(2 * kv_heads, -1, head_dim).index_fill_(1, bucket.tail, 0)
    keys, values = gathered.view(2, kv_heads, rows, -1, head_dim)
    grouped = query.view(rows, kv_heads, heads // kv_heads, head_dim).transpose(0, 1)
    mask = plan.mask(bucket.mask, query.dtype)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return out.transpose(0, 1).reshape(rows, heads, head_dim)


def _attend_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    plan: CpuPlan,
    chunk: ChunkRow,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Several queries of one row, causally: ``[length, num_heads, head_dim]`` into ``out``."""
    length, heads, head_dim = query.shape
    kv_heads = kv_cache.shape[1]
    shape = (kv_heads, heads // kv_heads, -1, head_dim)
    queries = query.view(length, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    target = out.view(length, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    if not chunk.context:
        keys, values = (x.transpose(0, 1).unsqueeze(1).expand(shape) for x in (key, value))
        target.copy_(F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale))
        return
    assert plan.band is not None
    band = plan.mask(plan.band, query.dtype)
    total = chunk.context + length
    gathered = _gather(kv_cache, chunk.block_ids, query.dtype)[:, :, :total].unsqueeze(2)
    for first in range(0, length, QUERY_TILE):
        last = min(first + QUERY_TILE, length)
        seen = chunk.context + last
        keys, values = gathered[..., :seen, :].expand(2, *shape[:2], seen, head_dim)
        mask = band[QUERY_TILE - (last - first) :, band.shape[1] - seen :]
        part = F.scaled_dot_product_attention(queries[:, :, first:last], keys, values, attn_mask=mask, scale=scale)
        target[:, :, first:last] = part


def _decode_buckets(batch: StepBatch, decode: _Int, seq_lens: _Int, starts: _Int, alone: bool) -> list[DecodeBucket]:
    """Cut the rows with one new token into buckets of similar length.

    Args:
        decode: those rows.
        alone: the step has no other rows.
    """
    groups = _similar_lengths(seq_lens[decode])
    buckets = []
    for group in groups:
        whole = alone and len(groups) == 1
        rows = decode if whole else decode[group]
        buckets.append(_decode_bucket(batch, rows, seq_lens[rows], None if whole else torch.from_numpy(starts[rows])))
    return buckets


def _similar_lengths(lengths: _Int) -> list[_Int]:
    """Indices into ``lengths``, grouped so that padding within a group is bounded."""
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    groups = []
    first = 0
    while first < len(order):
        longest = int(descending[first])
        # A row belongs here if it is nearly as long, or if all padding so far is cheaper than another group.
        near = int(np.searchsorted(-descending, -longest / PADDED_WORK, side="right"))
        padding = np.cumsum(longest - descending[first:])
        cheap = first + int(np.searchsorted(padding, BUCKET_OVERHEAD_TOKENS, side="right"))
        last = max(near, cheap)
        groups.append(order[first:last])
        first = last
    return groups


def _decode_bucket(batch: StepBatch, rows: _Int, lengths: _Int, tokens: torch.Tensor | None) -> DecodeBucket:
    block_size = batch.block_size
    num_blocks = -(-lengths // block_size)
    width = int(num_blocks.max())
    table = batch.block_table[torch.from_numpy(rows), :width].long()
    used = torch.from_numpy(np.arange(width) < num_blocks[:, None])
    # Where there is padding, the longest row has two blocks or more: its first is full, so masking scores suffices.
    padding = table[int(num_blocks.argmax()), 0]
    mask = torch.zeros(len(rows), width * block_size)
    past_end = np.arange(width * block_size) >= lengths[:, None]
    mask.masked_fill_(torch.from_numpy(past_end), float("-inf"))
    last_block = (num_blocks[:, None] - 1) * block_size + np.arange(block_size)
    places = np.arange(len(rows))[:, None] * (width * block_size) + last_block
    tail = torch.from_numpy(places[last_block >= lengths[:, None]])
    return DecodeBucket(tokens, torch.where(used, table, padding).view(-1), mask[None, :, None, :], tail)


def _band(longest: int) -> torch.Tensor:
    """-inf where a key comes after its query, for ``QUERY_TILE`` queries at the end of ``longest`` keys."""
    width = max(longest, QUERY_TILE)
    return torch.full((QUERY_TILE, width), float("-inf")).triu_(width - QUERY_TILE + 1)
