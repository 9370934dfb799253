"""Linear layers over float8 weights with scales by the native library: a checked launcher of ``fp8.cpp``."""

import ctypes

import torch

from quire.kernels.common.scaled_weight import ScaledWeight
from quire.kernels.cpu.linear.linear import PackedLinear
from quire.kernels.cpu.linear.weight_memory import allocate
from quire.kernels.cpu.native.library import Native

SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}
"""As in code_panels.h."""
STEP = 2
"""Groups start at a multiple of this: a bfloat16 panel has pairs of inputs, which must belong to one group."""


class _Layer(ctypes.Structure):
    """``Fp8Layer`` of fp8.cpp."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("group_size", ctypes.c_int32),
        ("scale_kind", ctypes.c_int32),
    )


class Fp8Linear(PackedLinear):
    """A ``PackedLinear`` over a ``ScaledWeight`` in fp8, whose codes and scales keep their bits.

    Args:
        weight: copied.
        bias: ``[outputs]`` or None.

    Raises:
        ValueError: the library does not support the weight (``takes`` is false).
    """

    def __init__(self, native: Native, weight: ScaledWeight, bias: torch.Tensor | None = None) -> None:
        if not self.takes(native, weight):
            raise ValueError(
                f"weight: expected contiguous fp8 codes on the CPU and groups of one size, a multiple of {STEP}, "
                f"got {weight.kind} {weight.shape} on {weight.codes.device} with group_size {weight.group_size}"
            )
        pointer, long, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        self.outputs, self.inputs = weight.shape
        call = (pointer, pointer, long, pointer, integer, integer)
        self._run = native.function("quire_fp8_linear", *call)
        self._run_narrow = native.function("quire_fp8_linear_bf16", *call)
        self._bias = None if bias is None else bias.detach().to(torch.float32, copy=True).contiguous()
        self._fp8 = _Layer(
            None,
            None if self._bias is None else self._bias.data_ptr(),
            self.outputs,
            self.inputs,
            min(weight.group_size, self.inputs),
            SCALES[weight.scales.dtype],
        )
        self._layer_at = ctypes.addressof(self._fp8)
        self._packed = allocate(native.function("quire_fp8_bytes", pointer, returns=long)(self._layer_at))
        self._fp8.packed = self._packed.data_ptr()
        pack = native.function("quire_pack_fp8", pointer, pointer, pointer)
        pack(self._layer_at, weight.codes.data_ptr(), weight.scales.data_ptr())
        takes_bfloat16 = native.function("quire_fp8_takes_bf16", pointer, returns=integer)
        self._takes_bfloat16 = bool(takes_bfloat16(self._layer_at))

    @staticmethod
    def takes(native: Native, weight: ScaledWeight) -> bool:
        """Whether the library supports the weight. Only the last group may be smaller than the others."""
        outputs, inputs = weight.shape
        groups = -(-inputs // weight.group_size)
        whole = weight.group_size >= inputs or weight.group_size % STEP == 0
        if weight.kind != "fp8" or not (whole and outputs and inputs and weight.scales.dtype in SCALES):
            return False
        if weight.scales.dtype is torch.float16 and not native.has_float16:
            return False
        if weight.input_groups is not None:
            consecutive = torch.arange(inputs) // weight.group_size
            if not weight.input_groups.is_cpu or not torch.equal(weight.input_groups.long(), consecutive):
                return False
        right = weight.scales.shape == (outputs, groups) and weight.codes.dtype is torch.float8_e4m3fn
        return right and all(part.is_cpu and part.is_contiguous() for part in (weight.codes, weight.scales))
