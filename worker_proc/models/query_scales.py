"""Queries that are multiplied by a factor of their position before they attend (Llama 4)."""

from typing import Any

import torch

from quire.protocol.model.chunked_config import QueryScale
from quire.worker_proc.attention.backend import AttentionSpec, LayerAttention, Rotary


class QueryScales:
    """The factors of all positions, from a table: a function of torch may give an element other bits in other batches.

    Args:
        max_position: positions that the table covers.
    """

    def __init__(self, scale: QueryScale, max_position: int, device: torch.device | str) -> None:
        self._interval = scale.interval
        passed = torch.arange(max_position // scale.interval + 1, dtype=torch.float32)
        self._table = (passed.log1p() * scale.weight + 1).to(device)

    def of(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the factors of tokens at these positions: int64 ``[num_tokens]`` → float32 ``[num_tokens, 1, 1]``."""
        return self._table[(positions + 1) // self._interval][:, None, None]


class ScaledQueries:
    """A ``LayerAttention`` that multiplies the queries, and lets a backend do the rest.

    Args:
        factors: ``[num_tokens, 1, 1]``, of the step's tokens.
    """

    def __init__(self, backend: LayerAttention, factors: torch.Tensor) -> None:
        self._backend, self._factors = backend, factors

    def attend(
        self, qkv: torch.Tensor, kv_cache: torch.Tensor, plan: Any, spec: AttentionSpec, rotary: Rotary | None
    ) -> torch.Tensor:
        """As ``LayerAttention.attend``, without a norm of the queries, which would undo the factors."""
        qkv[:, : spec.num_heads].mul_(self._factors)
        return self._backend.attend(qkv, kv_cache, plan, spec, rotary)
