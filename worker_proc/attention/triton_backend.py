"""Attention by our own Triton kernels."""

from dataclasses import dataclass, field

import torch

from quire.kernels.attention.attention_plan import AttentionPlan, plan_attention
from quire.kernels.attention.attention_tiles import AttentionShape
from quire.kernels.attention.paged_attention import paged_attention
from quire.kernels.cache.cache_write import write_cache
from quire.kernels.cache.fused_cache_write import fused_cache_write
from quire.kernels.common.fp8 import FP8_DTYPES
from quire.kernels.common.triton_runtime import require_launchable
from quire.worker_proc.attention.backend import AttentionSpec, Rotary, StepBatch
from quire.worker_proc.attention.triton_decode import DecodeBufferPool, DecodePlan
from quire.worker_proc.attention.varlen_prefill import attend_fresh, takes_fresh

FRESH_FROM = 512
"""Tokens per row, on average, from which whole new prompts are torch's: its flash attention uses what Triton does not
reach on Hopper (vLLM's blog of 2026-07-06 has its Triton kernel 2.9 times slower on an H20, for prompts of 8k). Of
shorter rows each would be a launch. To be measured here: section prefill_attention of ``quire bench kernels``."""

FIXED_SPLIT = 1024
"""Keys of a piece where results must not depend on the batch: long rows still have work for many programs."""


@dataclass(slots=True)
class TritonPlan:
    """A step's rows, and how their work is cut for layers of each shape: as a rule there is one in a group."""

    batch: StepBatch
    fixed_split: int = 0
    _plans: dict[AttentionShape, AttentionPlan] = field(default_factory=dict)

    def of_layer(self, shape: AttentionShape, num_tokens: int) -> AttentionPlan:
        """Made at the first layer of this shape: one small copy to the device."""
        if shape not in self._plans:
            batch = self.batch
            self._plans[shape] = plan_attention(
                batch.query_lens_cpu,
                batch.seq_lens_cpu,
                shape,
                batch.seq_lens.device,
                window=batch.window,
                fixed_split=self.fixed_split,
                num_tokens=num_tokens,
            )
        return self._plans[shape]


AnyPlan = TritonPlan | DecodePlan


class TritonBackend:
    """``AttentionBackend`` on a CUDA device, or on the CPU where Triton's interpreter is on (tests).

    Holds no tensors but the scales of fp8 caches and what ``plan_decode`` writes to: the caches are the caller's, and a
    plan of ``plan`` dies with its step.

    Args:
        max_rows: rows of the largest step of ``plan_decode``; 0: there will be none.
        fresh_from: whole new prompts of at least so many tokens each, on average, are attended to by torch's operators
            over their own keys (``varlen_prefill``); 0: never.
        deterministic: a query's result depends, to the bit, on its own query, keys and values alone
            (``paged_attention`` says how); then all plans are made on the host.

    Raises:
        RuntimeError: triton is not installed, or there is neither a CUDA device nor the interpreter.
    """

    name = "triton"
    needs_host_lengths = True

    def __init__(self, max_rows: int = 0, deterministic: bool = False, fresh_from: int = FRESH_FROM) -> None:
        require_launchable("cuda" if torch.cuda.is_available() else "cpu")
        self._fresh_from = 0 if deterministic else fresh_from
        self._fixed_split = FIXED_SPLIT if deterministic else 0
        self._pool: DecodeBufferPool | None = None
        if max_rows and not deterministic:
            self._pool = DecodeBufferPool(max_rows)
            self.needs_host_lengths = False
        self._scales: dict[tuple[float, torch.device], torch.Tensor] = {}

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Layout NHD: a token's heads lie together, so that the write of a token is one run of memory."""
        return (2, num_blocks, block_size, num_kv_heads, head_dim)

    def plan(self, batch: StepBatch) -> TritonPlan:
        return TritonPlan(batch, self._fixed_split)

    def plan_decode(self, batch: StepBatch) -> DecodePlan:
        if self._pool is None:
            raise NotImplementedError("this backend was made to plan on the host: without max_rows, or deterministic")
        return DecodePlan(batch, self._pool)

    def attend(
        self, qkv: torch.Tensor, kv_cache: torch.Tensor, plan: AnyPlan, spec: AttentionSpec, rotary: Rotary | None
    ) -> torch.Tensor:
        """Head norms, rotation and the cache write in one launch, then attention."""
        self._check_block_size(kv_cache, plan)
        owns_cache = qkv.shape[1] > spec.num_heads
        key = value = None
        if owns_cache and self._is_fresh(qkv, kv_cache, plan, spec):
            key, value = qkv.new_empty(2, len(qkv), spec.num_kv_heads, spec.head_dim)
        query = fused_cache_write(
            qkv,
            spec.num_heads,
            kv_cache if owns_cache else None,
            plan.batch.slot_mapping if owns_cache else None,
            q_norm=spec.q_norm,
            k_norm=spec.k_norm if owns_cache else None,
            norm_eps=spec.norm_eps,
            rotary_table=None if rotary is None else rotary.table,
            positions=None if rotary is None else rotary.positions,
            k_scale=self._scale(spec.k_scale, kv_cache),
            v_scale=self._scale(spec.v_scale, kv_cache),
            key_out=key,
            value_out=value,
        )
        if key is not None and value is not None:
            batch = plan.batch
            return attend_fresh(query, key, value, batch.query_start_loc, batch.query_lens_cpu, spec.scale)
        return self._read(query, kv_cache, plan, spec)

    def _is_fresh(self, qkv: torch.Tensor, kv_cache: torch.Tensor, plan: AnyPlan, spec: AttentionSpec) -> bool:
        batch = plan.batch
        if isinstance(plan, DecodePlan) or not 0 < self._fresh_from * batch.num_rows <= len(qkv):
            return False
        return len(qkv) == int(batch.query_lens_cpu.sum()) and takes_fresh(batch, spec, qkv.dtype, kv_cache.dtype)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        plan: AnyPlan,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """As ``AttentionBackend.forward``.

        Raises:
            ValueError: a tensor does not fit the batch or the cache.
        """
        self._check_block_size(kv_cache, plan)
        if key is not None and value is not None:
            k_scale, v_scale = self._scale(spec.k_scale, kv_cache), self._scale(spec.v_scale, kv_cache)
            write_cache(key, value, kv_cache, plan.batch.slot_mapping, k_scale=k_scale, v_scale=v_scale)
        return self._read(query, kv_cache, plan, spec)

    @staticmethod
    def _check_block_size(kv_cache: torch.Tensor, plan: AnyPlan) -> None:
        expected = plan.batch.block_size
        if kv_cache.shape[2] != expected:
            raise ValueError(f"kv_cache: dimension 2 (block_size) is {kv_cache.shape[2]}, expected {expected}")

    def _read(self, query: torch.Tensor, kv_cache: torch.Tensor, plan: AnyPlan, spec: AttentionSpec) -> torch.Tensor:
        batch = plan.batch
        shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, query.dtype)
        return paged_attention(
            query,
            kv_cache,
            batch.block_table,
            batch.query_start_loc,
            batch.seq_lens,
            plan.of_layer(shape, len(query)),
            spec.scale,
            soft_cap=spec.soft_cap,
            sinks=spec.sinks,
            k_scale=self._scale(spec.k_scale, kv_cache),
            v_scale=self._scale(spec.v_scale, kv_cache),
        )

    def _scale(self, scale: float, kv_cache: torch.Tensor) -> torch.Tensor | None:
        """On the device, since a kernel reads it there; made once, as a captured graph must not copy from the host."""
        if kv_cache.dtype not in FP8_DTYPES or scale == 1.0:
            return None
        place = (scale, kv_cache.device)
        if place not in self._scales:
            self._scales[place] = torch.tensor([scale], dtype=torch.float32, device=kv_cache.device)
        return self._scales[place]
