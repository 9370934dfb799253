"""Attention by our own Triton kernels."""

from dataclasses import dataclass

import torch

from quire.kernels.cache_write import write_cache
from quire.kernels.paged_attention import QueryTiles, paged_attention, plan_tiles
from quire.kernels.triton_runtime import require_launchable
from quire.worker_proc.attention.backend import AttentionSpec, Rotary, StepBatch
from quire.worker_proc.attention.prologue import attend_plainly


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A step's rows, and its tokens cut into tiles."""

    batch: StepBatch
    tiles: QueryTiles


class TritonBackend:
    """``AttentionBackend`` on a CUDA device, or on the CPU where Triton's interpreter is on (tests).

    Holds no tensors: the caches are the caller's, and a plan dies with its step.

    Raises:
        RuntimeError: triton is not installed, or there is neither a CUDA device nor the interpreter.
    """

    name = "triton"
    needs_host_lengths = True

    def __init__(self) -> None:
        require_launchable("cuda" if torch.cuda.is_available() else "cpu")

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Layout NHD: a token's heads lie together, so that the write of a token is one run of memory."""
        return (2, num_blocks, block_size, num_kv_heads, head_dim)

    def plan(self, batch: StepBatch) -> TritonPlan:
        """Cut the step's tokens into tiles; one small copy to the device."""
        return TritonPlan(batch, plan_tiles(batch.query_lens_cpu, batch.seq_lens.device))

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
        assert key is not None and value is not None
        batch = plan.batch
        if kv_cache.shape[2] != batch.block_size:
            raise ValueError(f"kv_cache: dimension 2 (block_size) is {kv_cache.shape[2]}, expected {batch.block_size}")
        write_cache(key, value, kv_cache, batch.slot_mapping)
        return paged_attention(
            query, kv_cache, batch.block_table, batch.query_start_loc, batch.seq_lens, plan.tiles, spec.scale
        )
