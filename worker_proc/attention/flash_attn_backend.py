"""Attention with the flash-attn library: version 3 (``flash_attn_interface``) or 2 (``flash_attn``).

Dao, "FlashAttention-2" (arXiv 2307.08691); Shah et al., "FlashAttention-3" (arXiv 2407.08608). Version 3 needs compute
capability 9 and supports pages of any size; version 2 needs compute capability 8 or later and pages whose size is a
multiple of 256 tokens. Both read lengths and block tables on the device, so that decode steps can be captured as
graphs.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.worker_proc.attention.backend import AttentionSpec, Rotary, StepBatch
from quire.worker_proc.attention.library import (
    first_visible_block,
    nhd_cache_shape,
    refuse_sinks,
    write_cache,
)
from quire.worker_proc.attention.supports import HALVES, Supports


@dataclass(frozen=True, slots=True)
class FlashAttnPlan:
    """Plan that all layers of a group share.

    Attributes:
        query_start_loc: int32 ``[num_rows + 1]``.
        kv_lens: int32 ``[num_rows]``: number of tokens of each row from its first visible block on.
        kv_start_loc: int32 ``[num_rows + 1]``: cumulative sum of ``kv_lens``; None if the library does not need it.
        block_table: int32 ``[num_rows, blocks]``, from each row's first visible block on.
        max_query_len, max_kv_len: upper bounds of the longest row.
    """

    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    kv_lens: torch.Tensor
    kv_start_loc: torch.Tensor | None
    block_table: torch.Tensor
    max_query_len: int
    max_kv_len: int
    block_size: int
    window: int

    @property
    def window_size(self) -> tuple[int, int]:
        """Numbers of tokens before and after its own that a query sees; -1: all (the causal mask hides later ones)."""
        return (self.window - 1, 0) if self.window else (-1, -1)


# No fp8 cache: the libraries want queries of the cache's dtype, and queries in fp8 would lose precision.
_EITHER = Supports(
    dtypes=HALVES,
    fp8_cache=False,
    mixed_cache=False,
    head_dim_multiple=8,
    max_head_dim=256,
    chunks=False,
    sinks=False,
    latents=False,
    deterministic=False,
    last_keys=False,
)


class FlashAttnLibrary:
    """One version of the library.

    Attributes:
        module, function: what computes attention.
        wants_kv_starts: the library needs ``kv_start_loc`` instead of ``kv_lens``.

    Raises:
        ImportError: the library is not installed, or not for this torch.
    """

    name: str
    module: str
    function: str
    supports: Supports
    wants_kv_starts: bool

    def __init__(self) -> None:
        self._attend = _function(self.module, self.function)

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        plan: FlashAttnPlan,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Compute attention.

        Args:
            query: ``[num_tokens, num_heads, head_dim]``.
            key_cache, value_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``.
        """
        out: torch.Tensor = self._attend(
            query,
            key_cache,
            value_cache,
            cu_seqlens_q=plan.query_start_loc,
            max_seqlen_q=plan.max_query_len,
            softmax_scale=spec.scale,
            causal=True,
            window_size=plan.window_size,
            softcap=spec.soft_cap,
            **self._cache_arguments(plan),
        )
        return out

    def _cache_arguments(self, plan: FlashAttnPlan) -> dict[str, Any]:
        """Return what the versions name differently: the rows' lengths and block tables."""
        raise NotImplementedError


class FlashAttn3(FlashAttnLibrary):
    """``flash_attn_with_kvcache`` of ``flash_attn_interface``, which also supports queries of different lengths.

    Hazard: its kernel multiplies the values of masked slots by zero. A NaN that an earlier request left past the row's
    end, in the row's last block, therefore reaches the row (flash-attention issue 2374). The pool starts zeroed, and
    requests with non-finite logits end with an error, but their blocks are not cleared.
    """

    name = "flash-attn 3"
    module, function = "flash_attn_interface", "flash_attn_with_kvcache"
    wants_kv_starts = False
    supports = replace(_EITHER, capabilities=(9, 9))

    def _cache_arguments(self, plan: FlashAttnPlan) -> dict[str, Any]:
        return {"cache_seqlens": plan.kv_lens, "page_table": plan.block_table}


class FlashAttn2(FlashAttnLibrary):
    """``flash_attn_varlen_func`` of ``flash_attn`` with a block table."""

    name = "flash-attn 2"
    module, function = "flash_attn", "flash_attn_varlen_func"
    wants_kv_starts = True
    supports = replace(_EITHER, block_multiple=256, capabilities=(8, 12))

    def _cache_arguments(self, plan: FlashAttnPlan) -> dict[str, Any]:
        lengths = {"cu_seqlens_k": plan.kv_start_loc, "max_seqlen_k": plan.max_kv_len}
        return lengths | {"block_table": plan.block_table}


VERSIONS: tuple[type[FlashAttnLibrary], ...] = (FlashAttn3, FlashAttn2)
"""In order of preference: version 3 is faster."""


class FlashAttnBackend:
    """``AttentionBackend`` with one version of the library. Stateless."""

    name = "flash_attn"
    needs_host_lengths = False

    def __init__(self, library: FlashAttnLibrary) -> None:
        self._library = library
        self.supports = library.supports

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return nhd_cache_shape(num_blocks, block_size, num_kv_heads, head_dim)

    def plan(self, batch: StepBatch) -> FlashAttnPlan:
        visible = batch.seq_lens_cpu - batch.first_visible // batch.block_size * batch.block_size
        return self._plan(batch, int(batch.query_lens_cpu.max(initial=0)), int(visible.max(initial=0)))

    def plan_decode(self, batch: StepBatch, max_query_len: int = 1) -> FlashAttnPlan:
        """Plan with an upper bound for the longest row: the table's width, or the blocks that a window can overlap."""
        most = batch.block_table.shape[1] * batch.block_size
        if batch.window:
            seen = batch.window + max_query_len - 1
            most = min(most, (seen + 2 * batch.block_size - 2) // batch.block_size * batch.block_size)
        return self._plan(batch, max_query_len, most)

    def attend(
        self, qkv: torch.Tensor, kv_cache: torch.Tensor, plan: FlashAttnPlan, spec: AttentionSpec, rotary: Rotary | None
    ) -> torch.Tensor:
        """Compute ``AttentionBackend.attend``.

        Raises:
            ValueError: the cache does not fit the plan, or the layer needs a feature that the library lacks.
        """
        refuse_sinks(self.name, spec)
        if kv_cache.shape[2] != plan.block_size or kv_cache.dtype is not qkv.dtype:
            raise ValueError(
                f"kv_cache: {kv_cache.dtype}, blocks of {kv_cache.shape[2]} tokens; "
                f"expected {qkv.dtype}, {plan.block_size}"
            )
        query = write_cache(qkv, kv_cache, plan.slot_mapping, spec, rotary)
        if len(query) == 0:
            return torch.empty_like(query)
        return self._library.attend(query, kv_cache[0], kv_cache[1], plan, spec)

    def _plan(self, batch: StepBatch, max_query_len: int, max_kv_len: int) -> FlashAttnPlan:
        """Make a plan. Reads no lengths on the host, because this may run during graph capture."""
        table, kv_lens = batch.block_table, batch.seq_lens
        if batch.window:
            first = first_visible_block(batch)
            kv_lens = kv_lens - first * batch.block_size
            columns = torch.arange(-(-max_kv_len // batch.block_size), device=table.device) + first[:, None]
            table = table.gather(1, columns.clamp_(max=table.shape[1] - 1))
        starts = None
        if self._library.wants_kv_starts:
            starts = torch.nn.functional.pad(kv_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return FlashAttnPlan(
            slot_mapping=batch.slot_mapping,
            query_start_loc=batch.query_start_loc,
            kv_lens=kv_lens,
            kv_start_loc=starts,
            block_table=table,
            max_query_len=max_query_len,
            max_kv_len=max_kv_len,
            block_size=batch.block_size,
            window=batch.window,
        )


def _function(module: str, name: str) -> Callable[..., Any]:
    """Return function ``name`` of an installed library.

    Raises:
        ImportError: the module is missing, does not load, or is too old to have the function.
    """
    found: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    if found is None:
        raise ImportError(f"{module} has no {name}: it is too old")
    return found
