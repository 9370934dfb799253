"""Attention with the native library (``kernels/cpu/attention/attention.cpp``): its argument structs and calls."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.cpu.native.library import Native
from quire.kernels.cpu.native.recorded_plan import empty
from quire.worker_proc.attention.backend import AttentionSpec, Rotary, StepBatch

FORMATS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}
"""``Format`` of ``attention/rows.h``."""

ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)

ERRORS = {
    1: "a block id is outside the cache",
    2: "a row is longer than its block table, or has more tokens than the step or an image that ends behind it",
    3: "a slot is outside the cache",
    4: "a position is outside the rotary table",
}


class NativeStep(ctypes.Structure):
    """``QuireStep`` of ``attention/structs.h``, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("block_table", "query_start_loc", "seq_lens", "slot_mapping")),
        *((name, ctypes.c_void_p) for name in ("prefix_of_row", "prefix_lens", "last_keys")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_tokens", "table_width", "table_stride")),
        *((name, ctypes.c_int64) for name in ("block_size", "window", "chunk", "num_prefixes")),
    )

    @classmethod
    def of(cls, other: "NativeStep") -> "NativeStep":
        """Return a copy."""
        return cls.from_buffer_copy(other)

    def assign(self, other: "NativeStep") -> None:
        """Overwrite all fields in place."""
        ctypes.pointer(self)[0] = other


class NativeLayer(ctypes.Structure):
    """``QuireLayer`` of ``attention/structs.h``, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("sinks", "k_scale", "v_scale")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "num_blocks")),
        *((name, ctypes.c_int64) for name in ("cache_format", "query_format", "values_from", "block_stride")),
        *((name, ctypes.c_double) for name in ("scale", "soft_cap")),
        *((name, ctypes.c_int64) for name in ("value_dim", "key_dim")),
    )


class NativeTokens(ctypes.Structure):
    """``QuireTokens`` of ``attention/structs.h``, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "q_norm", "k_norm", "table", "positions")),
        *((name, ctypes.c_int64) for name in ("token_stride", "head_stride", "value_token_stride")),
        *((name, ctypes.c_int64) for name in ("value_head_stride", "table_format", "max_position", "rotary_dim")),
        ("norm_eps", ctypes.c_double),
    )


@dataclass(slots=True)
class NativePlan:
    """A step in the library's layout, and what keeps the memory that it points to.

    Attributes:
        expander: computes attention over latents if long prompts are to be expanded (``cpu_expanded.py``).
        parts: the rows by their form, made at the first layer with latents.
    """

    step: NativeStep
    batch: StepBatch
    prefixes: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]] | None
    expander: "NativeAttention | None" = None
    parts: list[Any] | None = None


class NativeAttention:
    """Calls of the native library. Stateless.

    Args:
        expands: long prompts over latents are expanded. Not in deterministic mode: the two forms round differently, and
            the chunks of a prompt, preemption and recovery would decide which one computes a token.
    """

    def __init__(self, native: Native, *, expands: bool = False) -> None:
        self._expands = expands
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        step, layer, tokens = ctypes.POINTER(NativeStep), ctypes.POINTER(NativeLayer), ctypes.POINTER(NativeTokens)
        self._attention = native.function(
            "quire_attention", pointer, pointer, number, number, pointer, step, layer, returns=number
        )
        self._prologue = native.function("quire_attention_prologue", tokens, pointer, step, layer, returns=number)

    def plan(self, batch: StepBatch) -> NativePlan:
        """Make a plan, which holds only pointers and sizes.

        Raises:
            ValueError: a tensor does not have the dtype and layout of ``StepBatch``.
        """
        table = batch.block_table
        for name, tensor, dtype in (
            ("block_table", table, torch.int32),
            ("query_start_loc", batch.query_start_loc, torch.int32),
            ("seq_lens", batch.seq_lens, torch.int32),
            ("slot_mapping", batch.slot_mapping, torch.int64),
        ):
            if tensor.dtype is not dtype or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
                raise ValueError(f"{name}: {tensor.dtype} with strides {tensor.stride()}, expected {dtype}, dense")
        if min(len(table), len(batch.seq_lens), len(batch.query_start_loc) - 1) < batch.num_rows:
            raise ValueError(f"a tensor of the step has fewer than {batch.num_rows} rows")
        prefixes = _prefixes(batch)
        step = NativeStep(
            table.data_ptr(),
            batch.query_start_loc.data_ptr(),
            batch.seq_lens.data_ptr(),
            batch.slot_mapping.data_ptr(),
            *((None, None) if prefixes is None else (array.ctypes.data for array in prefixes)),
            None if batch.last_keys is None else batch.last_keys.ctypes.data,
            batch.num_rows,
            len(batch.slot_mapping),
            table.shape[1],
            table.stride(0),
            batch.block_size,
            batch.window,
            batch.chunk,
            0 if prefixes is None else len(prefixes[1]),
        )
        return NativePlan(step, batch, prefixes, self if self._expands else None)

    def attend(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: NativePlan,
        spec: AttentionSpec,
        rotary: Rotary | None,
    ) -> torch.Tensor:
        """Make two calls: norms, rotation (queries in place) and cache write in one float32 pass, then attention."""
        start, size = _dense(qkv).data_ptr(), qkv.element_size()
        token_stride, head_stride, _ = qkv.stride()
        tokens = NativeTokens(
            token_stride=token_stride,
            head_stride=head_stride,
            value_token_stride=token_stride,
            value_head_stride=head_stride,
            norm_eps=spec.norm_eps,
        )
        if spec.q_norm is not None or rotary is not None:
            tokens.query = start
        if qkv.shape[1] > spec.num_heads:
            tokens.key = start + spec.num_heads * head_stride * size
            if not spec.value_dim:
                tokens.value = start + (spec.num_heads + spec.num_kv_heads) * head_stride * size
        if spec.q_norm is not None:
            assert spec.k_norm is not None
            tokens.q_norm = _pointer(spec.q_norm, qkv.dtype)
            tokens.k_norm = _pointer(spec.k_norm, qkv.dtype)
        if rotary is not None:
            _set_rotary(tokens, rotary, len(qkv))
        layer = _layer(spec, kv_cache, qkv.dtype, plan)
        require_no_error(self._prologue(tokens, kv_cache.data_ptr(), plan.step, layer))
        return self._attend(qkv[:, : spec.num_heads], kv_cache, plan, layer)

    def _attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, plan: NativePlan, layer: NativeLayer
    ) -> torch.Tensor:
        """Compute attention of ``query``: ``[num_tokens, num_heads, head_dim]``, may be strided."""
        if len(query) != plan.step.num_tokens:
            raise ValueError(f"query: {len(query)} tokens, expected {plan.step.num_tokens}")
        out = empty((*query.shape[:2], layer.value_dim or query.shape[2]), query.dtype)
        token_stride, head_stride, _ = query.stride()
        cache = kv_cache.data_ptr()
        require_no_error(
            self._attention(out.data_ptr(), query.data_ptr(), token_stride, head_stride, cache, plan.step, layer)
        )
        return out


def _prefixes(batch: StepBatch) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]] | None:
    """Return ``prefix_of_row`` and ``prefix_lens`` of ``QuireStep``, or None without prefixes."""
    if not batch.prefixes:
        return None
    of_row = np.full(batch.num_rows, -1, np.int32)
    for index, prefix in enumerate(batch.prefixes):
        of_row[prefix.rows] = index
    return of_row, np.array([prefix.length for prefix in batch.prefixes], np.int32)


def _set_rotary(tokens: NativeTokens, rotary: Rotary, num_tokens: int) -> None:
    table, positions = rotary.table, rotary.positions
    assert table.is_contiguous() and positions.is_contiguous()
    assert positions.dtype is torch.int64 and len(positions) == num_tokens
    tokens.table = table.data_ptr()
    tokens.positions = positions.data_ptr()
    tokens.table_format = FORMATS[table.dtype]
    tokens.max_position, tokens.rotary_dim = table.shape[1:]


def _layer(spec: AttentionSpec, kv_cache: torch.Tensor, dtype: torch.dtype, plan: NativePlan) -> NativeLayer:
    parts, num_blocks, kv_heads, block_size, head_dim = kv_cache.shape
    if parts != (1 if spec.value_dim else 2):
        raise ValueError(f"kv_cache: {parts} parts do not match the layer")
    if block_size != plan.step.block_size or kv_heads != spec.num_kv_heads or head_dim != spec.head_dim:
        raise ValueError(f"kv_cache: shape {tuple(kv_cache.shape)} does not match the step and the layer")
    assert kv_cache[0, 0].is_contiguous() and dtype in ACTIVATIONS
    return NativeLayer(
        *(None if x is None else _pointer(x, torch.float32) for x in (spec.sinks, spec.k_scale, spec.v_scale)),
        spec.num_heads,
        kv_heads,
        head_dim,
        num_blocks,
        FORMATS[kv_cache.dtype],
        FORMATS[dtype],
        *kv_cache.stride()[:2],
        spec.scale,
        spec.soft_cap,
        spec.value_dim,
        spec.key_dim or head_dim,
    )


def _pointer(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    assert tensor.dtype is dtype and tensor.is_contiguous()
    return tensor.data_ptr()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.stride(-1) != 1:
        raise ValueError(f"last dimension must be contiguous (strides {tensor.stride()})")
    return tensor


def require_no_error(error: int) -> None:
    """Raise ValueError for an error code of the library."""
    if error:
        raise ValueError(ERRORS[error])
