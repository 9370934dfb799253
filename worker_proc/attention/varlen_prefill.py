"""Attention of whole new prompts over their own keys and values, with torch operators, without cache and block tables.

If no token of a prompt was computed before this step, the keys and values that the paged kernel would read from the
cache are in the step's own tensors, in order.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from quire.kernels.common.checks import check_tensor
from quire.worker_proc.attention.backend import AttentionSpec, StepBatch
from quire.worker_proc.attention.supports import HALVES

DTYPES = (torch.float32, *HALVES)
FLASH_HEAD_DIMS = 256
"""Largest head dimension of torch's flash attention, which must be a multiple of 8."""


def can_attend_fresh(batch: StepBatch, spec: AttentionSpec, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """Return whether ``attend_fresh`` gives the same result as attention over the cache; reads the host's lengths.

    It does if no row has computed tokens, attention is causal, no window or chunk hides a token, the layer has neither
    soft cap nor sinks, and the cache has the activations' ``dtype`` (another dtype would round the keys).
    """
    longest = int(batch.seq_lens_cpu.max(initial=0))
    plain = not spec.soft_cap and spec.sinks is None and batch.last_keys is None
    seen_whole = longest == 0 or batch.first_key(longest - 1) == 0
    fresh = longest > 0 and bool((batch.query_lens_cpu == batch.seq_lens_cpu).all())
    return fresh and seen_whole and plain and dtype is kv_dtype and dtype in DTYPES


def attend_fresh(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    lens_cpu: npt.NDArray[np.int32],
    scale: float,
) -> torch.Tensor:
    """Compute causal attention of each row over its own tokens.

    Uses torch's variable-length flash attention on a GPU that supports it. Otherwise calls
    ``scaled_dot_product_attention`` once for every run of rows of equal length.

    Args:
        query: float32, float16 or bfloat16 ``[num_tokens, num_heads, head_dim]``, rotated.
        key, value: ``[num_tokens, num_kv_heads, head_dim]``, same dtype, keys rotated.
        query_start_loc: int32 ``[num_rows + 1]`` on the device.
        lens_cpu: int32 ``[num_rows]`` on the host: number of tokens of each row.

    Returns:
        ``[num_tokens, num_heads, head_dim]``.

    Raises:
        ValueError: a tensor does not have the shape, dtype or device above, or the sum of the lengths is wrong.
    """
    _check(query, key, value, query_start_loc, lens_cpu)
    if len(query) == 0:
        return torch.empty_like(query)
    if query.is_cuda and query.dtype in HALVES and query.shape[2] % 8 == 0 and query.shape[2] <= FLASH_HEAD_DIMS:
        ragged = _varlen_attn()
        if ragged is not None and torch.cuda.get_device_capability(query.device)[0] >= 8:
            longest = int(lens_cpu.max())
            starts = query_start_loc
            grouped = query.shape[1] != key.shape[1]
            out: torch.Tensor = ragged(
                query, key, value, starts, starts, longest, longest,
                scale=scale, window_size=(-1, 0), enable_gqa=grouped,
            )  # fmt: skip
            return out
    return _row_by_row(query, key, value, lens_cpu, scale)


def _row_by_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lens_cpu: npt.NDArray[np.int32], scale: float
) -> torch.Tensor:
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    grouped = query.shape[1] != key.shape[1]
    start = 0
    for length, count in _runs(lens_cpu):
        own = slice(start, start + length * count)
        q, k, v = (x[own].view(count, length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        out[own] = attended.transpose(1, 2).flatten(0, 1)
        start += length * count
    return out


def _runs(lens_cpu: npt.NDArray[np.int32]) -> list[tuple[int, int]]:
    """Return (length, number of rows) of each run of rows of equal length; skip rows without tokens."""
    runs: list[tuple[int, int]] = []
    for length in lens_cpu.tolist():
        if runs and runs[-1][0] == length:
            runs[-1] = (length, runs[-1][1] + 1)
        elif length:
            runs.append((length, 1))
    return runs


@functools.cache
def _varlen_attn() -> Callable[..., Any] | None:
    """Return torch's ``varlen_attn``, or None if it is missing or lacks grouped heads (before torch 2.12)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    wanted = {"scale", "window_size", "enable_gqa"}
    return varlen_attn if wanted <= set(inspect.signature(varlen_attn).parameters) else None


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    lens_cpu: npt.NDArray[np.int32],
) -> None:
    check_tensor("query", query, {"num_tokens": None, "num_heads": None, "head_dim": None}, DTYPES, query.device)
    dims = {"num_tokens": len(query), "num_kv_heads": None, "head_dim": query.shape[2]}
    for name, tensor in (("key", key), ("value", value)):
        check_tensor(name, tensor, dims, (query.dtype,), query.device)
        dims["num_kv_heads"] = tensor.shape[1]
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"query: {query.shape[1]} heads, expected a multiple of the key's {key.shape[1]}")
    check_tensor("query_start_loc", query_start_loc, {"num_rows + 1": len(lens_cpu) + 1}, (torch.int32,), query.device)
    if int(lens_cpu.sum()) != len(query):
        raise ValueError(f"lens_cpu: sum is {int(lens_cpu.sum())}, expected {len(query)} (num_tokens)")
