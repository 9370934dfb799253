"""Attention with Quire's Triton kernels."""

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from quire.kernels.attention.attention_plan import AttentionPlan, plan_attention
from quire.kernels.attention.attention_tiles import MAX_HEAD_DIM, AttentionShape
from quire.kernels.attention.paged_attention import prepare_attention
from quire.kernels.cache.fused_cache_write import prepare_cache_write
from quire.kernels.common.launches import layout_of
from quire.kernels.common.triton_runtime import require_launchable
from quire.worker_proc.attention.backend import AttentionSpec, Rotary, StepBatch
from quire.worker_proc.attention.layer_launches import LayerLaunches
from quire.worker_proc.attention.prologue import cache_write
from quire.worker_proc.attention.supports import Supports
from quire.worker_proc.attention.triton_decode import DecodeBufferPool, DecodePlan
from quire.worker_proc.attention.varlen_prefill import can_attend_fresh

FRESH_FROM = 512
"""Average tokens per row from which whole new prompts use torch's flash attention, which uses Hopper instructions that
Triton does not reach (vLLM's blog of 2026-07-06 measures its Triton kernel 2.9 times slower on an H20, for prompts of
8k). With shorter rows the launches cost too much. Measure with section prefill_attention of ``quire bench kernels``."""

MIN_SHARED_READS = 16384
"""Keys that a pass over a common prefix must save, over all rows. An estimate, to be measured on a GPU: the pass adds a
launch and a merge of every token in each layer, some 10 to 20 µs, in which an H200 reads that many keys and values of 8
heads of 128 in 16 bits."""

FIXED_SPLIT = 1024
"""Keys per piece in deterministic mode, small enough that a long row still occupies many programs."""


@dataclass(slots=True)
class TritonPlan:
    """A step's rows, and the kernels' plan for layers of each shape (usually one shape per group).

    ``launches``: by the layouts of the layers' tensors.
    """

    batch: StepBatch
    fixed_split: int = 0
    launches: dict[Hashable, LayerLaunches] = field(default_factory=dict)
    _plans: dict[AttentionShape, AttentionPlan] = field(default_factory=dict)

    def of_layer(self, shape: AttentionShape, num_tokens: int) -> AttentionPlan:
        """Return the plan for layers of this shape; made at the first call."""
        if shape not in self._plans:
            batch = self.batch
            self._plans[shape] = plan_attention(
                batch.query_lens_cpu,
                batch.seq_lens_cpu,
                shape,
                batch.seq_lens.device,
                window=batch.window,
                chunk=batch.chunk,
                common_prefix_len=0 if self.fixed_split else common_prefix(batch),
                fixed_split=self.fixed_split,
                num_tokens=num_tokens,
                last_keys=batch.last_keys,
                send=batch.send,
            )
        return self._plans[shape]


def common_prefix(batch: StepBatch) -> int:
    """Return the number of leading keys that one pass reads for all rows; 0 if that would not save time."""
    for prefix in batch.prefixes:
        if len(prefix.rows) == batch.num_rows and (batch.num_rows - 1) * prefix.length >= MIN_SHARED_READS:
            return prefix.length
    return 0


AnyPlan = TritonPlan | DecodePlan


class TritonBackend:
    """``AttentionBackend`` on a CUDA device, or on the CPU with Triton's interpreter (tests).

    Owns only the buffers of ``plan_decode``. The caches belong to the caller, and a plan
    from ``plan`` is used for one step.

    Args:
        max_rows: maximum number of rows in ``plan_decode``; 0: ``plan_decode`` is not supported.
        fresh_from: whole new prompts with at least this many tokens on average use torch operators over their own keys
            (``varlen_prefill``); 0: never.
        deterministic: a query's result depends, bit for bit, on its own query, keys and values alone (see
            ``prepare_attention``); all plans are then made on the host.

    Raises:
        RuntimeError: triton is not installed, or there is neither a CUDA device nor the interpreter.
    """

    name = "triton"
    needs_host_lengths = True
    supports = Supports(max_head_dim=MAX_HEAD_DIM, capabilities=(8, 0))

    def __init__(self, max_rows: int = 0, deterministic: bool = False, fresh_from: int = FRESH_FROM) -> None:
        require_launchable("cuda" if torch.cuda.is_available() else "cpu")
        self._fresh_from = 0 if deterministic else fresh_from
        self._fixed_split = FIXED_SPLIT if deterministic else 0
        self._pool: DecodeBufferPool | None = None
        if max_rows and not deterministic:
            self._pool = DecodeBufferPool(max_rows)
            self.needs_host_lengths = False

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Return the shape of layout NHD, in which the write of a token is one contiguous run of memory."""
        return (2, num_blocks, block_size, num_kv_heads, head_dim)

    def plan(self, batch: StepBatch) -> TritonPlan:
        plan = TritonPlan(batch, self._fixed_split)
        for shape in batch.layer_shapes:
            plan.of_layer(shape, int(batch.query_lens_cpu.sum()))
        return plan

    def plan_decode(self, batch: StepBatch, max_query_len: int = 1) -> DecodePlan:
        if self._pool is None:
            raise NotImplementedError("plan_decode needs max_rows > 0 and no deterministic mode")
        return DecodePlan(batch, self._pool, max_query_len)

    def attend(
        self, qkv: torch.Tensor, kv_cache: torch.Tensor, plan: AnyPlan, spec: AttentionSpec, rotary: Rotary | None
    ) -> torch.Tensor:
        """Apply head norms, rotation and the cache write in one launch, then compute attention."""
        # The launches keep ``rotary``, so that no other object gets its id.
        layouts = layout_of(qkv), layout_of(kv_cache), spec.layout, id(rotary)
        launches = plan.launches.get(layouts)
        if launches is None:
            launches = plan.launches[layouts] = self._prepare(qkv, kv_cache, plan, spec, rotary)
        return launches(qkv, kv_cache, spec)

    def _prepare(
        self, qkv: torch.Tensor, kv_cache: torch.Tensor, plan: AnyPlan, spec: AttentionSpec, rotary: Rotary | None
    ) -> LayerLaunches:
        """Check the arguments of ``attend`` and return its launches."""
        batch = plan.batch
        if kv_cache.shape[2] != batch.block_size:
            found = kv_cache.shape[2]
            raise ValueError(f"kv_cache: dimension 2 (block_size) is {found}, expected {batch.block_size}")
        query = qkv.new_empty(len(qkv), spec.num_heads, spec.head_dim)
        owns_cache = qkv.shape[1] > spec.num_heads
        key = value = attend = None
        if owns_cache and self._is_fresh(qkv, kv_cache, plan, spec):
            key, value = qkv.new_empty(2, len(qkv), spec.num_kv_heads, spec.head_dim)
        else:
            shape = spec.shape(query.dtype)
            attend = prepare_attention(
                query,
                kv_cache,
                batch.block_table,
                batch.query_start_loc,
                batch.seq_lens,
                plan.of_layer(shape, len(query)),
                spec.scale,
                soft_cap=spec.soft_cap,
                sinks=spec.sinks,
                k_scale=spec.k_scale,
                v_scale=spec.v_scale,
                value_dim=spec.value_dim,
            )
        given = cache_write(qkv, kv_cache, batch.slot_mapping, spec, rotary)
        write = prepare_cache_write(given._replace(key_out=key, value_out=value))
        return LayerLaunches(batch, rotary, owns_cache, tuple(query.shape), write, attend)

    def _is_fresh(self, qkv: torch.Tensor, kv_cache: torch.Tensor, plan: AnyPlan, spec: AttentionSpec) -> bool:
        batch = plan.batch
        if isinstance(plan, DecodePlan) or spec.value_dim or not 0 < self._fresh_from * batch.num_rows <= len(qkv):
            return False
        return len(qkv) == int(batch.query_lens_cpu.sum()) and can_attend_fresh(batch, spec, qkv.dtype, kv_cache.dtype)
