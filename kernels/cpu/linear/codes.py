"""Linear layers over integer codes with scales by the native library: a checked launcher of ``codes.cpp``."""

import ctypes
from dataclasses import dataclass

import torch

from quire.kernels.common.block_weight import BLOCK_TYPES, BlockWeight
from quire.kernels.common.scaled_weight import CODE_DTYPES, INT4_ZERO, ScaledWeight
from quire.kernels.cpu.linear.linear import PackedLinear
from quire.kernels.cpu.linear.weight_memory import allocate
from quire.kernels.cpu.native.library import Native
from quire.kernels.cpu.native.recorded_plan import empty

WORD = 8
"""Inputs that are decoded together. Groups start there."""
MOST_BLOCK = 512
"""Inputs of a block, whose sum must stay below 2 ** 31: the largest code times 2 ** 15 times this."""
MOST_PADDING = 1.5
"""Packed inputs for each input, where groups have different numbers of inputs."""

# As in code_panels.h and code_pack.h.
SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}
BYTES = 4


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a kind is packed. ``codes``: the kind of codes in panels; ``offset``: what is subtracted from each."""

    source: int
    codes: int
    offset: int = 0
    block: int = 32
    has_mins: bool = False
    scale: int = SCALES[torch.float16]


SCALED_KINDS = {"int8": _Kind(0, 0), "int4": _Kind(1, 1, INT4_ZERO), "fp4": _Kind(2, 4)}
BLOCK_KINDS = {
    "Q4_0": _Kind(3, 1, INT4_ZERO),
    "Q4_1": _Kind(4, 1, has_mins=True),
    "Q5_0": _Kind(5, 2, 16),
    "Q5_1": _Kind(6, 2, has_mins=True),
    "Q8_0": _Kind(7, 0),
    "Q4_K": _Kind(8, 1, has_mins=True, scale=BYTES),
    "Q5_K": _Kind(9, 2, has_mins=True, scale=BYTES),
    "Q6_K": _Kind(10, 3, 32, block=16, scale=BYTES),
}


class _Layer(ctypes.Structure):
    """``CodesLayer`` of code_panels.h."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("packed_inputs", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("block", ctypes.c_int32),
        ("scale_kind", ctypes.c_int32),
        ("offset", ctypes.c_int32),
        ("has_zeros", ctypes.c_int32),
        ("has_mins", ctypes.c_int32),
        ("has_row_scales", ctypes.c_int32),
        ("rounds_rows", ctypes.c_int32),
    )


class _Source(ctypes.Structure):
    """``CodesSource`` of code_pack.h."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("row_scales", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("blocks_per_group", ctypes.c_int32),
    )


class CodesLinear(PackedLinear):
    """A ``PackedLinear`` over codes that are integers, which keep their bits, as do scales, minimums and zeros.

    Rows are rounded to integers, whose products and sums are exact: one of 16 bits for a bfloat16 number, two for a
    float32 number (see code_rows.h). Groups that are not consecutive are packed in order of the group.

    Args:
        weight: copied.
        bias: ``[outputs]`` or None.
        int8_activations: round each row to int8 instead, with a scale of its own (``round_to_int8``).

    Raises:
        ValueError: the library does not support the weight (``takes`` is false).
    """

    def __init__(
        self,
        native: Native,
        weight: ScaledWeight | BlockWeight,
        bias: torch.Tensor | None = None,
        *,
        int8_activations: bool = False,
    ) -> None:
        if not self.takes(native, weight):
            raise ValueError(
                f"weight: expected contiguous codes that are integers on the CPU, in groups whose size is a multiple "
                f"of {WORD}, got {weight.kind} {weight.shape}"
            )
        self.outputs, self.inputs = weight.shape
        if isinstance(weight, BlockWeight):
            self._allocate_codes(native, self._of_blocks(weight.kind, weight.inputs, weight.blocks.shape[1]))
            self.write_blocks(0, weight.blocks)
        else:
            layer, source = self._of_scaled(weight)
            layer.rounds_rows = int8_activations
            self._allocate_codes(native, layer)
            self._pack(self._layer_at, ctypes.addressof(source), 0, self.outputs)
        self.set_bias(bias)

    @classmethod
    def of_blocks(cls, native: Native, kind: str, outputs: int, inputs: slice, row_bytes: int) -> "CodesLinear":
        """Make a layer without a bias over a ``BlockWeight`` whose rows are written by ``write_blocks``."""
        self = cls.__new__(cls)
        self.outputs, self.inputs = outputs, inputs.stop - inputs.start
        self._allocate_codes(native, self._of_blocks(kind, inputs, row_bytes))
        return self

    def write_blocks(self, first: int, rows: torch.Tensor) -> bool:
        """Pack rows of blocks as outputs from ``first`` on; return whether their scales are finite.

        Args:
            rows: uint8 ``[rows, bytes]``; rows may be strided.

        Raises:
            ValueError: the rows do not have this shape or dtype, or are not on the CPU.
        """
        if rows.dtype is not torch.uint8 or not rows.is_cpu or rows.dim() != 2 or rows.shape[1] != self._row_bytes:
            raise ValueError(f"rows: expected uint8 [rows, {self._row_bytes}], got {rows.dtype} {tuple(rows.shape)}")
        if first < 0 or first + len(rows) > self.outputs:
            raise ValueError(f"rows: {len(rows)} from {first} exceed the {self.outputs} outputs")
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        source = _Source(
            codes=rows.data_ptr(), row_bytes=rows.stride(0), kind=self._source_kind, inputs=self._codes.packed_inputs
        )
        return bool(self._pack(self._layer_at, ctypes.addressof(source), first, len(rows)))

    def set_bias(self, bias: torch.Tensor | None) -> None:
        self._bias = None if bias is None else bias.detach().to(torch.float32, copy=True).contiguous()
        self._codes.bias = None if self._bias is None else self._bias.data_ptr()

    def _allocate_codes(self, native: Native, layer: _Layer) -> None:
        """Allocate the packed weight, which the caller fills, and describe the layer to the library."""
        pointer, long, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        call = (pointer, pointer, integer, long, pointer, pointer, integer, integer)
        self._run = native.function("quire_codes_linear", *call)
        self._pack = native.function("quire_pack_codes", pointer, pointer, integer, integer, returns=integer)
        self._codes = layer
        self._codes.outputs, self._codes.inputs = self.outputs, self.inputs
        self._layer_at = ctypes.addressof(self._codes)
        size = native.function("quire_codes_bytes", pointer, returns=long)(self._layer_at)
        self._packed = allocate(size)
        self._codes.packed = self._packed.data_ptr()
        panels = -(-self.outputs // (2 * native.vector_floats))
        self._packed[size - size // panels :].zero_()  # outputs past the end
        rounded = native.function("quire_codes_row_bytes", pointer, integer, returns=long)
        self._rounded_bytes: tuple[int, int] = (rounded(self._layer_at, False), rounded(self._layer_at, True))

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Multiply rows, as ``PackedLinear`` does."""
        if x.dim() != 2 or x.shape[1] != self.inputs or not x.is_cpu:
            raise ValueError(f"x: expected [rows, {self.inputs}] on the CPU, got {tuple(x.shape)} on {x.device}")
        rows, dtype = x.shape[0], dtype or x.dtype
        if x.dtype not in (torch.float32, torch.bfloat16) or x.stride(1) != 1:
            x = x.to(torch.bfloat16 if x.dtype is torch.bfloat16 else torch.float32).contiguous()
        narrow, narrow_out = x.dtype is torch.bfloat16, dtype is torch.bfloat16
        out = empty((rows, self.outputs), torch.bfloat16 if narrow_out else torch.float32)
        memory = empty((rows * self._rounded_bytes[narrow],), torch.uint8)
        at = (self._layer_at, x.data_ptr(), narrow, x.stride(0), memory.data_ptr(), out.data_ptr())
        self._run(*at, narrow_out, rows)
        return out if out.dtype is dtype else out.to(dtype)

    def _of_scaled(self, weight: ScaledWeight) -> tuple[_Layer, _Source]:
        kind, groups = SCALED_KINDS[weight.kind], weight.scales.shape[1]
        size, packed_inputs = weight.group_size, -(-self.inputs // WORD) * WORD
        self._order = None if weight.input_groups is None else _order(weight.input_groups, groups)
        if self._order is not None:
            size, packed_inputs = len(self._order) // groups, len(self._order)
        if groups == 1:
            size = packed_inputs
        most = MOST_BLOCK // 2 if weight.kind == "int8" and weight.zeros is not None else MOST_BLOCK
        block = _block(size, packed_inputs, most)
        order = None if self._order is None else self._order.data_ptr()
        zeros, rows = weight.zeros, weight.row_scales
        layer = _Layer(
            order=order,
            packed_inputs=packed_inputs,
            kind=kind.codes,
            block=block,
            scale_kind=SCALES[weight.scales.dtype],
            offset=kind.offset if zeros is None else 0,
            has_zeros=zeros is not None,
            has_row_scales=rows is not None,
        )
        source = _Source(
            codes=weight.codes.data_ptr(),
            scales=weight.scales.data_ptr(),
            zeros=None if zeros is None else zeros.data_ptr(),
            row_scales=None if rows is None else rows.data_ptr(),
            order=order,
            row_bytes=weight.codes.stride(0),
            kind=kind.source,
            inputs=self.inputs,
            groups=groups,
            blocks_per_group=-(-size // block),
        )
        return layer, source

    def _of_blocks(self, kind: str, inputs: slice, row_bytes: int) -> _Layer:
        form = BLOCK_KINDS[kind]
        elements = 256 if form.scale == BYTES else form.block
        held = row_bytes // BLOCK_TYPES[kind][0] * elements
        self._source_kind, self._row_bytes, self._order = form.source, row_bytes, None
        if held != self.inputs:
            self._order = torch.arange(held, dtype=torch.int32).sub_(inputs.start)
            self._order[self._order >= self.inputs] = -1
            self._order.clamp_(min=-1)
        return _Layer(
            order=None if self._order is None else self._order.data_ptr(),
            packed_inputs=held,
            kind=form.codes,
            block=form.block,
            scale_kind=form.scale,
            offset=form.offset,
            has_mins=form.has_mins,
        )

    @staticmethod
    def takes(native: Native, weight: ScaledWeight | BlockWeight) -> bool:
        """Whether the library supports the weight."""
        outputs, inputs = weight.shape
        if not outputs or not inputs:
            return False
        if isinstance(weight, BlockWeight):
            return (
                weight.kind in BLOCK_KINDS
                and weight.blocks.is_cpu
                and weight.blocks.is_contiguous()
                and native.has_float16
            )
        if weight.kind not in SCALED_KINDS or weight.scales.dtype not in SCALES:
            return False
        if weight.scales.dtype is torch.float16 and not native.has_float16:
            return False
        groups = weight.scales.shape[-1]
        if weight.input_groups is not None:
            order = _order(weight.input_groups, groups) if weight.input_groups.is_cpu else torch.empty(0)
            if not inputs <= len(order) <= MOST_PADDING * inputs + groups * WORD:
                return False
        elif groups != -(-inputs // weight.group_size) or (groups > 1 and weight.group_size % WORD):
            return False
        expected: list[tuple[torch.Tensor, tuple[int, ...], torch.dtype]] = []
        expected.append((weight.codes, weight.codes.shape, CODE_DTYPES[weight.kind]))
        expected.append((weight.scales, (outputs, groups), weight.scales.dtype))
        if weight.zeros is not None:
            expected.append((weight.zeros, (outputs, groups), torch.int8))
        if weight.row_scales is not None:
            expected.append((weight.row_scales, (outputs,), torch.float32))
        return all(
            tensor.is_cpu and tensor.is_contiguous() and tensor.shape == shape and tensor.dtype is dtype
            for tensor, shape, dtype in expected
        )


def _block(size: int, packed_inputs: int, most: int) -> int:
    """Return the inputs of a block: those of a group, or a part of it. Only a layer's last block may be smaller."""
    if size == packed_inputs:
        return min(most, size)
    return next(part for part in range(min(most, size) // WORD * WORD, 0, -WORD) if size % part == 0)


def _order(input_groups: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the inputs in order of their group, each group padded with -1 to the size of the largest one."""
    counts = torch.bincount(input_groups, minlength=groups)
    size = -(-int(counts.max()) // WORD) * WORD
    order = torch.full((groups, size), -1, dtype=torch.int32)
    order[torch.arange(size) < counts[:, None]] = input_groups.argsort(stable=True).int()
    return order.flatten()
