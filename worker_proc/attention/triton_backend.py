"""Attention by our own Triton kernels."""

from dataclasses import dataclass, field

import torch

from quire.kernels.attention_plan import AttentionPlan, plan_attention
from quire.kernels.attention_tiles import AttentionShape
from quire.kernels.cache_write import write_cache
from quire.kernels.fp8 import FP8_DTYPES
from quire.kernels.paged_attention import paged_attention
from quire.kernels.triton_runtime import require_launchable
from quire.worker_proc.attention.backend import AttentionSpec, Rotary, StepBatch
from quire.worker_proc.attention.prologue import attend_plainly


@dataclass(slots=True)
class TritonPlan:
    """A step's rows, and how their work is cut for layers of each shape: as a rule there is one in a group."""

    batch: StepBatch
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
                chunk=batch.chunk,
                num_tokens=num_tokens,
            )
        return self._plans[shape]


class TritonBackend:
    """``AttentionBackend`` on a CUDA device, or on the CPU where Triton's interpreter is on (tests).

    Holds no tensors but the scales of fp8 caches: the caches are the caller's, and a plan dies with its step.

    Raises:
        RuntimeError: triton is not installed, or there is neither a CUDA device nor the interpreter.
    """

    name = "triton"
    needs_host_lengths = True

    def __init__(self) -> None:
        require_launchable("cuda" if torch.cuda.is_available() else "cpu")
        self._scales: dict[tuple[float, torch.device], torch.Tensor] = {}

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Layout NHD: a token's heads lie together, so that the write of a token is one run of memory."""
        return (2, num_blocks, block_size, num_kv_heads, head_dim)

    def plan(self, batch: StepBatch) -> TritonPlan:
        return TritonPlan(batch)

    def attend(
        self, qkv: torch.Tensor, kv_cache: torch.Tensor, plan: TritonPlan, spec: AttentionSpec, rotary: Rotary | None
    ) -> torch.Tensor:
        return attend_plainly(self, qkv, kv_cache, plan, spec, rotary)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        plan: TritonPlan,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """As ``AttentionBackend.forward``.

        Raises:
            ValueError: a tensor does not fit the batch or the cache.
        """
        batch = plan.batch
        if kv_cache.shape[2] != batch.block_size:
            raise ValueError(f"kv_cache: dimension 2 (block_size) is {kv_cache.shape[2]}, expected {batch.block_size}")
        k_scale = self._scale(spec.k_scale, kv_cache)
        v_scale = self._scale(spec.v_scale, kv_cache)
        if key is not None and value is not None:
            write_cache(key, value, kv_cache, batch.slot_mapping, k_scale=k_scale, v_scale=v_scale)
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
            alibi_slopes=spec.alibi_slopes,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def _scale(self, scale: float, kv_cache: torch.Tensor) -> torch.Tensor | None:
        """On the device, since a kernel reads it there; made once, as a captured graph must not copy from the host."""
        if kv_cache.dtype not in FP8_DTYPES or scale == 1.0:
            return None
        place = (scale, kv_cache.device)
        if place not in self._scales:
            self._scales[place] = torch.tensor([scale], dtype=torch.float32, device=kv_cache.device)
        return self._scales[place]
