"""Rows of a weight matrix by token id, by the native library: the embedding, also of a weight that is packed."""

import ctypes
from typing import TypeGuard

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.cpu.linear.codes import CodesLinear
from quire.kernels.cpu.linear.linear import KINDS, PackedLinear
from quire.kernels.cpu.native.library import Native
from quire.kernels.cpu.native.recorded_plan import empty


class _Table(ctypes.Structure):
    """``Table`` of packed_rows.cpp."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("inputs", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("factor", ctypes.c_float),
    )


class EmbeddingRows:
    """Gathers rows of a weight that has one for each token id in ``ids``; other ids have zeros.

    Args:
        weight: ``[rows, width]``, float32, bfloat16 or float16, plain and contiguous or packed; or packed codes. Its
            first rows are those of ``ids``.
        factor: number that every row is multiplied by, in float32.

    Raises:
        ValueError: the library does not support the weight.
    """

    def __init__(self, native: Native, weight: torch.Tensor | PackedLinear, ids: range, factor: float = 1.0) -> None:
        if not self.takes(weight, native):
            raise ValueError("weight: expected packed or contiguous rows of a supported dtype on the CPU")
        stride = kind = codes = 0
        if isinstance(weight, CodesLinear):
            self.width, codes = weight.inputs, weight.layer_at
        elif isinstance(weight, PackedLinear):
            self.width, kind = weight.inputs, weight.kind
        else:
            self.width, kind = weight.shape[1], KINDS[weight.dtype]
            stride = self.width * weight.element_size()
        memory = weight.packed if isinstance(weight, PackedLinear) else weight
        self._keep = weight
        self._table = _Table(memory.data_ptr(), codes, stride, ids.start, len(ids), self.width, kind, factor)
        self._table_at = ctypes.addressof(self._table)
        pointer, long, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        self._gather = native.function("quire_gather", pointer, pointer, pointer, long, integer)

    @staticmethod
    def takes(weight: object, native: Native) -> TypeGuard[torch.Tensor | PackedLinear]:
        """Whether the library supports the weight."""
        if isinstance(weight, torch.Tensor):
            return PackedLinear.accepts(native, weight)
        return isinstance(weight, CodesLinear) or (type(weight) is PackedLinear and weight.kind in KINDS.values())

    def __call__(self, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows of int64 ``[num_tokens]``: new ``[num_tokens, width]`` of ``dtype``."""
        if token_ids.dtype is not torch.int64 or not token_ids.is_contiguous() or not token_ids.is_cpu:
            check_tensor("token_ids", token_ids, {"num_tokens": None}, (torch.int64,), torch.device("cpu"))
            token_ids = token_ids.contiguous()
        count, narrow = len(token_ids), dtype is torch.bfloat16
        out = empty((count, self.width), torch.bfloat16 if narrow else torch.float32)
        self._gather(self._table_at, token_ids.data_ptr(), out.data_ptr(), count, narrow)
        return out if out.dtype is dtype else out.to(dtype)
