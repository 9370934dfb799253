"""MXFP4 (OCP Microscaling Formats 1.0), the format of gpt-oss's experts: 32 4-bit numbers with a common power of two.

A number is E2M1: a sign, two bits of exponent and one of mantissa. A byte holds two numbers, the first in its low half.
The scale is E8M0: ``2 ** (byte - 127)``, and 255 is NaN.
"""

import math

import torch

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7; the codes 8 to 15 are their negatives."""

GROUP_BYTES = 16
GROUP_SIZE = 2 * GROUP_BYTES

CHUNK_GROUPS = 1 << 14
"""Groups that are dequantised at a time, so that the temporary arrays (2 MiB) stay in a core's cache."""


def dequantise_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise MXFP4 in plain torch, fast enough for the weight loader.

    Args:
        blocks: uint8 ``[..., groups, 16]``.
        scales: uint8 ``[..., groups]``.
        dtype: float32 and bfloat16 represent the numbers exactly, except scales below 2**-126; float16 only those
            around 1.

    Returns:
        ``dtype`` ``[..., groups * 32]``.
    """
    table = _values_of_two_bytes(blocks.device)
    exponents = torch.arange(256, device=blocks.device) - 127
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64, device=blocks.device), exponents)
    powers[255] = torch.nan
    # bfloat16 has float32's exponent range; for float16 the product is computed in float32 and rounded.
    powers = powers.to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    out = torch.empty(*blocks.shape[:-2], blocks.shape[-2] * GROUP_SIZE, dtype=dtype, device=blocks.device)
    flat_codes, flat_scales = blocks.reshape(-1, GROUP_BYTES).view(torch.int16), scales.reshape(-1)
    flat_out = out.view(-1, GROUP_SIZE)
    for start in range(0, len(flat_scales), CHUNK_GROUPS):
        part = slice(start, start + CHUNK_GROUPS)
        index = flat_codes[part].flatten().int().add_(1 << 15)
        values = table.index_select(0, index).view(torch.bfloat16).view(-1, GROUP_SIZE)
        torch.mul(values, powers.index_select(0, flat_scales[part].int())[:, None], out=flat_out[part])
    return out


def largest_scale(dtype: torch.dtype) -> int:
    """Return the largest scale with which every number is finite in ``dtype``."""
    return math.floor(math.log2(torch.finfo(dtype).max / MAGNITUDES[-1])) + 127


def _values_of_two_bytes(device: torch.device) -> torch.Tensor:
    """Build a table, int64 ``[65536]``, from two bytes (as int16, plus 2**15) to their four numbers as exact bfloat16.

    One lookup decodes four numbers: about 1 GB/s of bfloat16 on a CPU core, five times as fast as one lookup each.
    """
    codes = torch.tensor(MAGNITUDES + tuple(-value for value in MAGNITUDES), dtype=torch.bfloat16, device=device)
    two_bytes = torch.arange(-(1 << 15), 1 << 15, device=device)
    return torch.stack([codes[(two_bytes >> shift) & 15] for shift in (0, 4, 8, 12)], -1).view(torch.int64)[:, 0]
