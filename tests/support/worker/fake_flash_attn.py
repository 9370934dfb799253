"""Stand-ins for the flash-attn libraries: their functions' names, arguments and refusals, computed densely on a CPU.

``flash_attn_interface`` is version 3 (hopper/flash_attn_interface.py), ``flash_attn`` is version 2.8. Arguments that
the real kernels would read wrongly or refuse fail an assertion here.
"""

import sys
from types import ModuleType

import pytest
import torch
from cpu_attention_cases import Ask, attend_naively, raw

from quire.worker_proc.attention.backend import AttentionSpec

PAGE_MULTIPLE_2 = 256


def install(monkeypatch: pytest.MonkeyPatch, *, version_3: bool = True, version_2: bool = True) -> None:
    """Install the modules where an import finds them; the others cannot be imported."""
    modules: dict[str, ModuleType | None] = {"flash_attn_interface": None, "flash_attn": None}
    if version_3:
        modules["flash_attn_interface"] = ModuleType("flash_attn_interface")
        modules["flash_attn_interface"].flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    if version_2:
        modules["flash_attn"] = ModuleType("flash_attn")
        modules["flash_attn"].flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: None = None,
    v: None = None,
    qv: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
) -> torch.Tensor:
    """Version 3 with ragged queries over pages."""
    assert cache_seqlens is not None and page_table is not None and cu_seqlens_q is not None
    assert isinstance(max_seqlen_q, int) and isinstance(softmax_scale, float)
    _check_vector(cache_seqlens, len(page_table))
    window = _window(window_size, causal)
    return _attend(q, k_cache, v_cache, page_table, cu_seqlens_q, cache_seqlens, max_seqlen_q, None, softmax_scale,
                   softcap, window)  # fmt: skip


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Version 2 over pages: lengths of rows are differences of ``cu_seqlens_k``."""
    assert block_table is not None and isinstance(softmax_scale, float)
    assert k.shape[1] % PAGE_MULTIPLE_2 == 0, "Paged KV cache block size must be divisible by 256"
    _check_vector(cu_seqlens_k, len(block_table) + 1)
    assert cu_seqlens_k[0] == 0
    return _attend(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k.diff(), max_seqlen_q, max_seqlen_k, softmax_scale,
                   softcap, _window(window_size, causal))  # fmt: skip


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    kv_lens: torch.Tensor,
    max_query_len: int,
    max_kv_len: int | None,
    scale: float,
    soft_cap: float,
    window: int,
) -> torch.Tensor:
    """Compute attention row by row. Tokens after the last row, the padding of a captured step, are left NaN."""
    _check_inputs(q, k_cache, v_cache)
    assert table.dtype is torch.int32 and table.dim() == 2 and table.stride(-1) == 1
    _check_vector(starts, len(table) + 1)
    lens = starts.diff().tolist()
    assert starts[0] == 0 and starts[-1] <= len(q) and min(lens) >= 0 and max(lens) <= max_query_len
    assert max_kv_len is None or int(kv_lens.max()) <= max_kv_len
    heads, kv_heads, dim = q.shape[1], k_cache.shape[2], q.shape[2]
    spec = AttentionSpec(heads, kv_heads, dim, scale, soft_cap=soft_cap)
    out = torch.full_like(q, float("nan"))
    page = k_cache.shape[1]
    for row, total in enumerate(kv_lens.tolist()):
        own = slice(int(starts[row]), int(starts[row + 1]))
        if not lens[row]:
            continue
        assert total >= lens[row] and total <= table.shape[1] * page
        keys, values = (gather(cache, table[row, : -(-total // page)], total) for cache in (k_cache, v_cache))
        out[own] = attend_naively(q[own], keys, values, total - lens[row], spec, Ask(window=window)).to(q.dtype)
    return out


def gather(cache: torch.Tensor, pages: torch.Tensor, total: int) -> torch.Tensor:
    """Return float64 ``[total, kv_heads, head_dim]``. A block id outside the pool raises IndexError."""
    return raw(cache)[pages.long()].view(cache.dtype).flatten(0, 1)[:total].double()


def _check_inputs(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    assert q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type"
    assert k_cache.dtype is q.dtype and v_cache.dtype is q.dtype
    assert q.dim() == 3 and k_cache.dim() == 4 and k_cache.shape == v_cache.shape
    assert q.shape[2] == k_cache.shape[3] and q.shape[2] <= 256 and q.shape[2] % 8 == 0
    assert q.shape[1] % k_cache.shape[2] == 0
    assert all(x.stride(-1) == 1 for x in (q, k_cache, v_cache))


def _check_vector(x: torch.Tensor, length: int) -> None:
    assert x.dtype is torch.int32 and x.shape == (length,) and x.is_contiguous(), (x.dtype, x.shape, length)


def _window(window_size: tuple[int, int], causal: bool) -> int:
    """Return the number of tokens that each token sees, including itself; 0: all."""
    assert causal
    left, right = window_size
    assert right in (-1, 0)
    return left + 1 if left >= 0 else 0
