"""Linear layers over weights packed for the native library: a checked launcher, and what it computes in plain torch."""

import ctypes

import torch

from quire.kernels.cpu.native import Native

# As in linear.cpp.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# The relative error of a sum of float32 products, as a share of the sum of their magnitudes: chains of at most 512
# fused multiply-adds, and one more addition for each further 512.
TOLERANCE = 5e-6


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` in float64: ``[rows, inputs]`` → ``[rows, outputs]``."""
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


class _Layer(ctypes.Structure):
    """As in linear.cpp."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("kind", ctypes.c_int32),
    )


class PackedLinear:
    """A weight in the library's layout, in its own element type, and the product with it.

    A row of the product has the same bits whatever the other rows, their number and the number of threads: see
    linear.cpp. Products and sums are float32.

    Args:
        weight: ``[outputs, inputs]``, contiguous, float32, bfloat16 or float16; not kept.
        bias: ``[outputs]`` or None.

    Raises:
        ValueError: this library does not take the weight (``accepts`` is false).
    """

    def __init__(self, native: Native, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        if not self.accepts(native, weight):
            raise ValueError(f"weight: {weight.dtype} on {weight.device}, {tuple(weight.shape)}: not for packing")
        pointer, long, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        size = native.function("quire_packed_bytes", integer, integer, integer, returns=long)
        pack = native.function("quire_pack", pointer, pointer, integer, integer, integer)
        self._run = native.function("quire_linear", pointer, pointer, long, pointer, integer)
        self.outputs, self.inputs = weight.shape
        kind = KINDS[weight.dtype]
        self._packed = torch.empty(size(*weight.shape, kind), dtype=torch.uint8)
        self._bias = None if bias is None else bias.detach().to(torch.float32, copy=True).contiguous()
        pack(weight.data_ptr(), self._packed.data_ptr(), *weight.shape, kind)
        bias_at = None if self._bias is None else self._bias.data_ptr()
        self._layer = _Layer(self._packed.data_ptr(), bias_at, *weight.shape, kind)
        self._layer_at = ctypes.addressof(self._layer)

    @staticmethod
    def accepts(native: Native, weight: torch.Tensor) -> bool:
        if weight.dtype is torch.float16 and not native.has_float16:
            return False
        plain = weight.device.type == "cpu" and weight.dim() == 2 and weight.is_contiguous() and weight.numel() > 0
        return plain and weight.dtype in KINDS

    @property
    def num_bytes(self) -> int:
        return self._packed.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, inputs]``, rows may be strided → contiguous ``[rows, outputs]`` of ``x``'s dtype.

        Raises:
            ValueError: ``x`` is not of that shape, or not on the CPU.
        """
        if x.dim() != 2 or x.shape[1] != self.inputs or not x.is_cpu:
            raise ValueError(f"x: expected [rows, {self.inputs}] on the CPU, got {tuple(x.shape)} on {x.device}")
        wide = x if x.dtype is torch.float32 and x.stride(1) == 1 else x.to(torch.float32).contiguous()
        rows = wide.shape[0]
        out = torch.empty(rows, self.outputs, dtype=torch.float32)
        self._run(self._layer_at, wide.data_ptr(), wide.stride(0), out.data_ptr(), rows)
        return out if wide is x else out.to(x.dtype)
