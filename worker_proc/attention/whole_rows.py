"""Attention of an encoder: the tokens of a row attend to each other, in the one step that computes all of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.cpu.attention.row_attention import DTYPES, RowAttention, attend_rows_reference
from quire.kernels.cpu.native.library import load_native
from quire.worker_proc.attention.backend import AttentionSpec, Rotary, StepBatch
from quire.worker_proc.attention.supports import Supports

PART_TOKENS = 512
"""Tokens that a CPU takes through all layers before it begins with the next ones: their activations stay in a cache."""


@dataclass(frozen=True, slots=True)
class RowsPart:
    """Consecutive rows of a step.

    Attributes:
        tokens: the part's tokens among those of the step.
        starts: int32 ``[num_rows + 1]``: first token of each row, counted within the part.
        firsts: int64 ``[num_rows]`` on the device: the same without the end.
    """

    tokens: slice
    starts: npt.NDArray[np.int32]
    firsts: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowsPlan:
    """Plan of a step.

    Attributes:
        parts: all rows, in order.
        every_token: as in ``StepBatch``.
        token_types: int64 ``[num_tokens]`` on the device: 1 for tokens of the second text of a pair; None: all 0.
    """

    parts: list[RowsPart]
    every_token: bool
    token_types: torch.Tensor | None


class WholeRows:
    """``AttentionBackend`` of models without KV groups: the native library on a CPU, torch elsewhere."""

    name = "whole rows"
    needs_host_lengths = True
    supports = Supports()

    def __init__(self, device: torch.device) -> None:
        native = load_native() if device.type == "cpu" else None
        self._device = device
        self._part_tokens = PART_TOKENS if device.type == "cpu" else 2**31
        self._native = None if native is None else RowAttention(native)

    def describe(self) -> str:
        """Return the name and implementation of the backend for the start-up log."""
        return f"{self.name} ({'torch operators' if self._native is None else 'native'})"

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        raise NotImplementedError("an encoder has no KV cache")

    def plan(self, batch: StepBatch) -> RowsPlan:
        """Divide the rows into parts.

        Raises:
            ValueError: the step computes only a part of a row.
        """
        lengths = batch.query_lens_cpu
        if not np.array_equal(lengths, batch.seq_lens_cpu):
            row = int(np.argmax(lengths != batch.seq_lens_cpu))
            raise ValueError(
                f"row {row} computes {lengths[row]} of {batch.seq_lens_cpu[row]} tokens: an encoder computes whole rows"
            )
        types = None
        if batch.second_texts is not None and batch.second_texts.any():
            starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
            first = np.repeat(batch.second_texts, lengths)
            second = (first > 0) & (np.arange(len(starts)) - starts >= first)
            assert batch.send is not None
            (types,) = batch.send(second.astype(np.int64))
        return RowsPlan(self._parts(lengths), batch.every_token, types)

    def _parts(self, lengths: npt.NDArray[np.int32]) -> list[RowsPart]:
        parts, row, token = [], 0, 0
        while row < len(lengths):
            ends = np.cumsum(lengths[row:])
            count = max(1, int(np.searchsorted(ends, self._part_tokens, "right")))
            starts = np.zeros(count + 1, np.int32)
            starts[1:] = ends[:count]
            firsts = torch.from_numpy(starts[:-1].astype(np.int64)).to(self._device)
            parts.append(RowsPart(slice(token, token + int(starts[-1])), starts, firsts))
            row, token = row + count, token + int(starts[-1])
        return parts

    def plan_decode(self, batch: StepBatch, max_query_len: int = 1) -> Any:
        raise NotImplementedError("an encoder does not decode")

    def attend(
        self, qkv: torch.Tensor, kv_cache: torch.Tensor, plan: Any, spec: AttentionSpec, rotary: Rotary | None
    ) -> torch.Tensor:
        """As ``LayerAttention.attend``, for one ``RowsPart``; positions of a row begin at 0, and there is no cache."""
        part: RowsPart = plan
        flat, table = qkv.flatten(1), None if rotary is None else rotary.table
        attend = attend_rows_reference
        if self._native is not None and qkv.dtype in DTYPES:
            attend = self._native
        return attend(flat, part.starts, spec.num_heads, reach=spec.reach, rotary=table).view(
            len(qkv), spec.num_heads, spec.head_dim
        )
