"""What a step tells attention, and what an attention backend is."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The requests of one step, seen by one KV group. Rows are in batch order; tokens are flattened row by row.

    Attributes:
        query_start_loc: int32 ``[num_rows + 1]`` on the device: where each row's tokens start.
        seq_lens: int32 ``[num_rows]`` on the device: tokens of each row once this step's are written.
        block_table: int32 ``[num_rows, max_blocks]`` on the device; only the first ``ceil(seq_len / block_size)``
            entries of a row mean anything.
        slot_mapping: int64 ``[num_tokens]`` on the device: where each token's key and value go; negative: nowhere.
        query_lens_cpu, seq_lens_cpu: int32 ``[num_rows]``, the same lengths on the host.
        block_size: tokens in a block of this group.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    query_lens_cpu: npt.NDArray[np.int32]
    seq_lens_cpu: npt.NDArray[np.int32]
    block_size: int

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens_cpu)


class AttentionBackend(Protocol):
    """Writes keys and values into a paged cache and attends over it, causally.

    A backend makes one *plan* per step and KV group (index tensors, tiles: whatever all layers can share) and uses it
    in every layer of the group. It never reads a block table past a row's length, and never reads slots that no
    token of the row was written to (they may hold NaN).
    """

    name: str

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one layer's cache tensor, keys and values together. It is allocated zeroed."""
        ...

    def plan(self, batch: StepBatch) -> Any:
        """What all layers of a group share in this step."""
        ...

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: Any,
        scale: float,
    ) -> torch.Tensor:
        """Write this step's keys and values, then attend.

        Args:
            query: ``[num_tokens, num_heads, head_dim]``.
            key, value: ``[num_tokens, num_kv_heads, head_dim]``, same dtype.
            kv_cache: this layer's cache, of ``kv_cache_shape``.
            plan: from ``plan()`` of this step and group.
            scale: factor on the scores, ``head_dim ** -0.5`` for the models we have.

        Returns:
            ``[num_tokens, num_heads, head_dim]`` in the query's dtype.
        """
        ...
