"""Linear layers over codes with scales by the native library: a checked launcher of ``linear_scaled.cpp``."""

import ctypes
from dataclasses import replace

import torch

from quire.kernels.common.scaled_linear import round_to_int8
from quire.kernels.common.scaled_weight import CODE_BITS, CODE_DTYPES, ScaledWeight, pack_pairs
from quire.kernels.cpu.linear import PackedLinear
from quire.kernels.cpu.native import Native

# As in linear_scaled.h.
KINDS = {"int8": 0, "int4": 1, "fp8": 2, "fp4": 3}
SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}
STEP = 8
"""Inputs that are decoded at a time. Groups start there."""


class _ScaledLayer(ctypes.Structure):
    """``ScaledLayer`` of linear_scaled.h."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("group_size", ctypes.c_int32),
        ("scale_kind", ctypes.c_int32),
        ("has_zeros", ctypes.c_int32),
        ("has_row_scales", ctypes.c_int32),
    )


class PackedScaledLinear(PackedLinear):
    """A ``PackedLinear`` over a ``ScaledWeight``, whose codes, scales and zeros keep their bits.

    Groups that are not consecutive are packed in order of the group, and so is each ``x``.

    Args:
        weight: copied.
        bias: ``[outputs]`` or None.

    Raises:
        ValueError: the library does not support the weight (``takes`` is false).
    """

    def __init__(self, native: Native, weight: ScaledWeight, bias: torch.Tensor | None = None) -> None:
        if not self.takes(native, weight):
            raise ValueError(
                f"weight: expected contiguous codes on the CPU and groups of one size, a multiple of {STEP}, "
                f"got {weight.kind} {weight.shape} on {weight.codes.device} with group_size {weight.group_size}"
            )
        self._order: torch.Tensor | None = None
        if weight.input_groups is not None:
            self._order = weight.input_groups.argsort(stable=True).int()
            weight = _reordered(weight, self._order)
        pointer, long, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        self.outputs, self.inputs = weight.shape
        call = (pointer, pointer, long, pointer, integer, integer)
        self._run = native.function("quire_scaled_linear", *call)
        self._run_narrow = native.function("quire_scaled_linear_bf16", *call)
        self._bias = None if bias is None else bias.detach().to(torch.float32, copy=True).contiguous()
        codes, scales, zeros, rows = (
            None if tensor is None else tensor.data_ptr()
            for tensor in (weight.codes, weight.scales, weight.zeros, weight.row_scales)
        )
        self._scaled = _ScaledLayer(
            None,
            None if self._bias is None else self._bias.data_ptr(),
            self.outputs,
            self.inputs,
            KINDS[weight.kind],
            min(weight.group_size, self.inputs),
            SCALES[weight.scales.dtype],
            zeros is not None,
            rows is not None,
        )
        self._layer_at = ctypes.addressof(self._scaled)
        size = native.function("quire_scaled_bytes", pointer, returns=long)(self._layer_at)
        self._packed = torch.empty(size, dtype=torch.uint8)
        self._scaled.packed = self._packed.data_ptr()
        native.function("quire_pack_scaled", *[pointer] * 5)(self._layer_at, codes, scales, zeros, rows)
        self._takes_bfloat16 = bool(
            native.function("quire_scaled_takes_bf16", pointer, returns=integer)(self._layer_at)
        )

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        if self._order is not None and x.dim() == 2 and x.shape[1] == self.inputs:
            x = x.index_select(1, self._order)
        return super().__call__(x, dtype)

    @staticmethod
    def takes(native: Native, weight: ScaledWeight) -> bool:
        """Whether the library supports the weight. Only the last group may be smaller than the others."""
        outputs, inputs = weight.shape
        groups = -(-inputs // weight.group_size)
        whole = weight.group_size >= inputs or weight.group_size % STEP == 0
        if not (whole and outputs and inputs and weight.scales.dtype in SCALES):
            return False
        if weight.input_groups is not None:
            consecutive = torch.arange(inputs) // weight.group_size
            if not weight.input_groups.is_cpu or not torch.equal(weight.input_groups.sort()[0].long(), consecutive):
                return False
        if weight.scales.dtype is torch.float16 and not native.has_float16:
            return False
        if weight.zeros is not None and weight.kind not in ("int8", "int4"):
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


def _reordered(weight: ScaledWeight, order: torch.Tensor) -> ScaledWeight:
    """Return the weight with its inputs in this order, in which groups are consecutive."""
    octets = weight.codes.view(torch.uint8)
    if CODE_BITS[weight.kind] == 8:
        moved = octets.index_select(1, order)
    else:
        moved = pack_pairs(torch.stack((octets & 15, octets >> 4), -1).flatten(1).index_select(1, order))
    return replace(weight, codes=moved.view(weight.codes.dtype), input_groups=None)


def rounded_activations(packed: PackedScaledLinear, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Multiply rows that are rounded to int8, with a scale for each row, by a layer without a bias."""
    codes, factor = round_to_int8(x)
    out = packed(codes.bfloat16(), torch.float32).mul_(factor)  # exact: integers of 8 bits
    return (out if bias is None else out + bias).to(x.dtype)
