"""Linear layers over packed weights by the native library: a checked launcher, and a reference in plain torch."""

import ctypes

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.mxfp4 import GROUP_BYTES, GROUP_SIZE
from quire.kernels.cpu.linear.weight_memory import allocate
from quire.kernels.cpu.native.library import Native
from quire.kernels.cpu.native.recorded_plan import empty

# As in linear.cpp.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MXFP4 = 3

# As in activations.h.
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 4, "tanh": 5}
NO_ACTIVATION = -1

# Tolerance of a sum of float32 products, relative to the sum of their magnitudes. Sums are chains of at most 576 fused
# multiply-adds, with one more addition for each further chain.
TOLERANCE = 5e-6


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Reference of ``PackedLinear``: ``x @ weight.T + bias`` in float64, ``[rows, inputs]`` → ``[rows, outputs]``."""
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


class _Layer(ctypes.Structure):
    """``Layer`` of linear.cpp."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("activation", ctypes.c_int32),
    )


class PackedLinear:
    """A linear layer with its weight in the library's packed layout and in the weight's dtype, or in MXFP4.

    Products and sums are float32. A row's bits do not depend on the other rows, their number or the number of threads:
    see linear.cpp.

    Args:
        weight: ``[outputs, inputs]``, contiguous, float32, bfloat16 or float16; copied.
        bias: ``[outputs]`` or None.

    Raises:
        ValueError: the library does not support the weight (``accepts`` is false).
    """

    def __init__(self, native: Native, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        if not self.accepts(native, weight):
            raise ValueError(
                "weight: expected a contiguous matrix of a supported dtype on the CPU, "
                f"got {weight.dtype} {tuple(weight.shape)} on {weight.device}"
            )
        outputs, inputs = weight.shape
        self._allocate(native, outputs, inputs, KINDS[weight.dtype], bias)
        self.write_rows(0, weight)

    @classmethod
    def unfilled(cls, native: Native, outputs: int, inputs: int, dtype: torch.dtype) -> "PackedLinear":
        """Make a layer whose weight, float32, bfloat16 or float16, is written by ``write_rows``."""
        self = cls.__new__(cls)
        self._allocate(native, outputs, inputs, KINDS[dtype], None)
        return self

    @classmethod
    def from_mxfp4(
        cls, native: Native, blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
    ) -> "PackedLinear":
        """Pack a weight in MXFP4, which stays four bits wide. Its sums are those of the same numbers in bfloat16.

        Args:
            blocks: uint8 ``[outputs, inputs / 32, 16]``, contiguous; copied.
            scales: uint8 ``[outputs, inputs / 32]``, contiguous; copied.

        Raises:
            ValueError: a tensor has another shape, dtype or device, or is not contiguous.
        """
        dims = {"outputs": None, "inputs / 32": None, "bytes": GROUP_BYTES}
        check_tensor("blocks", blocks, dims, (torch.uint8,), torch.device("cpu"))
        outputs, groups, _ = blocks.shape
        dims = {"outputs": outputs, "inputs / 32": groups}
        check_tensor("scales", scales, dims, (torch.uint8,), torch.device("cpu"))
        if not (blocks.is_contiguous() and scales.is_contiguous() and outputs and groups):
            raise ValueError("blocks and scales: expected contiguous tensors that are not empty")
        self = cls.__new__(cls)
        self._allocate(native, outputs, groups * GROUP_SIZE, MXFP4, bias)
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        pack = native.function("quire_pack_mxfp4", pointer, pointer, pointer, integer, integer)
        pack(blocks.data_ptr(), scales.data_ptr(), self._packed.data_ptr(), outputs, self.inputs)
        return self

    def write_rows(self, first: int, rows: torch.Tensor) -> bool:
        """Pack rows of the weight, which are copied, and return whether all their numbers are finite.

        Args:
            rows: ``[rows, inputs]``, of the weight's dtype. Rows may be strided.

        Raises:
            ValueError: the rows do not have this shape or dtype, or are not on the CPU.
        """
        kind, last = KINDS.get(rows.dtype), first + len(rows)
        whole = rows.dim() == 2 and rows.shape[1] == self.inputs and 0 <= first <= last <= self.outputs
        if kind != self._layer.kind or not whole or not rows.is_cpu:
            raise ValueError(
                f"rows: expected [rows, {self.inputs}] of the weight's dtype within {self.outputs} on the CPU, "
                f"got {rows.dtype} {tuple(rows.shape)} from {first}"
            )
        if not len(rows):
            return True
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        stride = rows.stride(0) * rows.element_size()
        packed = self._packed.data_ptr()
        return bool(self._pack(rows.data_ptr(), stride, packed, self.outputs, self.inputs, kind, first, len(rows)))

    def set_bias(self, bias: torch.Tensor | None) -> None:
        """Set the bias, ``[outputs]``; copied."""
        self._bias = None if bias is None else bias.detach().to(torch.float32, copy=True).contiguous()
        self._layer.bias = None if self._bias is None else self._bias.data_ptr()

    def set_activation(self, name: str) -> None:
        """Let calls return the activation of their outputs: one of ``ACTIVATIONS``."""
        self._layer.activation = ACTIVATIONS[name]

    def _allocate(self, native: Native, outputs: int, inputs: int, kind: int, bias: torch.Tensor | None) -> None:
        """Allocate the packed weight, which the caller fills, and describe the layer to the library."""
        pointer, long, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        size = native.function("quire_packed_bytes", integer, integer, integer, returns=long)
        call = (pointer, pointer, long, pointer, integer, integer)
        self._run = native.function("quire_linear", *call)
        self._run_narrow = native.function("quire_linear_bf16", *call)
        self.outputs, self.inputs = outputs, inputs
        sizes = (integer, integer, integer, integer, integer)
        self._pack = native.function("quire_pack_rows", pointer, long, pointer, *sizes, returns=integer)
        self._packed = allocate(size(outputs, inputs, kind))
        self._layer = _Layer(self._packed.data_ptr(), None, outputs, inputs, kind, NO_ACTIVATION)
        self.set_bias(bias)
        self._layer_at = ctypes.addressof(self._layer)
        self._takes_bfloat16 = bool(native.function("quire_takes_bf16", pointer, returns=integer)(self._layer_at))

    @staticmethod
    def accepts(native: Native, weight: torch.Tensor) -> bool:
        if weight.dtype is torch.float16 and not native.has_float16:
            return False
        plain = weight.device.type == "cpu" and weight.dim() == 2 and weight.is_contiguous() and weight.numel() > 0
        return plain and weight.dtype in KINDS

    @property
    def num_bytes(self) -> int:
        return self._packed.numel()

    @property
    def packed(self) -> torch.Tensor:
        """The packed weight, uint8. See linear.cpp for its layout."""
        return self._packed

    @property
    def layer_at(self) -> int:
        """Address of the library's description of the layer."""
        return self._layer_at

    @property
    def kind(self) -> int:
        """Number of the layout: a value of ``KINDS``, or MXFP4."""
        return int(self._layer.kind)

    @property
    def takes_bfloat16(self) -> bool:
        """Whether bfloat16 rows are multiplied as they are."""
        return self._takes_bfloat16

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Multiply ``[rows, inputs]``, rows may be strided: contiguous ``[rows, outputs]``.

        Args:
            dtype: dtype of the output, by default ``x``'s. float32 is the sums as they are.

        Raises:
            ValueError: ``x`` does not have this shape, or is not on the CPU.
        """
        if x.dim() != 2 or x.shape[1] != self.inputs or not x.is_cpu:
            raise ValueError(f"x: expected [rows, {self.inputs}] on the CPU, got {tuple(x.shape)} on {x.device}")
        rows, dtype = x.shape[0], dtype or x.dtype
        narrow = dtype is torch.bfloat16
        out = empty((rows, self.outputs), torch.bfloat16 if narrow else torch.float32)
        if x.dtype is torch.bfloat16 and self._takes_bfloat16:
            x = x if x.stride(1) == 1 else x.contiguous()
            self._run_narrow(self._layer_at, x.data_ptr(), x.stride(0), out.data_ptr(), narrow, rows)
        else:
            wide = x if x.dtype is torch.float32 and x.stride(1) == 1 else x.to(torch.float32).contiguous()
            self._run(self._layer_at, wide.data_ptr(), wide.stride(0), out.data_ptr(), narrow, rows)
        return out if out.dtype is dtype else out.to(dtype)
