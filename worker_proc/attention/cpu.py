"""Attention over a paged cache on the CPU: Quire's C++ library, or torch operators without a compiler."""

import platform
from typing import Any

import torch

from quire.kernels.cpu.native.library import Native, find_native
from quire.worker_proc.attention.backend import AttentionSpec, Rotary, StepBatch
from quire.worker_proc.attention.cpu_fixed import FixedOrderAttention
from quire.worker_proc.attention.cpu_native import NativeAttention
from quire.worker_proc.attention.cpu_torch import TorchAttention
from quire.worker_proc.attention.prologue import attend_unfused
from quire.worker_proc.attention.supports import Supports

NATIVE = Supports()
TORCH = Supports(block_sizes=(32, 16))
"""Torch operators gather whole blocks: rows of 20 tokens in blocks of 256 would take 20 times as long."""

INSTRUCTIONS = {16: "avx512", 8: "avx2"}


class CpuBackend:
    """``AttentionBackend`` on the CPU. Stateless: the cache belongs to the caller, and a plan to its step.

    Cache of one layer: ``[2, num_blocks, num_kv_heads, block_size, head_dim]`` (keys, values), or ``[1, ..]`` with
    latents. A block of one head is contiguous.

    Args:
        native: use the C++ library if available; the first process on a machine compiles it, which takes seconds.
        deterministic: a query's result depends, bit for bit, on its own query, keys and values alone: not on the rest
            of the batch, the chunks of its prompt, or the number of threads. The C++ library always guarantees this at
            no cost, but for long prompts over latents (``cpu_expanded.py``). With torch operators it requires computing
            token by token, which is slow.
    """

    name = "cpu"
    needs_host_lengths = True

    def __init__(self, native: bool = True, deterministic: bool = False) -> None:
        library = find_native() if native else "not requested"
        self.native = library if isinstance(library, Native) else None
        self._attention: NativeAttention | FixedOrderAttention | TorchAttention
        if self.native is not None:
            self._attention, self.supports = NativeAttention(self.native, expands=not deterministic), NATIVE
            self._description = f"native, {INSTRUCTIONS.get(self.native.vector_floats, platform.machine())}"
        else:
            self._attention, self.supports = FixedOrderAttention() if deterministic else TorchAttention(), TORCH
            order = ", one token at a time in a fixed order" if deterministic else ""
            self._description = f"torch operators{order}; no native kernels: {library}"

    def describe(self) -> str:
        """Return the name and implementation of the backend for the start-up log."""
        return f"{self.name} ({self._description})"

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (2, num_blocks, num_kv_heads, block_size, head_dim)

    def plan(self, batch: StepBatch) -> Any:
        return self._attention.plan(batch)

    def plan_decode(self, batch: StepBatch, max_query_len: int = 1) -> Any:
        raise NotImplementedError("the CPU backend needs lengths on the host")

    def attend(
        self, qkv: torch.Tensor, kv_cache: torch.Tensor, plan: Any, spec: AttentionSpec, rotary: Rotary | None
    ) -> torch.Tensor:
        if isinstance(self._attention, TorchAttention):
            return attend_unfused(self._attention, qkv, kv_cache, plan, spec, rotary)
        return self._attention.attend(qkv, kv_cache, plan, spec, rotary)
