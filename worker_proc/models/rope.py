"""Rotary position embedding: the table of cosines and sines, and its application."""

import math

import torch

from quire.protocol.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions, float32 ``[head_dim / 2]`` on the CPU.

    RoFormer (arXiv 2104.09864), section 3.2.2; *linear* is position interpolation (arXiv 2306.15595); *llama3* is
    the frequency-dependent stretch that Llama 3.1 ships in its ``config.json``: wavelengths beyond
    ``original_max_position / low_freq_factor`` are divided by ``factor``, those under
    ``original_max_position / high_freq_factor`` are kept, and between the two the share moves linearly.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_position * frequencies / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return (1 - kept) * frequencies / rope.factor + kept * frequencies
    return frequencies


def rope_table(rope: RopeConfig, head_dim: int, max_position: int, device: torch.device | str) -> torch.Tensor:
    """Cosines and signed sines of every position, float32 ``[2, max_position, head_dim]``.

    The sines of the first half are negated, so that ``rotate`` needs no negation of its own.
    """
    positions = torch.arange(max_position, dtype=torch.float32, device=device)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim).to(device))
    table = torch.empty(2, max_position, head_dim, dtype=torch.float32, device=device)
    cos, sin = angles.cos(), angles.sin()
    torch.cat((cos, cos), -1, out=table[0])
    torch.cat((-sin, sin), -1, out=table[1])
    return table


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate dimension ``i`` with dimension ``i + head_dim / 2`` by the position's angle.

    Args:
        x: ``[num_tokens, heads, head_dim]``, any strides.
        cos, sin: ``[num_tokens, 1, head_dim]`` rows of ``rope_table``, in ``x``'s dtype.
    """
    return x.roll(x.shape[-1] // 2, -1).mul_(sin).addcmul_(x, cos)
