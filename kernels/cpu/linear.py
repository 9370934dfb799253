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
            raise ValueError(
                f"weight: {weight.dtype} on {weight.device} of shape {tuple(weight.shape)} is not for packing"
            )
        pointer, long, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        size = native.function("quire_packed_bytes", integer, integer, integer, returns=long)
        pack = native.function("quire_pack", pointer, pointer, integer, integer, integer)
        self._linear = native.function(
            "quire_linear", pointer, long, pointer, pointer, pointer, long, integer, integer, integer, integer, integer
        )
        self.outputs, self.inputs = weight.shape
        self._kind = KINDS[weight.dtype]
        self._packed = torch.empty(size(*weight.shape, self._kind), dtype=torch.uint8)
        pack(weight.data_ptr(), self._packed.data_ptr(), *weight.shape, self._kind)
        self._bias = None if bias is None else bias.detach().float().contiguous().clone()
        self._packed_at = self._packed.data_ptr()
        self._bias_at = None if self._bias is None else self._bias.data_ptr()

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
        """``[rows, inputs]`` → ``[rows, outputs]`` of ``x``'s dtype, computed in float32."""
        self._check(x)
        out = torch.empty(len(x), self.outputs)
        self._run(x, out, 0)
        return out if x.dtype is torch.float32 else out.to(x.dtype)

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """``out += self(x)``, in place; ``out`` float32 ``[rows, outputs]``."""
        self._check(x)
        if out.shape != (len(x), self.outputs) or out.dtype is not torch.float32 or out.stride(-1) != 1:
            raise ValueError(
                f"out: expected float32 rows [{len(x)}, {self.outputs}], got {out.dtype} {tuple(out.shape)}"
            )
        self._run(x, out, 1)

    def _run(self, x: torch.Tensor, out: torch.Tensor, accumulate: int) -> None:
        if x.dtype is not torch.float32 or x.stride(1) != 1:
            x = x.float().contiguous()
        self._linear(
            x.data_ptr(),
            x.stride(0),
            self._packed_at,
            self._bias_at,
            out.data_ptr(),
            out.stride(0),
            len(x),
            self.outputs,
            self.inputs,
            self._kind,
            accumulate,
        )

    def _check(self, x: torch.Tensor) -> None:
        if x.dim() != 2 or x.shape[1] != self.inputs or x.device.type != "cpu":
            raise ValueError(f"x: expected [rows, {self.inputs}] on the CPU, got {tuple(x.shape)} on {x.device}")
