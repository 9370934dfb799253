"""A weight matrix in low-precision codes with scales: the memory form of all quantised linear layers.

``weight[o, i] = (code[o, i] - zero[o, g]) * scale[o, g] * row_scale[o]``, with group ``g = i // group_size``, unless
``input_groups`` has the group of each input. Codes are one of four kinds:

* ``int8``: signed bytes. ``zero`` is 0 unless given.
* ``int4``: 0 to 15, two in a byte, the even input in the low half. ``zero`` is 8 unless given.
* ``fp8``: float8 e4m3, without zeros.
* ``fp4``: E2M1 as in ``mxfp4.py``, packed as ``int4``, without zeros.
"""

from dataclasses import dataclass

import torch

CODE_BITS = {"int8": 8, "int4": 4, "fp8": 8, "fp4": 4}
CODE_DTYPES = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn, "fp4": torch.uint8}
INT4_ZERO = 8
STEPS = {"fp8": 2.0**8, "fp4": 2.0**14}
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

    def dequantise(self, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """Return some rows of the weight, float32 ``[rows, inputs]``. ``rows``: a slice or int64 indices."""
        values = _code_values(self.codes[rows], self.kind)
        scales = self.scales[rows].to(torch.float32, copy=True)
        if self.kind in STEPS:
            scales *= STEPS[self.kind]
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


def _code_values(codes: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the numbers that codes stand for, before zero and scale: new float32 ``[outputs, inputs]``.

    Numbers of fp8 and fp4 are divided by ``STEPS``: their bits at the places of a float16's exponent and mantissa stand
    for that. It is exact, and takes a tenth of the time of torch's conversion of float8 on a CPU.
    """
    if kind == "int8":
        return codes.float()
    if kind == "fp8":
        bits = (codes.view(torch.int8).to(torch.int16) << 7) & ~0x4000
        return bits.view(torch.float16).float()
    values = torch.empty(len(codes), 2 * codes.shape[1], device=codes.device)
    for first, nibbles in enumerate((codes & 15, codes >> 4)):
        if kind == "fp4":
            wide = nibbles.to(torch.int16)
            nibbles = ((wide & 7) << 9 | (wide & 8) << 12).view(torch.float16)
        values[:, first::2] = nibbles
    return values
