"""Interface of attention: the step's rows, the layer's settings, and the backend."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.attention.attention_tiles import AttentionShape
from quire.kernels.attention.attention_work import first_key
from quire.kernels.common.launches import layout_of
from quire.worker_proc.attention.supports import Supports


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Leading keys that several rows of a step have in the same blocks.

    Attributes:
        rows: int64, at least 2: indices among the step's rows, ascending. Their tokens in the step are all after the
            prefix.
        length: number of keys, a multiple of the block size.
    """

    rows: npt.NDArray[np.int64]
    length: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The rows of one step in one KV group. Rows are in batch order; tokens are flattened row by row.

    Attributes:
        query_start_loc: int32 ``[num_rows + 1]`` on the device: index of each row's first token.
        seq_lens: int32 ``[num_rows]`` on the device: number of tokens of each row, including those of this step.
        block_table: int32 ``[num_rows, max_blocks]`` on the device. Only the entries of a row from
            ``first_visible // block_size`` up to ``ceil(seq_len / block_size)`` are valid.
        slot_mapping: int64 ``[num_tokens]`` on the device: slot of each token's key and value; negative: not written.
        query_lens_cpu, seq_lens_cpu: int32 ``[num_rows]``, the lengths on the host.
        block_size: tokens per block of the table: of the kernels' blocks, which may be smaller than the pool's.
        window: number of tokens that a token of this group sees, itself included; 0: all before it.
        chunk: tokens of a chunk: a token of this group sees none before the beginning of its own; 0: no chunks. Blocks
            left of what a row's first query sees are undefined, because the scheduler may have freed them.
        prefixes: prefixes that rows share; a row is in at most one. A backend may ignore them.
        layer_shapes: shapes of the layers that will use the plan: a backend that plans by shape does so at once.
        second_texts: int32 ``[num_rows]``, on the host: index of the first token of each row's second text, or 0;
            None for decoders.
        every_token: whether the hidden states of all tokens are needed, not only that of each prompt's first token.
        last_keys: int32 ``[num_tokens]``, on the host: the last position that each token sees, for a token of an image
            that of its image, for others their own. It is less than the row's length, and never decreases from one
            token of a row to the next. None: each token's own. No model with latents has them.
        send: sends host arrays to the device together with the step's other arrays (``Transfer``); None: the backend
            copies them itself.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    query_lens_cpu: npt.NDArray[np.int32]
    seq_lens_cpu: npt.NDArray[np.int32]
    block_size: int
    window: int = 0
    chunk: int = 0
    prefixes: tuple[SharedPrefix, ...] = ()
    layer_shapes: tuple[AttentionShape, ...] = ()
    second_texts: npt.NDArray[np.int32] | None = None
    every_token: bool = True
    last_keys: npt.NDArray[np.int32] | None = None
    send: Callable[..., list[torch.Tensor]] | None = None

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens_cpu)

    @property
    def first_visible(self) -> npt.NDArray[np.int32]:
        """First position that any query of the row sees, int32 ``[num_rows]``."""
        first: npt.NDArray[np.int32] = self.first_key(self.seq_lens_cpu - self.query_lens_cpu)
        return first

    def first_key(self, position: Any) -> Any:
        """Return the first position that a token sees, for an int or an array of its positions."""
        return first_key(position, self.window, self.chunk)

    def last_key(self, token: Any, position: Any) -> Any:
        """Return the last position that a token of the step sees. ``token``: its index, or a slice."""
        return position if self.last_keys is None else self.last_keys[token]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention settings of one layer; fixed when the model is built.

    Attributes:
        num_heads, num_kv_heads: heads of this rank.
        scale: factor on the scores.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)`` before masking (Gemma 2); 0 leaves them unchanged.
        sinks: float32 ``[num_heads]``: an additional score per head in the softmax's sum, without a value (gpt-oss).
        k_scale, v_scale: float32 ``[num_kv_heads]`` on the device, only with an fp8 cache, which then holds
            ``key / k_scale`` and ``value / v_scale``; None means 1.
        q_norm, k_norm: ``[head_dim]`` in the activations' dtype: weights of the RMS norm of each head's query and key
            before rotation (Qwen3, Gemma 3); None: no norm.
        norm_eps: epsilon of these norms.
        reach: in an encoder, the tokens on each side that a token attends to; 0: all.
        value_dim: with latents: values are the last ``value_dim`` numbers of the keys; 0: values are separate.
        key_dim: with ``value_dim``, width of queries, which see only the first ``key_dim`` numbers of the keys; 0: all.
            Only the native CPU library has it, for prompts over latents (``cpu_expanded.py``).
        layout: equal for layers whose launches differ only in the addresses of weights and caches.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm_eps: float = 1e-6
    reach: int = 0
    value_dim: int = 0
    key_dim: int = 0
    layout: Hashable = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = (getattr(self, setting.name) for setting in fields(self) if setting.init)
        layout = tuple(layout_of(value) if isinstance(value, torch.Tensor) else value for value in values)
        object.__setattr__(self, "layout", layout)

    def shape(self, dtype: torch.dtype) -> AttentionShape:
        """Return the shape for plans. ``dtype``: of the queries."""
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, dtype, self.value_dim)


@dataclass(slots=True)
class Rotary:
    """Rotary embedding of one step's tokens; made once, used by every layer with the same table.

    Attributes:
        table: ``[2, max_position, rotary_dim]``: cosines, and sines whose first half is negated
            (``attention/rope.py``).
        positions: int64 ``[num_tokens]``.
    """

    table: torch.Tensor
    positions: torch.Tensor
    _gathered: torch.Tensor | None = field(default=None)

    def cos_sin(self) -> torch.Tensor:
        """Return the step's cosines and sines, ``[2, num_tokens, 1, rotary_dim]``, gathered at the first call."""
        if self._gathered is None:
            self._gathered = self.table.index_select(1, self.positions).unsqueeze(2)
        return self._gathered


class LayerAttention(Protocol):
    """The part of an ``AttentionBackend`` that a model calls."""

    def attend(
        self, qkv: torch.Tensor, kv_cache: torch.Tensor, plan: Any, spec: AttentionSpec, rotary: Rotary | None
    ) -> torch.Tensor:
        """Compute a layer's attention from its projection: head norms, rotation, cache write, attention.

        ``attention/prologue.py`` does this without fusion.

        Args:
            qkv: ``[num_tokens, num_heads + 2 * num_kv_heads, head_dim]``, or queries alone
                (``[num_tokens, num_heads, head_dim]``) if the layer reads an earlier layer's cache; with latents
                queries and one latent, ``[num_tokens, num_heads + 1, head_dim]``; may be modified.
            rotary: None if this layer has no rotary embedding.

        Returns:
            ``[num_tokens, num_heads, head_dim]``, or with latents ``[num_tokens, num_heads, value_dim]``.
        """
        ...


class AttentionBackend(LayerAttention, Protocol):
    """Causal attention over a paged cache, which also writes the step's keys and values.

    A backend makes one *plan* per step and KV group (index tensors, tiles: everything that the layers can share) and
    uses it in every layer of the group. It reads only valid block table entries (see ``StepBatch``), and only slots
    that a token of the row was written to (other slots may hold NaN).

    Attributes:
        needs_host_lengths: whether plans need lengths on the host; then ``plan_decode`` is not supported and no step
            can be captured as a graph.
        supports: the features of this backend, among them the block sizes of its kernels.
    """

    name: str
    needs_host_lengths: bool
    supports: Supports

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Return the shape of one layer's cache tensor for keys and values. The tensor is zeroed when allocated.

        The first dimension is 2, for keys and values. Latents have a tensor of the same shape but for this dimension,
        which is 1.
        """
        ...

    def plan(self, batch: StepBatch) -> Any:
        """Return the plan that all layers of a group share in this step."""
        ...

    def plan_decode(self, batch: StepBatch, max_query_len: int = 1) -> Any:
        """Return a plan for rows of at most ``max_query_len`` tokens, from lengths on the device.

        Allowed inside a captured graph.

        Raises:
            NotImplementedError: this backend needs the lengths on the host.
        """
        ...
