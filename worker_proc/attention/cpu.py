"""Attention over a paged cache on the CPU: by our own C++ where there is a compiler, else by torch's operators."""

import platform
from typing import Any

import torch

from quire.kernels.cpu.native import Native, find_native
from quire.worker_proc.attention.backend import AttentionSpec, Rotary, StepBatch
from quire.worker_proc.attention.cpu_fixed import FixedOrderAttention
from quire.worker_proc.attention.cpu_native import NativeAttention
from quire.worker_proc.attention.cpu_torch import TorchAttention
from quire.worker_proc.attention.prologue import attend_unfused

INSTRUCTIONS = {16: "avx512", 8: "avx2"}


class CpuBackend:
    """``AttentionBackend`` on the CPU. Stateless: the cache is the caller's, the plan is per step.

    Cache of one layer: ``[2, num_blocks, num_kv_heads, block_size, head_dim]`` (keys, values). A block of one head is
    one contiguous stretch.

    Args:
        native: use the C++ where it can be had; the first process on a machine compiles it, in seconds.
        deterministic: a query's result depends, to the bit, on its own query, keys and values alone: not on the rest
            of the batch, on how its prompt was cut, or on the number of threads. The C++ is always so, at no cost;
            torch's operators are made so token by token, which is slow.
    """

    name = "cpu"
    needs_host_lengths = True

    def __init__(self, native: bool = True, deterministic: bool = False) -> None:
        library = find_native() if native else "they were not asked for"
        self._way: NativeAttention | FixedOrderAttention | TorchAttention
        if isinstance(library, Native):
            self._way = NativeAttention(library)
            self._description = f"native, {INSTRUCTIONS.get(library.vector_floats, platform.machine())}"
        else:
            self._way = FixedOrderAttention() if deterministic else TorchAttention()
            order = ", one token at a time in a fixed order" if deterministic else ""
            self._description = f"torch operators{order}; no native kernels: {library}"

    def describe(self) -> str:
        """How attention will be computed, for the start-up log."""
        return f"{self.name} ({self._description})"

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (2, num_blocks, num_kv_heads, block_size, head_dim)

    def plan(self, batch: StepBatch) -> Any:
        return self._way.plan(batch)

    def plan_decode(self, batch: StepBatch) -> Any:
        raise NotImplementedError("a CPU plans from the lengths on the host")

    def attend(
        self, qkv: torch.Tensor, kv_cache: torch.Tensor, plan: Any, spec: AttentionSpec, rotary: Rotary | None
    ) -> torch.Tensor:
        if isinstance(self._way, TorchAttention):
            return attend_unfused(self, qkv, kv_cache, plan, spec, rotary)
        return self._way.attend(qkv, kv_cache, plan, spec, rotary)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        plan: Any,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        return self._way.forward(query, key, value, kv_cache, plan, spec)
