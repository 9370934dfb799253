"""Norms, gated activations and copies by the native library: the checked launchers.

``kernels.dense.rms_norm`` and ``kernels.dense.gated_activation`` have their references and tolerances. A row's bits
depend on that row alone, which torch's gates do not guarantee.
"""

import ctypes
from collections.abc import Sequence

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.cpu.native.library import Native
from quire.kernels.cpu.native.recorded_plan import empty
from quire.kernels.dense.gated_activation import ACTIVATIONS

DTYPES = (torch.float32, torch.bfloat16)

_CPU = torch.device("cpu")


class CpuKernels:
    """The library's element-wise functions, looked up once."""

    def __init__(self, native: Native) -> None:
        pointer, long, integer, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
        self._gate = native.function("quire_gate", pointer, long, pointer, integer, integer, integer, integer)
        ends = (pointer, pointer, pointer, integer, number, integer, integer)
        self._norm = native.function("quire_rms_norm", pointer, long, long, integer, integer, *ends)
        layer = (pointer, long, pointer, integer, pointer, pointer, pointer, integer, integer, number, integer)
        self._layer_norm = native.function("quire_layer_norm", *layer)
        self._copy = native.function("quire_copy_rows", pointer, long, pointer, long, integer, integer)

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """As ``kernels.dense.gated_activation.gate``, for float32 and bfloat16.

        Raises:
            ValueError: the tensor does not have that shape, is not float32 or bfloat16, or is not on the CPU.
        """
        _check_rows("gate_up", gate_up)
        rows, columns = gate_up.shape
        if columns % 2 != 0:
            raise ValueError(f"gate_up: dimension 1 (2 * width) is {columns}, expected an even number")
        width, dtype = columns // 2, gate_up.dtype
        out = empty((rows, width), dtype)
        at, stride, number = gate_up.data_ptr(), gate_up.stride(0), ACTIVATIONS[activation]
        self._gate(at, stride, out.data_ptr(), rows, width, dtype is torch.bfloat16, number)
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        """As ``kernels.dense.rms_norm.rms_norm``, for float32 and bfloat16.

        Args:
            x: ``[num_tokens, width]`` or ``[num_tokens, heads, head_dim]``; all but the last dimension may be strided.

        Raises:
            ValueError: a tensor does not have this shape or dtype, or is not on the CPU.
        """
        if x.dim() == 3:
            check_tensor("x", x, {"num_tokens": None, "heads": None, "head_dim": None}, DTYPES, _CPU)
            rows, heads, width = x.shape
            outer, inner = x.stride(0), x.stride(1)
        else:
            _check_rows("x", x)
            (rows, width), heads = x.shape, 0
            outer, inner = x.stride(0), 0
        dtype = x.dtype
        out = empty((rows, heads, width) if heads else (rows, width), dtype)
        at, kind = _weight(weight, width)
        count = (rows * (heads or 1), heads or 1, None, at, out.data_ptr(), width)
        self._norm(x.data_ptr(), outer, inner, *count, eps, dtype is torch.bfloat16, kind)
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Add ``x`` to ``residual`` in place, and return the norm of the sum. Both ``[num_tokens, width]``.

        Raises:
            ValueError: a tensor does not have this shape, the dtypes differ, or the residual is not contiguous.
        """
        _check_rows("x", x)
        shape, dtype = x.shape, x.dtype
        rows, width = shape
        if residual.shape != shape or residual.dtype is not dtype or not residual.is_contiguous():
            raise ValueError(
                f"residual: expected contiguous {dtype} {tuple(shape)}, got {residual.dtype} {tuple(residual.shape)}"
            )
        out = empty((rows, width), dtype)
        at, kind = _weight(weight, width)
        count = (rows, 1, residual.data_ptr(), at, out.data_ptr(), width)
        self._norm(x.data_ptr(), x.stride(0), 0, *count, eps, dtype is torch.bfloat16, kind)
        return out

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        residual: torch.Tensor | None = None,
        *,
        keeps_sum: bool = False,
    ) -> torch.Tensor:
        """Subtract the mean of ``x + residual``, divide by its standard deviation, and apply weight and bias.

        Args:
            x: float32 or bfloat16 ``[num_tokens, width]``; rows may be strided.
            weight, bias: ``[width]``, contiguous, of ``x``'s dtype.
            residual: contiguous, of ``x``'s shape and dtype; None: zero.
            keeps_sum: ``residual`` becomes the sum.

        Raises:
            ValueError: a tensor does not have this shape or dtype, or is not on the CPU.
        """
        _check_rows("x", x)
        (rows, width), dtype = x.shape, x.dtype
        if residual is not None and (
            residual.shape != x.shape or residual.dtype is not dtype or not residual.is_contiguous()
        ):
            raise ValueError(
                f"residual: expected contiguous {dtype} {tuple(x.shape)}, got {residual.dtype} {tuple(residual.shape)}"
            )
        for name, each in (("weight", weight), ("bias", bias)):
            if each is not None:
                check_tensor(name, each, {"width": width}, (dtype,), _CPU)
        out = empty((rows, width), dtype)
        added = None if residual is None else residual.data_ptr()
        ends = (weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(), rows, width)
        self._layer_norm(x.data_ptr(), x.stride(0), added, keeps_sum, *ends, eps, dtype is torch.bfloat16)
        return out

    def join_columns(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return matrices of as many rows side by side: contiguous ``[rows, sum of the widths]``.

        Raises:
            ValueError: a part is not a matrix of float32 or bfloat16 on the CPU, or differs from the first in its
                dtype or its number of rows.
        """
        rows, dtype = len(parts[0]), parts[0].dtype
        for i, part in enumerate(parts):
            check_tensor(f"parts[{i}]", part, {"rows": rows, "width": None}, (dtype,), _CPU)
            _check_rows(f"parts[{i}]", part)
        out = empty((rows, sum(part.shape[1] for part in parts)), dtype)
        size, stride, to = dtype.itemsize, out.stride(0) * dtype.itemsize, out.data_ptr()
        for part in parts:
            width = part.shape[1] * size
            self._copy(part.data_ptr(), part.stride(0) * size, to, stride, rows, width)
            to += width
        return out


def _check_rows(name: str, x: torch.Tensor) -> None:
    """Check ``[rows, width]`` without ``check_tensor``, which takes longer than the kernel for few rows."""
    if x.dim() != 2 or x.dtype not in DTYPES or not x.is_cpu or x.stride(1) != 1:
        check_tensor(name, x, {"num_tokens": None, "width": None}, DTYPES, _CPU)


def _weight(weight: torch.Tensor | None, width: int) -> tuple[int | None, bool]:
    """Check a norm's weight; return its address for the library (None without a weight), and whether it is bfloat16."""
    if weight is None:
        return None, False
    if weight.numel() != width or weight.dtype not in DTYPES or not weight.is_contiguous():
        check_tensor("weight", weight, {"width": width}, DTYPES, _CPU)
    return weight.data_ptr(), weight.dtype is torch.bfloat16
