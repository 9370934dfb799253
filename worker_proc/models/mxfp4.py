"""MXFP4 weights into floating ones, at load."""

import torch

BLOCK = 32
"""Numbers that share a scale."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
_PAIR_DTYPES = {torch.bfloat16: torch.int32, torch.float32: torch.int64}
"""An integer as wide as two numbers: both halves of a byte come by one look-up."""


def dequantise(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Open Compute Project, Microscaling Formats (MX) 1.0: E2M1 numbers that share an E8M0 scale.

    bfloat16 and float32 hold every such value exactly, but those below ``2**-126``; products by powers of two are exact
    in both, so that nothing wider is needed in between: gpt-oss's 19 billion experts' weights take a minute, not ten.

    Args:
        blocks: uint8 ``[rows, num_blocks, 16]``: two numbers in a byte, the lower four bits first.
        scales: uint8 ``[rows, num_blocks]``: exponents of two, from -127 on.

    Returns:
        ``[rows, num_blocks * 32]``.
    """
    exact = dtype if dtype in _PAIR_DTYPES else torch.float32
    device = blocks.device
    values = torch.tensor([*_MAGNITUDES, *(-v for v in _MAGNITUDES)], device=device).to(exact)
    byte = torch.arange(256, device=device)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), -1).view(_PAIR_DTYPES[exact]).view(-1)
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64, device=device), byte - _BIAS).to(exact)
    # ``index_select`` with 32-bit indices: ``pairs[...]`` takes three times as long.
    numbers = pairs.index_select(0, blocks.reshape(-1).int()).view(exact).view(-1, BLOCK)
    numbers.mul_(powers.index_select(0, scales.reshape(-1).int())[:, None])
    return numbers.view(*scales.shape[:-1], -1).to(dtype)
