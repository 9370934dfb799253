"""Attention over a paged cache with torch operators on the CPU.

Cache of one layer: ``[2, num_blocks, num_kv_heads, block_size, head_dim]`` (keys, values). A block of one head is one
contiguous stretch, so that one ``index_select`` over such stretches lays each head's keys of a row back to back, which
is what ``scaled_dot_product_attention`` wants. Which stretches, and which rows together: ``cpu_plan``.
"""

import torch
import torch.nn.functional as F

from quire.worker_proc.attention.backend import AttentionSpec, Rotary, StepBatch
from quire.worker_proc.attention.cpu_plan import QUERY_TILE, ChunkRow, CpuPlan, DecodeTile, LayerPlan
from quire.worker_proc.attention.prologue import attend_plainly


class CpuBackend:
    """``AttentionBackend`` on torch's CPU operators. Stateless: the cache is the caller's, the plan is per step."""

    name = "cpu"
    needs_host_lengths = True

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (2, num_blocks, num_kv_heads, block_size, head_dim)

    def plan(self, batch: StepBatch) -> CpuPlan:
        return CpuPlan(batch)

    def attend(
        self, qkv: torch.Tensor, kv_cache: torch.Tensor, plan: CpuPlan, spec: AttentionSpec, rotary: Rotary | None
    ) -> torch.Tensor:
        return attend_plainly(self, qkv, kv_cache, plan, spec, rotary)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        plan: CpuPlan,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        assert key is not None and value is not None
        scale = spec.scale
        layer = plan.of_layer(kv_cache, query.dtype)
        _write(kv_cache, key, value, layer)
        if layer.decode_tokens is None and layer.tiles and len(query) == layer.num_tokens:
            return _decode(query, kv_cache, layer, layer.tiles[0], scale).reshape(query.shape)
        out = torch.empty(query.shape, dtype=query.dtype)
        out[layer.num_tokens :].zero_()
        if layer.tiles:
            _decode_rows(query, kv_cache, layer, scale, out)
        for chunk in layer.chunks:
            own = chunk.tokens
            _attend_chunk(query[own], key[own], value[own], kv_cache, layer, chunk, scale, out[own])
        return out


def _write(kv_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: LayerPlan) -> None:
    """Copy keys and values ``[num_tokens, num_kv_heads, head_dim]`` to their slots."""
    if layer.written is not None:
        key, value = key.index_select(0, layer.written), value.index_select(0, layer.written)
    head_dim = kv_cache.shape[-1]
    both = torch.cat((key.reshape(-1, head_dim), value.reshape(-1, head_dim)))
    kv_cache.view(-1, head_dim).index_copy_(0, layer.write_rows, both.to(kv_cache.dtype))


def _gather(kv_cache: torch.Tensor, cache_rows: torch.Tensor, layer: LayerPlan, dtype: torch.dtype) -> torch.Tensor:
    """Blocks of heads back to back, ``[len(cache_rows), block_size * head_dim]``, valid until the next gather."""
    width = kv_cache.shape[-2] * kv_cache.shape[-1]
    target = layer.scratch[: len(cache_rows) * width].view(-1, width)
    torch.index_select(kv_cache.view(-1, width), 0, cache_rows, out=target)
    return target.to(dtype)


def _decode_rows(
    query: torch.Tensor, kv_cache: torch.Tensor, layer: LayerPlan, scale: float, out: torch.Tensor
) -> None:
    """All decoding rows of ``query`` into their places in ``out``, both ``[num_tokens, num_heads, head_dim]``."""
    kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    tokens = layer.decode_tokens
    mine = query[: layer.num_tokens] if tokens is None else query.index_select(0, tokens)
    attended = out[: layer.num_tokens] if tokens is None else torch.empty(mine.shape, dtype=mine.dtype)
    grouped = attended.view(len(mine), kv_heads, -1, head_dim)
    for tile in layer.tiles:
        grouped[tile.rows] = _decode(mine[tile.rows], kv_cache, layer, tile, scale)
    if tokens is not None:
        out.index_copy_(0, tokens, attended)


def _decode(
    query: torch.Tensor, kv_cache: torch.Tensor, layer: LayerPlan, tile: DecodeTile, scale: float
) -> torch.Tensor:
    """One query per row: ``[rows, num_heads, head_dim]`` → ``[rows, num_kv_heads, group, head_dim]``.

    The query heads that share a KV head stand where the sequence usually does: each key is read once for all of them.
    """
    rows, kv_heads, head_dim = len(query), kv_cache.shape[2], kv_cache.shape[4]
    gathered = _gather(kv_cache, tile.cache_rows, layer, query.dtype)
    if len(tile.tail):
        # Stale slots may hold NaN, which no additive mask removes.
        gathered.view(-1, head_dim).index_fill_(0, tile.tail, 0)
    keys, values = gathered.view(2, rows, kv_heads, -1, head_dim)
    grouped = query.view(rows, kv_heads, -1, head_dim)
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=tile.mask, scale=scale)


def _attend_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: LayerPlan,
    chunk: ChunkRow,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Several queries of one row, causally: ``[length, num_heads, head_dim]`` into ``out``."""
    length, heads, head_dim = query.shape
    kv_heads = kv_cache.shape[2]
    group = heads // kv_heads
    queries = query.view(length, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    target = out.view(length, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    if not chunk.context:
        keys, values = (x.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for x in (key, value))
        target.copy_(F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale))
        return
    assert layer.band is not None
    gathered = _gather(kv_cache, chunk.cache_rows, layer, query.dtype).view(2, kv_heads, 1, -1, head_dim)
    keys, values = gathered.expand(-1, -1, group, -1, -1)
    for first in range(0, length, QUERY_TILE):
        last = min(first + QUERY_TILE, length)
        seen = chunk.context + last
        mask = layer.band[QUERY_TILE - (last - first) :, layer.band.shape[1] - seen :]
        target[:, :, first:last] = F.scaled_dot_product_attention(
            queries[:, :, first:last], keys[:, :, :seen], values[:, :, :seen], attn_mask=mask, scale=scale
        )
