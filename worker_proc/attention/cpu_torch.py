"""Attention over the CPU's paged cache with torch operators, for machines without a compiler.

A block of one head is contiguous in the cache. One ``index_select`` over such blocks gathers each head's keys of a row
contiguously, as ``scaled_dot_product_attention`` needs them. ``cpu_plan`` chooses the blocks and the rows to compute
together.
"""

import torch
import torch.nn.functional as F

from quire.worker_proc.attention.backend import AttentionSpec, StepBatch
from quire.worker_proc.attention.cpu_plan import QUERY_TILE, ChunkRow, CpuPlan, DecodeTile, LayerPlan, flat
from quire.worker_proc.attention.prologue import scale_heads

SCORES_AT_ONCE = 1 << 23
"""Maximum number of scores to materialise (32 MiB), for layers that torch's fused operator does not support."""


class TorchAttention:
    """Computes decoding rows in tiles, and rows with several queries one by one. Stateless."""

    def plan(self, batch: StepBatch) -> CpuPlan:
        return CpuPlan(batch)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        plan: CpuPlan,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        if spec.value_dim:
            write_latents(kv_cache, key, plan.batch)
            return _attend_latents(query, kv_cache, plan.batch, spec)
        layer = plan.of_layer(kv_cache, query.dtype)
        if key is not None and value is not None:
            write(kv_cache, key, value, layer, spec)
        query = scale_heads(query, spec.k_scale)
        if layer.decode_tokens is None and layer.tiles and len(query) == layer.num_tokens:
            decoded = _decode(query, kv_cache, layer, layer.tiles[0], spec).reshape(query.shape)
            return scale_heads(decoded, spec.v_scale)
        out = torch.empty(query.shape, dtype=query.dtype)
        out[layer.num_tokens :].zero_()
        if layer.tiles:
            _decode_rows(query, kv_cache, layer, spec, out)
        for chunk in layer.chunks:
            own = chunk.tokens
            # If the cache has another dtype, attention must see the rounded keys and values.
            if key is None or value is None or key.dtype is not kv_cache.dtype or not (chunk.fresh and _fusable(spec)):
                _attend_chunk(query[own], kv_cache, layer, chunk, spec, out[own])
            else:
                _attend_prompt(query[own], key[own], value[own], spec, out[own])
        return scale_heads(out, spec.v_scale)


def write(
    kv_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: LayerPlan, spec: AttentionSpec
) -> None:
    """Copy keys and values ``[num_tokens, num_kv_heads, head_dim]`` to their slots."""
    if layer.written is not None:
        key, value = key.index_select(0, layer.written), value.index_select(0, layer.written)
    dtype, head_dim = kv_cache.dtype, kv_cache.shape[-1]
    if spec.k_scale is not None:
        key = key.float() / spec.k_scale[:, None]
    if spec.v_scale is not None:
        value = value.float() / spec.v_scale[:, None]
    both = torch.cat((key.reshape(-1, head_dim), value.reshape(-1, head_dim)))
    if dtype.itemsize == 1:
        # Clamped, because the cast turns values out of range into NaN or infinity. Copied as bytes, because torch
        # cannot index fp8 on the CPU.
        limit = torch.finfo(dtype).max
        both, kv_cache = both.float().clamp(-limit, limit).to(dtype).view(torch.uint8), kv_cache.view(torch.uint8)
    flat(kv_cache, head_dim).index_copy_(0, layer.write_rows, both.to(kv_cache.dtype))


def write_latents(kv_cache: torch.Tensor, latents: torch.Tensor | None, batch: StepBatch) -> None:
    """Copy latents, ``[num_tokens, 1, head_dim]`` or None, to their slots. The cache may be packed (strided)."""
    if latents is None:
        return
    tokens = torch.nonzero(batch.slot_mapping >= 0).view(-1)
    slots, block_size = batch.slot_mapping[tokens], kv_cache.shape[3]
    kv_cache[0, :, 0][slots // block_size, slots % block_size] = latents[tokens, 0].to(kv_cache.dtype)


def _attend_latents(query: torch.Tensor, kv_cache: torch.Tensor, batch: StepBatch, spec: AttentionSpec) -> torch.Tensor:
    """Compute attention over latents row by row, with materialised scores."""
    out = query.new_zeros(len(query), spec.num_heads, spec.value_dim)
    start = 0
    for row, (length, total) in enumerate(zip(batch.query_lens_cpu.tolist(), batch.seq_lens_cpu.tolist(), strict=True)):
        blocks = batch.block_table[row, : -(-total // batch.block_size)].long()
        seen = kv_cache[0].index_select(0, blocks).view(-1, spec.head_dim)[:total].to(query.dtype)
        step = max(1, min(QUERY_TILE, SCORES_AT_ONCE // (spec.num_heads * max(total, 1))))
        for first in range(0, length, step):
            own = slice(start + first, start + min(first + step, length))
            last = torch.arange(total - length + first, total - length + min(first + step, length))
            hidden = torch.arange(total) > last[:, None]
            keys = seen[None, None]
            attended = attend_explicitly(_by_head(query[own], 1), keys, keys[..., -spec.value_dim :], hidden, spec)
            out[own] = attended[0].transpose(0, 1)
        start += length
    return out


def _gather(kv_cache: torch.Tensor, cache_rows: torch.Tensor, layer: LayerPlan, dtype: torch.dtype) -> torch.Tensor:
    """Gather blocks of heads, ``[len(cache_rows), block_size * head_dim]``; valid until the next gather."""
    width = kv_cache.shape[-2] * kv_cache.shape[-1]
    target = layer.scratch[: len(cache_rows) * width].view(-1, width)
    if kv_cache.dtype.itemsize == 1:
        source, raw = kv_cache.view(torch.uint8), target.view(torch.uint8)
    else:
        source, raw = kv_cache, target
    torch.index_select(flat(source, width), 0, cache_rows, out=raw)
    return target.to(dtype)


def _fusable(spec: AttentionSpec) -> bool:
    """Return whether ``scaled_dot_product_attention`` supports the layer."""
    return not spec.soft_cap and spec.sinks is None


def attend_explicitly(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Compute attention with materialised scores, in float32.

    Args:
        query: ``[.., num_kv_heads, group, queries, head_dim]``.
        keys, values: ``[.., num_kv_heads, 1, tokens, head_dim]``.
        hidden: bool, true where a query must not see a key; broadcast to the scores
            ``[.., num_kv_heads, group, queries, tokens]``.
    """
    scores = query.float() @ keys.float().transpose(-1, -2) * spec.scale
    if spec.soft_cap:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    scores = scores.masked_fill(hidden, float("-inf"))
    if spec.sinks is not None:
        sinks = spec.sinks.float().view(spec.num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        scores = scores.softmax(-1)
    return (scores @ values.float()).to(query.dtype)


def _decode_rows(
    query: torch.Tensor, kv_cache: torch.Tensor, layer: LayerPlan, spec: AttentionSpec, out: torch.Tensor
) -> None:
    """Compute all decoding rows of ``query`` into ``out``, both ``[num_tokens, num_heads, head_dim]``."""
    kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    tokens = layer.decode_tokens
    decoding = query[: layer.num_tokens] if tokens is None else query.index_select(0, tokens)
    attended = out[: layer.num_tokens] if tokens is None else torch.empty(decoding.shape, dtype=decoding.dtype)
    grouped = attended.view(len(decoding), kv_heads, -1, head_dim)
    for tile in layer.tiles:
        grouped[tile.rows] = _decode(decoding[tile.rows], kv_cache, layer, tile, spec)
    if tokens is not None:
        out.index_copy_(0, tokens, attended)


def _decode(
    query: torch.Tensor, kv_cache: torch.Tensor, layer: LayerPlan, tile: DecodeTile, spec: AttentionSpec
) -> torch.Tensor:
    """Compute one query per row: ``[rows, num_heads, head_dim]`` → ``[rows, num_kv_heads, group, head_dim]``.

    The query heads that share a KV head take the sequence dimension, so that each key is read once for all of them.
    """
    rows, kv_heads, head_dim = len(query), kv_cache.shape[2], kv_cache.shape[4]
    gathered = _gather(kv_cache, tile.cache_rows, layer, query.dtype)
    if len(tile.tail):
        # Unwritten slots may hold NaN, which an additive mask does not remove.
        gathered.view(-1, head_dim).index_fill_(0, tile.tail, 0)
    keys, values = gathered.view(2, rows, kv_heads, -1, head_dim)
    grouped = query.reshape(rows, kv_heads, -1, head_dim)
    if _fusable(spec):
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=tile.mask, scale=spec.scale)
    hidden = tile.mask.unsqueeze(1) != 0
    out = attend_explicitly(grouped.unsqueeze(3), keys.unsqueeze(2), values.unsqueeze(2), hidden, spec)
    return out.squeeze(3)


def _by_head(tokens: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """View ``[length, num_heads, head_dim]`` as ``[num_kv_heads, group, length, head_dim]``."""
    length, _, head_dim = tokens.shape
    return tokens.view(length, kv_heads, -1, head_dim).permute(1, 2, 0, 3)


def _attend_prompt(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec, out: torch.Tensor
) -> None:
    """Compute a row without context or window over the step's own keys."""
    queries, target = _by_head(query, spec.num_kv_heads), _by_head(out, spec.num_kv_heads)
    keys, values = (x.transpose(0, 1).unsqueeze(1).expand(-1, queries.shape[1], -1, -1) for x in (key, value))
    target.copy_(F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=spec.scale))


def _attend_chunk(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: LayerPlan,
    chunk: ChunkRow,
    spec: AttentionSpec,
    out: torch.Tensor,
) -> None:
    """Compute several queries of one row over the cache into ``out``: ``[length, num_heads, head_dim]``."""
    kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    queries, target = _by_head(query, kv_heads), _by_head(out, kv_heads)
    gathered = _gather(kv_cache, chunk.cache_rows, layer, query.dtype).view(2, kv_heads, 1, -1, head_dim)
    length, group = len(query), queries.shape[1]
    size = QUERY_TILE
    if not _fusable(spec):
        size = max(1, min(size, SCORES_AT_ONCE // (spec.num_heads * (chunk.context + length))))
    for first in range(0, length, size):
        last = min(first + size, length)
        start = chunk.first_key(first)
        seen = gathered[:, :, :, start - chunk.gathered_from : chunk.last_keys[last - 1] + 1 - chunk.gathered_from]
        hidden = chunk.hidden(first, last)
        if _fusable(spec):
            mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
            keys, values = seen.expand(-1, -1, group, -1, -1)
            attended = F.scaled_dot_product_attention(
                queries[:, :, first:last], keys, values, attn_mask=mask, scale=spec.scale
            )
        else:
            attended = attend_explicitly(queries[:, :, first:last], seen[0], seen[1], hidden, spec)
        target[:, :, first:last] = attended
