"""What a step tells attention, what a layer asks of it, and what an attention backend is."""

from dataclasses import dataclass, field
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
            entries of a row mean anything, and of those only the ones from ``first_visible // block_size`` on.
        slot_mapping: int64 ``[num_tokens]`` on the device: where each token's key and value go; negative: nowhere.
        query_lens_cpu, seq_lens_cpu: int32 ``[num_rows]``, the same lengths on the host.
        block_size: tokens in a block of this group.
        window: tokens that a token of this group sees, itself included; 0: all before it. What lies left of the
            window of a row's first query is undefined: its blocks may have been given away.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    query_lens_cpu: npt.NDArray[np.int32]
    seq_lens_cpu: npt.NDArray[np.int32]
    block_size: int
    window: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens_cpu)

    @property
    def first_visible(self) -> npt.NDArray[np.int32]:
        """int32 ``[num_rows]``: the first position that any query of the row sees."""
        context: npt.NDArray[np.int32] = self.seq_lens_cpu - self.query_lens_cpu
        if self.window:
            return np.maximum(context - (self.window - 1), 0)
        return np.zeros_like(context)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How one layer attends; fixed from the model's construction on.

    Attributes:
        num_heads, num_kv_heads: of this rank.
        scale: factor on the scores.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)`` before masking; 0: they stay (Gemma 2).
        sinks: float32 ``[num_heads]``: one more score per head in the softmax's sum, with no value behind it (gpt-oss).
        k_scale, v_scale: an fp8 cache holds ``key / k_scale`` and ``value / v_scale``.
        q_norm, k_norm: ``[head_dim]`` in the activations' dtype: each head's query and key is brought to a root mean
            square of 1, times this, before it is rotated (Qwen3, Gemma 3).
        norm_eps: of these two norms.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm_eps: float = 1e-6


@dataclass(slots=True)
class Rotary:
    """The rotary embedding of one step's tokens; made once, used by every layer with the same table.

    Attributes:
        table: ``[2, max_position, rotary_dim]``: cosines, and sines, the first half negated (``attention/rope.py``).
        positions: int64 ``[num_tokens]``.
    """

    table: torch.Tensor
    positions: torch.Tensor
    _gathered: torch.Tensor | None = field(default=None)

    def cos_sin(self) -> torch.Tensor:
        """``[2, num_tokens, 1, rotary_dim]``, gathered at the first call."""
        if self._gathered is None:
            self._gathered = self.table.index_select(1, self.positions).unsqueeze(2)
        return self._gathered


class AttentionBackend(Protocol):
    """Writes keys and values into a paged cache and attends over it, causally.

    A backend makes one *plan* per step and KV group (index tensors, tiles: whatever all layers can share) and uses it
    in every layer of the group. It never reads a block table past a row's length or left of what is visible, and
    never reads slots that no token of the row was written to (they may hold NaN).

    Attributes:
        needs_host_lengths: whether attention can only be planned from lengths on the host: then there is no
            ``plan_decode``, and no step can be captured as a graph.
    """

    name: str
    needs_host_lengths: bool

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one layer's cache tensor, keys and values together. It is allocated zeroed."""
        ...

    def plan(self, batch: StepBatch) -> Any:
        """What all layers of a group share in this step."""
        ...

    def plan_decode(self, batch: StepBatch) -> Any:
        """As ``plan``, for rows of at most one token whose lengths are on the device alone; fit for a captured graph.

        Raises:
            NotImplementedError: this backend needs the lengths on the host.
        """
        ...

    def attend(
        self, qkv: torch.Tensor, kv_cache: torch.Tensor, plan: Any, spec: AttentionSpec, rotary: Rotary | None
    ) -> torch.Tensor:
        """From a layer's projection to its attended values: head norms, rotation, cache write, attention.

        ``attention/prologue.py`` has the plain way, ``normalise_and_rotate`` and then ``forward``; a backend may fuse.

        Args:
            qkv: ``[num_tokens, num_heads + 2 * num_kv_heads, head_dim]``, or queries alone
                (``[num_tokens, num_heads, head_dim]``) where the layer reads an earlier one's cache; may be changed.
            rotary: None: this layer does not rotate.

        Returns:
            ``[num_tokens, num_heads, head_dim]``.
        """
        ...

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        plan: Any,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Write this step's keys and values, then attend.

        Args:
            query: ``[num_tokens, num_heads, head_dim]``.
            key, value: ``[num_tokens, num_kv_heads, head_dim]``, same dtype; None: the layer reads the cache of an
                earlier one, which has written it.
            kv_cache: this layer's cache, of ``kv_cache_shape``, in a dtype of its own (float8_e4m3fn and float8_e5m2
                hold values divided by the spec's scales).
            plan: from ``plan()`` of this step and group.
            spec: what this layer asks for.

        Returns:
            ``[num_tokens, num_heads, head_dim]`` in the query's dtype.
        """
        ...
