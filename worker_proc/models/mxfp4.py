"""MXFP4 weights into floating ones, at load."""

import torch

BLOCK = 32
"""Numbers that share a scale."""

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def dequantise(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Open Compute Project, Microscaling Formats (MX) 1.0: E2M1 numbers that share an E8M0 scale.

    bfloat16 and float32 hold every such value exactly; float16 does not.

    Args:
        blocks: uint8 ``[rows, num_blocks, 16]``: two numbers in a byte, the lower four bits first.
        scales: uint8 ``[rows, num_blocks]``: exponents of two, from -127 on.

    Returns:
        ``[rows, num_blocks * 32]``.
    """
    values = torch.tensor([*_VALUES, *(-v for v in _VALUES)], dtype=torch.float32, device=blocks.device)
    # Both halves of a byte in one look-up.
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), -1)
    numbers = pairs[blocks.int()].flatten(-2)
    exponents = (scales.int() - _BIAS).unsqueeze(-1)
    return torch.ldexp(numbers, exponents).to(dtype).flatten(-2)
