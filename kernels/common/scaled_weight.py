"""A weight matrix in low-precision codes with scales: the memory form of all quantised linear layers.

``weight[o, i] = (code[o, i] - zero[o, g]) * scale[o, g] * row_scale[o]``, with group ``g = i // group_size``, unless
``input_groups`` has the group of each input. Codes are one of four kinds:

* ``int8``: signed bytes. ``zero`` is 0 unless given.
* ``int4``: 0 to 15, two in a byte, the even input in the low half. ``zero`` is 8 unless given.
* ``fp8``: float8 e4m3, without zeros.
* ``fp4``: E2M1 as in ``mxfp4.py``, packed as ``int4``, without zeros.
"""

import functools
from dataclasses import dataclass

import torch

from quire.kernels.common.mxfp4 import MAGNITUDES

CODE_BITS = {"int8": 8, "int4": 4, "fp8": 8, "fp4": 4}
CODE_DTYPES = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn, "fp4": torch.uint8}
INT4_ZERO = 8
LARGEST_CODES = {"int8": 127, "int4": 7, "fp8": 448.0, "fp4": 6.0}
"""Largest magnitude that the codes of a kind have on both sides of zero."""


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """``[outputs, inputs]`` as codes with scales.

    Attributes:
        kind: int8, int4, fp8 or fp4.
        codes: ``[outputs, inputs]`` int8 or float8, or uint8 ``[outputs, inputs / 2]``; contiguous.
        scales: ``[outputs, groups]``, float32, bfloat16, float16 or float8; contiguous.
        group_size: inputs of a group. The last group may have fewer only if ``input_groups`` is given.
        zeros: int8 ``[outputs, groups]``, or None.
        row_scales: float32 ``[outputs]``, or None for 1.
        input_groups: int32 ``[inputs]``, or None for consecutive groups of ``group_size``.
    """

    kind: str
    codes: torch.Tensor
    scales: torch.Tensor
    group_size: int
    zeros: torch.Tensor | None = None
    row_scales: torch.Tensor | None = None
    input_groups: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        outputs, stored = self.codes.shape
        return outputs, stored * 8 // CODE_BITS[self.kind]

    def dequantise(self, rows: slice = slice(None)) -> torch.Tensor:
        """Return some rows of the weight, float32 ``[rows, inputs]``."""
        values = _code_values(self.codes[rows], self.kind)
        scales = self.scales[rows].float()
        if self.row_scales is not None:
            scales = scales * self.row_scales[rows, None]
        zeros = None if self.zeros is None else self.zeros[rows].float()
        if zeros is None and self.kind == "int4":
            values -= INT4_ZERO
        if self.input_groups is not None:
            if zeros is not None:
                values -= zeros.index_select(1, self.input_groups)
            return values.mul_(scales.index_select(1, self.input_groups))
        grouped = values.view(len(values), -1, self.group_size)
        if zeros is not None:
            grouped -= zeros[..., None]
        return grouped.mul_(scales[..., None]).view(values.shape)


def pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Pack four-bit codes: integers from 0 to 15 ``[..., inputs]`` → uint8 ``[..., inputs / 2]``."""
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_pairs(packed: torch.Tensor) -> torch.Tensor:
    """Undo ``pack_pairs``: uint8 ``[..., inputs / 2]`` → uint8 ``[..., inputs]``."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _code_values(codes: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the numbers that codes stand for, before zero and scale: new float32 ``[outputs, inputs]``."""
    if kind in ("int8", "fp8"):
        return codes.float()
    if kind == "int4":
        return unpack_pairs(codes).float()
    return _fp4_values(codes.device).index_select(0, unpack_pairs(codes).flatten().int()).view(len(codes), -1)


@functools.cache
def _fp4_values(device: torch.device) -> torch.Tensor:
    """Return the values of the 16 codes; made once per device, because captured graphs cannot copy from the host."""
    return torch.tensor(MAGNITUDES + tuple(-value for value in MAGNITUDES), device=device)
