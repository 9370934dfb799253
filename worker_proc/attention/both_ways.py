"""Attention in both directions inside an image, around any backend, with torch operators.

Gemma 3 lets a token of an image attend to what a token of text at its position would see, and to the tokens of the
image behind it. The keys of a query are therefore one range, which ends with the image. The backend writes the cache
and computes all tokens as if they were text; those of images are then computed again from the cache. Only steps that
compute an image pay for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.worker_proc.attention.backend import AttentionBackend, AttentionSpec, Rotary, StepBatch
from quire.worker_proc.attention.cpu_torch import SCORES_AT_ONCE, attend_explicitly
from quire.worker_proc.attention.prologue import normalise_and_rotate


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of an image in a step, up to its end.

    Attributes:
        row: index among the step's rows.
        token: index of the first one among the step's tokens, whose position is ``first``.
        end: the position behind the last one of the image.
    """

    row: int
    token: int
    first: int
    end: int

    @property
    def tokens(self) -> slice:
        return slice(self.token, self.token + self.end - self.first)


class BothWays:
    """``LayerAttention`` of a step with images; its plans are pairs of the backend's plan and the group's batch."""

    def __init__(self, backend: AttentionBackend, spans: Sequence[Span]) -> None:
        self._backend, self._spans = backend, spans
        _, _, *order = backend.kv_cache_shape(1, 2, 3, 4)
        self._heads_first = order[0] == 3

    def attend(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: tuple[Any, StepBatch],
        spec: AttentionSpec,
        rotary: Rotary | None,
    ) -> torch.Tensor:
        own, batch = plan
        queries = []
        for span in self._spans:  # before the backend, which may change them
            turned = None if rotary is None else Rotary(rotary.table, rotary.positions[span.tokens])
            queries.append(normalise_and_rotate(qkv[span.tokens, : spec.num_heads].clone(), spec, turned))
        out = self._backend.attend(qkv, kv_cache, own, spec, rotary)
        for span, query in zip(self._spans, queries, strict=True):
            self._attend(span, query, kv_cache, batch, spec, out[span.tokens])
        return out

    def _attend(
        self,
        span: Span,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: StepBatch,
        spec: AttentionSpec,
        out: torch.Tensor,
    ) -> None:
        """Compute the tokens of a span into ``out``, both ``[num_tokens, num_heads, head_dim]``."""
        start = max(0, span.first - batch.window + 1) if batch.window else 0
        seen = torch.arange(start, span.end, device=query.device)
        keys, values = (x.to(query.dtype) for x in self._gather(kv_cache, batch, span.row, seen))
        if spec.k_scale is not None:
            keys = keys * spec.k_scale[:, None, None, None].to(query.dtype)
        if spec.v_scale is not None:
            values = values * spec.v_scale[:, None, None, None].to(query.dtype)
        size = max(1, SCORES_AT_ONCE // (spec.num_heads * len(seen)))
        for low in range(0, len(query), size):
            part = query[low : low + size]
            positions = torch.arange(span.first + low, span.first + low + len(part), device=query.device)
            oldest = positions - (batch.window or span.end) + 1  # without a window, before all keys
            by_head = part.view(len(part), spec.num_kv_heads, -1, spec.head_dim).permute(1, 2, 0, 3)
            attended = attend_explicitly(by_head, keys, values, seen < oldest[:, None], spec)
            out[low : low + size] = attended.permute(2, 0, 1, 3).reshape(part.shape)

    def _gather(self, kv_cache: torch.Tensor, batch: StepBatch, row: int, seen: torch.Tensor) -> torch.Tensor:
        """Return keys and values at positions of a row: ``[2, num_kv_heads, 1, positions, head_dim]``."""
        blocks, places = batch.block_table[row, seen // batch.block_size].long(), seen % batch.block_size
        # Bytes, because torch cannot index fp8.
        cache = kv_cache.view(torch.uint8) if kv_cache.dtype.itemsize == 1 else kv_cache
        if self._heads_first:
            found = cache[:, blocks, :, places].permute(1, 2, 0, 3)
        else:
            found = cache[:, blocks, places].transpose(1, 2)
        return found.contiguous().view(kv_cache.dtype).unsqueeze(2)
