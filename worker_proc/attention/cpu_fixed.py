"""Attention with torch operators and a fixed order of every sum: slow, for deterministic mode without a compiler.

A matrix product's order of additions may change with its shape, the number of threads and the alignment of its memory.
So each query token is computed alone, by calls of one shape, over tiles of keys at absolute positions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from quire.protocol.model.kv_layout import NULL_BLOCK_ID
from quire.worker_proc.attention.backend import AttentionSpec, Rotary, StepBatch
from quire.worker_proc.attention.cpu_plan import CpuPlan
from quire.worker_proc.attention.cpu_torch import write, write_latents
from quire.worker_proc.attention.prologue import normalise_and_rotate

TILE_TOKENS = 256
"""Keys per tile, rounded up to whole blocks: a trade between calls for long rows and padding for short ones."""


@dataclass(slots=True)
class FixedPlan:
    """A step's batch, and the plan for its cache writes."""

    batch: StepBatch
    writes: CpuPlan


class FixedOrderAttention:
    """Computes one query token at a time. Stateless."""

    def plan(self, batch: StepBatch) -> FixedPlan:
        return FixedPlan(batch, CpuPlan(batch))

    def attend(
        self, qkv: torch.Tensor, kv_cache: torch.Tensor, plan: FixedPlan, spec: AttentionSpec, rotary: Rotary | None
    ) -> torch.Tensor:
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qk = normalise_and_rotate(qkv[:, : heads + kv_heads], spec, None)
        if rotary is not None:
            qk = _rotate(qk, rotary)
        if qkv.shape[1] == heads:
            return self.forward(qk, None, None, kv_cache, plan, spec)
        value = None if spec.value_dim else qkv[:, heads + kv_heads :]
        return self.forward(qk[:, :heads], qk[:, heads:], value, kv_cache, plan, spec)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        plan: FixedPlan,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        if spec.value_dim:
            write_latents(kv_cache, key, plan.batch)
        elif key is not None and value is not None:
            write(kv_cache, key, value, plan.writes.of_layer(kv_cache, query.dtype), spec)
        out = torch.zeros(*query.shape[:2], spec.value_dim or spec.head_dim, dtype=query.dtype)
        batch = plan.batch
        with _one_thread():
            token = 0
            for row, (length, total) in enumerate(zip(batch.query_lens_cpu, batch.seq_lens_cpu, strict=True)):
                for position in range(int(total - length), int(total)):
                    seen = int(batch.first_key(position)), int(batch.last_key(token, position))
                    out[token] = _attend_token(query[token], kv_cache, batch, row, seen, spec)
                    token += 1
        return out


def _rotate(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate as in ``attention/rope.py``, without calls that multiply and add.

    Whether such a call rounds as a fused multiply-add depends on a value's place in its vector register.
    """
    cos, sin = rotary.cos_sin()
    width = cos.shape[-1]
    pairs = x[..., :width]
    rotated = pairs * cos + pairs.roll(width // 2, -1) * sin
    return torch.cat((rotated, x[..., width:]), -1)


def _attend_token(
    query: torch.Tensor, kv_cache: torch.Tensor, batch: StepBatch, row: int, seen: tuple[int, int], spec: AttentionSpec
) -> torch.Tensor:
    """Compute attention of a query, ``[num_heads, head_dim]``; ``seen``: the first and the last position."""
    start, last = seen
    size = batch.block_size
    tile_blocks = -(-TILE_TOKENS // size)
    by_head = (spec.num_kv_heads, -1, 1)
    scaled = query.float().view(spec.num_kv_heads, -1, spec.head_dim) * spec.scale
    if spec.k_scale is not None:
        scaled = scaled * spec.k_scale.view(by_head)
    most = torch.full((*scaled.shape[:2], 1), float("-inf"))
    total, out = torch.zeros_like(most), scaled.new_zeros(*scaled.shape[:2], spec.value_dim or spec.head_dim)
    for tile in range(start // (tile_blocks * size), last // (tile_blocks * size) + 1):
        keys = torch.arange(tile * tile_blocks * size, (tile + 1) * tile_blocks * size)
        hidden = (keys < start) | (keys > last)
        seen_keys, seen_values = _tile(kv_cache, batch, row, tile * tile_blocks, tile_blocks, start, last, hidden)
        seen_values = seen_values[..., -out.shape[-1] :].contiguous()
        scores = torch.bmm(scaled, seen_keys.transpose(1, 2))
        if spec.soft_cap:
            scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
        scores = scores.masked_fill(hidden, float("-inf"))
        now = torch.maximum(most, scores.amax(-1, keepdim=True))
        kept, weights = torch.exp(most - now), torch.exp(scores - now)
        most, total = now, total * kept + weights.sum(-1, keepdim=True)
        out = out * kept + torch.bmm(weights, seen_values)
    if spec.sinks is not None:
        sinks = spec.sinks.float().view(by_head)
        now = torch.maximum(most, sinks)
        kept = torch.exp(most - now)
        out, total = out * kept, total * kept + torch.exp(sinks - now)
    out = out / total
    if spec.v_scale is not None:
        out = out * spec.v_scale.view(by_head)
    return out.view(len(query), -1).to(query.dtype)


def _tile(
    kv_cache: torch.Tensor,
    batch: StepBatch,
    row: int,
    first_block: int,
    num_blocks: int,
    start: int,
    last: int,
    hidden: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tile's keys and values, float32 ``[num_kv_heads, tokens, head_dim]``, zero where ``hidden``.

    Latents are both.
    """
    columns = torch.arange(first_block, first_block + num_blocks)
    used = (columns >= start // batch.block_size) & (columns <= last // batch.block_size)
    ids = batch.block_table[row].index_select(0, torch.where(used, columns, 0)).long()
    ids = torch.where(used, ids, NULL_BLOCK_ID)
    source = kv_cache.view(torch.uint8) if kv_cache.dtype.itemsize == 1 else kv_cache
    both = source.index_select(1, ids).view(kv_cache.dtype).float()
    both = both.transpose(1, 2).flatten(2, 3).masked_fill(hidden[:, None], 0.0)
    return both[0].clone(), both[-1].clone()


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
