"""Attention with the FlashInfer library (Ye et al., arXiv 2501.01005): paged prefill and decode, planned on the host.

A plan of the library belongs to one of its wrappers. It is made from lengths on the host and copied to the device from
the wrapper's pinned memory. A CUDA graph would need a new plan before every replay, from lengths that in steady decode
are only on the device, so this backend has no graphs.
"""

import importlib
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from quire.kernels.common.fp8 import FP8_DTYPES
from quire.worker_proc.attention.backend import AttentionSpec, Rotary, StepBatch
from quire.worker_proc.attention.library import (
    first_visible_block,
    nhd_cache_shape,
    refuse_sinks,
    write_cache,
)
from quire.worker_proc.attention.supports import HALVES, Supports

WORKSPACE_BYTES = 128 * 2**20
"""Workspace for partial results; the size is that of the library's documentation. All wrappers share it, because they
run one after the other. Each wrapper allocates another 8 MiB."""

CUDA_CORE_GROUPS = (1, 2)
"""Query heads per KV head for which decode is as fast without tensor cores; that kernel supports only a few sizes."""

SUPPORTS = Supports(
    dtypes=HALVES,
    fp8_cache=True,
    mixed_cache=False,
    head_dims=(64, 128, 256),
    chunks=False,
    sinks=False,
    latents=False,
    deterministic=False,
    last_keys=False,
    head_scales=False,
    capabilities=(8, 12),
)
"""Sinks are not supported: the library has them in a separate wrapper class whose kernels are compiled per model."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Settings of a plan of the library, besides the rows. ``decode``: every row has one token."""

    decode: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def tensor_cores(self) -> bool:
        """Whether decode uses tensor cores: that kernel supports all group sizes and is faster with 8-bit caches."""
        group = self.num_heads // self.num_kv_heads
        return group not in CUDA_CORE_GROUPS or self.kv_dtype in FP8_DTYPES


@dataclass(slots=True)
class Wrapper:
    """One of the library's wrappers, with its own memory on host and device.

    The library's ``plan()`` writes to pinned memory and copies it without waiting, so that a second call could change
    the memory before the first copy is done: ``copied`` is the event after that copy.
    """

    inner: Any
    copied: torch.cuda.Event | None = None

    def plan(self, device: torch.device, *args: Any, **kwargs: Any) -> None:
        if self.copied is not None:
            self.copied.synchronize()
        self.inner.plan(*args, **kwargs)
        if device.type == "cuda":
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copied.record()


class WrapperPool:
    """Owns wrappers and their workspace. A wrapper is lent to one plan at a time and returned when the plan is deleted.

    Kernels of that plan may then still run, which is safe: they and the next plan's copies are in one stream, in order.

    Raises:
        ImportError: the library is not installed.
    """

    def __init__(self, device: torch.device) -> None:
        self._library = importlib.import_module("flashinfer")
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._free: dict[LayerKind, list[Wrapper]] = {}

    def lend(self, kind: LayerKind, borrower: object) -> Wrapper:
        """Lend a wrapper of ``kind`` to ``borrower``. A prefill wrapper chooses its kernels only once, by kind."""
        free = self._free.setdefault(kind, [])
        wrapper = free.pop() if free else self._make(kind)
        weakref.finalize(borrower, free.append, wrapper).atexit = False
        return wrapper

    def _make(self, kind: LayerKind) -> Wrapper:
        if not kind.decode:
            return Wrapper(self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD"))
        make = self._library.BatchDecodeWithPagedKVCacheWrapper
        return Wrapper(make(self._workspace, "NHD", use_tensor_cores=kind.tensor_cores))


@dataclass(frozen=True, slots=True)
class Pages:
    """A step's pages in the library's format, from each row's first visible block on.

    Attributes:
        indptr: int32 ``[num_rows + 1]`` on the host: index of each row's first page.
        last_page_len: int32 ``[num_rows]`` on the host: tokens in each row's last page.
        indices: int32 ``[num_pages]`` on the device: block ids.
    """

    indptr: torch.Tensor
    last_page_len: torch.Tensor
    indices: torch.Tensor

    @classmethod
    def of(cls, batch: StepBatch) -> "Pages":
        """Make the pages of a step. Block ids stay on the device; only their number is known on the host."""
        size, table = batch.block_size, batch.block_table
        counts_cpu = -(-batch.seq_lens_cpu // size) - batch.first_visible // size
        indptr = np.concatenate([[0], counts_cpu.cumsum()]).astype(np.int32)
        first = first_visible_block(batch)
        counts = torch.div(batch.seq_lens + (size - 1), size, rounding_mode="floor") - first
        total = int(indptr[-1])
        rows = torch.arange(batch.num_rows, device=table.device).repeat_interleave(counts, output_size=total)
        before = counts.cumsum(0) - counts
        columns = torch.arange(total, device=table.device) - (before - first)[rows]
        last = ((batch.seq_lens_cpu - 1) % size + 1).astype(np.int32)
        return cls(torch.from_numpy(indptr), torch.from_numpy(last), table[rows, columns])


@dataclass(slots=True, weakref_slot=True)
class FlashInferPlan:
    """A step's rows, and the library's plan for layers of each kind (usually one kind per group)."""

    batch: StepBatch
    pool: WrapperPool
    _pages: Pages | None = field(default=None)
    _wrappers: dict[LayerKind, Any] = field(default_factory=dict)

    def of_layer(self, query: torch.Tensor, kv_cache: torch.Tensor, spec: AttentionSpec) -> Any:
        """Return the library's wrapper, planned at the first layer of this kind."""
        kind = LayerKind(
            decode=bool((self.batch.query_lens_cpu == 1).all()),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
            soft_cap=spec.soft_cap,
            dtype=query.dtype,
            kv_dtype=kv_cache.dtype,
        )
        if kind not in self._wrappers:
            self._wrappers[kind] = self._planned(kind, query.device)
        return self._wrappers[kind]

    def _planned(self, kind: LayerKind, device: torch.device) -> Any:
        batch = self.batch
        if self._pages is None:
            self._pages = Pages.of(batch)
        pages = self._pages
        wrapper = self.pool.lend(kind, self)
        rows: tuple[torch.Tensor, ...] = (pages.indptr, pages.indices, pages.last_page_len)
        settings: dict[str, Any] = {}
        if not kind.decode:
            starts = np.concatenate([[0], batch.query_lens_cpu.cumsum()]).astype(np.int32)
            rows = (torch.from_numpy(starts), *rows)
            settings["causal"] = True
        wrapper.plan(
            device,
            *rows,
            kind.num_heads,
            kind.num_kv_heads,
            kind.head_dim,
            batch.block_size,
            window_left=batch.window - 1 if batch.window else -1,
            logits_soft_cap=kind.soft_cap,
            q_data_type=kind.dtype,
            kv_data_type=kind.kv_dtype,
            sm_scale=kind.scale,
            **settings,
        )
        return wrapper.inner


class FlashInferBackend:
    """``AttentionBackend`` with FlashInfer. Owns its wrappers and their workspace, and the scales of fp8 caches as
    numbers.

    If any row has more than one token, all rows of the step use the library's prefill. The library compiles a kernel at
    its first use, in the middle of a step, unless its package of compiled kernels is installed.

    Args:
        device: device of the workspace, which is allocated here so that the memory plan includes it.

    Raises:
        ImportError: the library is not installed, or not for this torch.
    """

    name = "flashinfer"
    needs_host_lengths = True
    supports = SUPPORTS

    def __init__(self, device: torch.device) -> None:
        self._pool = WrapperPool(device)
        self._scales: dict[torch.Tensor, float] = {}

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return nhd_cache_shape(num_blocks, block_size, num_kv_heads, head_dim)

    def plan(self, batch: StepBatch) -> FlashInferPlan:
        return FlashInferPlan(batch, self._pool)

    def plan_decode(self, batch: StepBatch, max_query_len: int = 1) -> FlashInferPlan:
        raise NotImplementedError("FlashInfer needs lengths on the host")

    def attend(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: FlashInferPlan,
        spec: AttentionSpec,
        rotary: Rotary | None,
    ) -> torch.Tensor:
        """Compute ``AttentionBackend.attend``.

        Raises:
            ValueError: the cache does not fit the plan, or the layer needs a feature that the library lacks.
        """
        batch = plan.batch
        refuse_sinks(self.name, spec)
        if kv_cache.shape[2] != batch.block_size:
            raise ValueError(f"kv_cache: dimension 2 (block_size) is {kv_cache.shape[2]}, expected {batch.block_size}")
        query = write_cache(qkv, kv_cache, batch.slot_mapping, spec, rotary)
        if len(query) == 0:
            return torch.empty_like(query)
        scales: dict[str, float] = {}
        if kv_cache.dtype in FP8_DTYPES:
            given = {"k_scale": spec.k_scale, "v_scale": spec.v_scale}
            scales = {name: self._number(name, scale) for name, scale in given.items() if scale is not None}
        wrapper = plan.of_layer(query, kv_cache, spec)
        out: torch.Tensor = wrapper.run(query.contiguous(), (kv_cache[0], kv_cache[1]), **scales)
        return out

    def _number(self, name: str, scale: torch.Tensor) -> float:
        """Return a layer's scale as the library wants it; waits for the device at the first call for a layer."""
        if scale not in self._scales:
            numbers = set(scale.tolist())
            if len(numbers) > 1:
                raise ValueError(f"{name}: attention backend {self.name} supports one scale for all heads of a layer")
            self._scales[scale] = numbers.pop()
        return self._scales[scale]
