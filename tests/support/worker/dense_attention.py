"""Attention over a paged cache by the plain algorithm, with every feature: the reference of the backends."""

from typing import Any

import torch

from quire.worker_proc.attention.backend import AttentionSpec, Rotary, StepBatch
from quire.worker_proc.attention.prologue import attend_unfused
from quire.worker_proc.attention.supports import Supports


class DenseBackend:
    """An ``AttentionBackend`` row by row, in float32. Cache of a layer: ``[2, blocks, block_size, heads, dim]``.

    Latents have ``[1, ..]``.
    """

    name = "dense"
    needs_host_lengths = True
    supports = Supports()

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_dim)

    def plan(self, batch: StepBatch) -> StepBatch:
        return batch

    def attend(
        self, qkv: torch.Tensor, kv_cache: torch.Tensor, plan: Any, spec: AttentionSpec, rotary: Rotary | None
    ) -> torch.Tensor:
        return attend_unfused(self, qkv, kv_cache, plan, spec, rotary)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        plan: StepBatch,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        flat = kv_cache.flatten(1, 2)
        kept = plan.slot_mapping >= 0
        for part, rows in zip(flat, [rows for rows in (key, value) if rows is not None], strict=False):
            part[plan.slot_mapping[kept]] = rows[kept].to(flat.dtype)
        width = spec.value_dim or spec.head_dim
        out = query.new_zeros(*query.shape[:2], width)
        starts = plan.query_start_loc.tolist()
        for row in range(plan.num_rows):
            first, total = int(plan.first_visible[row]), int(plan.seq_lens_cpu[row])
            seen = torch.arange(first, total)
            slots = plan.block_table[row][seen // plan.block_size].long() * plan.block_size + seen % plan.block_size
            own = slice(starts[row], starts[row + 1])
            values = flat[-1, slots][..., -width:].float()
            out[own] = _row(query[own].float(), flat[0, slots].float(), values, seen, plan, spec)
        return out


def _row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    batch: StepBatch,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Return attention of one row's queries ``[length, num_heads, head_dim]`` over keys at ``positions``, of which the
    last is the position of the last query."""
    own = positions[-1] - torch.arange(len(query) - 1, -1, -1)
    distance = own[:, None] - positions
    group = spec.num_heads // spec.num_kv_heads
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, 1)) * spec.scale
    if spec.soft_cap:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    hidden = distance < 0
    if batch.window:
        hidden |= distance >= batch.window
    if batch.chunk:
        hidden |= positions // batch.chunk != own[:, None] // batch.chunk
    scores = scores.masked_fill(hidden, float("-inf"))
    if spec.sinks is not None:
        scores = torch.cat((scores, spec.sinks[:, None, None].expand(-1, len(query), 1)), -1)
    shares = scores.softmax(-1)[..., : len(positions)]
    return torch.einsum("hqk,khd->qhd", shares, value.repeat_interleave(group, 1))
