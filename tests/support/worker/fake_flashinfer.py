"""A stand-in for FlashInfer 0.6: the names, arguments and refusals of its two paged wrappers, computed densely on a
CPU.

Optional arguments of ``plan`` are keyword-only here, as the library asks (positional ones are deprecated).
"""

import sys
from types import ModuleType

import pytest
import torch
from cpu_attention_cases import Ask, attend_naively
from fake_flash_attn import gather

from quire.worker_proc.attention.backend import AttentionSpec

HALVES = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HEAD_DIMS = (64, 128, 256)
CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)


def install(monkeypatch: pytest.MonkeyPatch) -> "list[_PagedWrapper]":
    """Install the module where an import finds it; return the list that collects every wrapper made after that."""
    made: list[_PagedWrapper] = []

    class Prefill(BatchPrefillWithPagedKVCacheWrapper):
        _made = made

    class Decode(BatchDecodeWithPagedKVCacheWrapper):
        _made = made

    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Prefill  # type: ignore[attr-defined]
    module.BatchDecodeWithPagedKVCacheWrapper = Decode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return made


class _PagedWrapper:
    """The result of ``plan`` for ``run``, which may be called many times."""

    _made: "list[_PagedWrapper]"

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str) -> None:
        assert float_workspace_buffer.dtype is torch.uint8 and float_workspace_buffer.is_contiguous()
        assert float_workspace_buffer.numel() >= 2**20
        assert kv_layout == "NHD"
        self.plans = 0
        self._made.append(self)

    def _keep(
        self,
        starts: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        heads: tuple[int, int, int],
        page_size: int,
        settings: tuple[int, float | None, torch.dtype, torch.dtype | None, float | None],
    ) -> None:
        num_heads, kv_heads, head_dim = heads
        window_left, soft_cap, dtype, kv_dtype, scale = settings
        rows = len(last_page_len)
        for x, length in ((starts, rows + 1), (indptr, rows + 1), (last_page_len, rows), (indices, int(indptr[-1]))):
            assert x.dtype is torch.int32 and x.shape == (length,) and x.is_contiguous(), (x.dtype, x.shape, length)
        assert indptr[0] == 0 and bool((indptr.diff() > 0).all())
        assert bool(((last_page_len >= 1) & (last_page_len <= page_size)).all())
        assert num_heads % kv_heads == 0 and head_dim in HEAD_DIMS
        assert dtype in HALVES and (kv_dtype is None or kv_dtype is dtype or kv_dtype in FP8)
        assert isinstance(scale, float)
        self._starts, self._indptr, self._indices = starts.tolist(), indptr.tolist(), indices.clone()
        self._totals = ((indptr.diff() - 1) * page_size + last_page_len).tolist()
        self._spec = AttentionSpec(num_heads, kv_heads, head_dim, scale, soft_cap=soft_cap or 0.0)
        self._ask = Ask(window=window_left + 1)
        self._page_size, self._dtype, self._kv_dtype = page_size, dtype, kv_dtype or dtype
        self.plans += 1

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> torch.Tensor:
        assert self.plans, "plan() comes before run()"
        spec = self._spec
        assert q.shape == (self._starts[-1], spec.num_heads, spec.head_dim) and q.is_contiguous()
        assert q.dtype is self._dtype
        for cache in paged_kv_cache:
            assert cache.dtype is self._kv_dtype and cache.stride(-1) == 1
            assert cache.shape[1:] == (self._page_size, spec.num_kv_heads, spec.head_dim)
        assert (k_scale is None and v_scale is None) or self._kv_dtype in FP8
        scales = (k_scale or 1.0, v_scale or 1.0)
        out = torch.empty_like(q)
        for row, total in enumerate(self._totals):
            own = slice(self._starts[row], self._starts[row + 1])
            pages = self._indices[self._indptr[row] : self._indptr[row + 1]]
            keys, values = (
                gather(cache, pages, total) * scale for cache, scale in zip(paged_kv_cache, scales, strict=True)
            )
            new = own.stop - own.start
            assert new <= total
            out[own] = attend_naively(q[own], keys, values, total - new, spec, self._ask).to(q.dtype)
        return out


class BatchPrefillWithPagedKVCacheWrapper(_PagedWrapper):
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert causal
        self._keep(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            (num_qo_heads, num_kv_heads, head_dim_qk),
            page_size,
            (window_left, logits_soft_cap, q_data_type, kv_data_type, sm_scale),
        )


class BatchDecodeWithPagedKVCacheWrapper(_PagedWrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        assert not use_cuda_graph
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        group = num_qo_heads // num_kv_heads
        assert self.use_tensor_cores or group in CUDA_CORE_GROUPS, f"Unsupported group_size: {group}"
        starts = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self._keep(
            starts,
            indptr,
            indices,
            last_page_len,
            (num_qo_heads, num_kv_heads, head_dim),
            page_size,
            (window_left, logits_soft_cap, q_data_type, kv_data_type, sm_scale),
        )
