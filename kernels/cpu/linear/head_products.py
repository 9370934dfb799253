"""Products of each head's inputs by its own matrix, by the native library."""

import ctypes

import torch

from quire.kernels.cpu.linear.linear import PackedLinear
from quire.kernels.cpu.native.library import Native
from quire.kernels.cpu.native.recorded_plan import empty


def head_products_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Reference of ``PackedHeads`` in float64, for ``weight`` ``[num_heads, outputs, inputs]``."""
    return torch.einsum("thi,hoi->tho", x.double(), weight.double())


class PackedHeads:
    """One packed layer with the outputs of all heads, each padded to whole panels, which belong to one head.

    As with ``PackedLinear``, a row's bits depend on that row alone.

    Args:
        weight: ``[num_heads, outputs, inputs]``, of a dtype that ``PackedLinear`` accepts; copied.
    """

    is_packed = True

    def __init__(self, native: Native, weight: torch.Tensor) -> None:
        self.num_heads, self.outputs, inputs = weight.shape
        panel = 2 * native.vector_floats  # PANEL of panels.h
        self._padded = -(-self.outputs // panel) * panel
        self._layer = PackedLinear.unfilled(native, self.num_heads * self._padded, inputs, weight.dtype)
        for head, rows in enumerate(weight):
            padded = rows.new_zeros(self._padded, inputs)
            padded[: self.outputs] = rows
            self._layer.write_rows(head * self._padded, padded)
        pointer, long, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        call = (pointer, pointer, long, long, integer, pointer, integer, integer)
        self._panels = self._padded // panel
        self._run = native.function("quire_head_products", *call)
        self._run_narrow = native.function("quire_head_products_bf16", *call)

    @staticmethod
    def accepts(native: Native, weight: torch.Tensor) -> bool:
        return weight.dim() == 3 and PackedLinear.accepts(native, weight.new_empty(1, 1))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply ``[rows, num_heads, inputs]``, rows and heads may be strided: ``[rows, num_heads, outputs]``.

        Raises:
            ValueError: ``x`` does not have this shape, or is not on the CPU.
        """
        layer = self._layer
        if x.dim() != 3 or x.shape[1:] != (self.num_heads, layer.inputs) or not x.is_cpu:
            expected = f"[rows, {self.num_heads}, {layer.inputs}] on the CPU"
            raise ValueError(f"x: expected {expected}, got {tuple(x.shape)} on {x.device}")
        narrow = x.dtype is torch.bfloat16
        out = empty((len(x), self.num_heads, self._padded), torch.bfloat16 if narrow else torch.float32)
        run = self._run_narrow if narrow and self._layer.takes_bfloat16 else self._run
        if run is self._run and x.dtype is not torch.float32:
            x = x.float()
        x = x if x.stride(2) == 1 else x.contiguous()
        run(layer.layer_at, x.data_ptr(), x.stride(0), x.stride(1), self._panels, out.data_ptr(), narrow, len(x))
        out = out[..., : self.outputs]
        return out if narrow or x.dtype is out.dtype else out.to(x.dtype)
