"""The launches of Triton attention that all layers of a kind share in a step."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.kernels.attention.paged_attention import PagedAttention
from quire.kernels.common.fp8 import as_bits
from quire.worker_proc.attention.backend import AttentionSpec, Rotary, StepBatch
from quire.worker_proc.attention.varlen_prefill import attend_fresh


@dataclass(frozen=True, slots=True)
class LayerLaunches:
    """Cache write and attention of one step, checked, for layers whose tensors have the same layouts.

    Attributes:
        write: from ``prepare_cache_write``.
        attend: None: attention over the step's own keys and values (``varlen_prefill``).
    """

    batch: StepBatch
    rotary: Rotary | None
    owns_cache: bool
    query_shape: tuple[int, ...]
    write: Callable[..., None]
    attend: PagedAttention | None

    def __call__(self, qkv: torch.Tensor, kv_cache: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        batch, rotary, attend = self.batch, self.rotary, self.attend
        query, stored = qkv.new_empty(*self.query_shape), as_bits(kv_cache)
        table, positions = (None, None) if rotary is None else (rotary.table, rotary.positions)
        if not self.owns_cache:
            cache = slots = k_scale = v_scale = None
        else:
            cache, slots, k_scale, v_scale = stored, batch.slot_mapping, spec.k_scale, spec.v_scale
        key = value = None
        if attend is None:
            key, value = qkv.new_empty(2, len(qkv), spec.num_kv_heads, spec.head_dim)
        self.write(qkv, query, cache, slots, key, value, spec.q_norm, spec.k_norm, table, positions, k_scale, v_scale)
        if attend is not None:
            return attend(query, stored, spec.sinks, spec.k_scale, spec.v_scale)
        assert key is not None and value is not None
        return attend_fresh(query, key, value, batch.query_start_loc, batch.query_lens_cpu, spec.scale)
