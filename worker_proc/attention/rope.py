"""Rotary position embedding: the table of cosines and sines, and its application."""

import math
from collections.abc import Sequence

import torch

from quire.protocol.errors import ConfigError
from quire.protocol.model.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_position: int) -> torch.Tensor:
    """Return the angle per position of each pair of rotated dimensions, float32 ``[rotary_dim / 2]`` on the CPU.

    Source: RoFormer (arXiv 2104.09864), section 3.2.2. *linear* is position interpolation (arXiv 2306.15595). *llama3*
    is the frequency-dependent scaling in the ``config.json`` of Llama 3.1: frequencies with wavelengths over
    ``original_max_position / low_freq_factor`` are divided by ``factor``, those with wavelengths under
    ``original_max_position / high_freq_factor`` are kept, and the two are blended linearly in between.

    *longrope* has one set of divisors for short contexts and one for long ones. ``max_position``, the longest context
    that the engine serves, decides which one is used, not the length of a request: cached keys are rotated before the
    final length of their request is known.

    Args:
        max_position: number of positions that the engine serves.

    Raises:
        ConfigError: *dynamic* beyond the trained length, where frequencies would change as a request grows.
    """
    dim = rope.rotary_dim(head_dim)
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "dynamic" and max_position > rope.original_max_position:
        raise ConfigError(
            f"rope type dynamic serves up to max_position_embeddings ({rope.original_max_position}), "
            f"not {max_position} positions: beyond that, cached keys would have to be rotated again"
        )
    if rope.kind == "llama3":
        turns = rope.original_max_position * frequencies / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        return _blend(frequencies, rope.factor, kept.clamp(0.0, 1.0))
    if rope.kind == "yarn":
        return _blend(frequencies, rope.factor, _kept_by_yarn(rope, dim))
    if rope.kind == "longrope":
        divisors = rope.long_factor if max_position > rope.original_max_position else rope.short_factor
        return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * rope.theta**exponents)
    return frequencies


def _blend(frequencies: torch.Tensor, factor: float, kept: torch.Tensor) -> torch.Tensor:
    """Return the share ``kept`` of each frequency plus its remaining share divided by ``factor``."""
    return (1 - kept) * frequencies / factor + kept * frequencies


def _kept_by_yarn(rope: RopeConfig, dim: int) -> torch.Tensor:
    """Return the share of each frequency that yarn keeps (arXiv 2309.00071, section 3.2).

    The share is a ramp between the dimensions that turn ``beta_fast`` and ``beta_slow`` times within the original
    length.
    """

    def dimension(turns: float) -> float:
        return dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    return 1 - ramp.clamp(0.0, 1.0)


def rope_table(rope: RopeConfig, head_dim: int, max_position: int, device: torch.device | str) -> torch.Tensor:
    """Return cosines and signed sines of every position, float32 ``[2, max_position, rotary_dim]``.

    The first half of the sines is negated, so that ``rotate`` needs no negation. Cosines and sines include the
    attention factor of yarn and longrope.
    """
    frequencies = inverse_frequencies(rope, head_dim, max_position)
    table = torch.empty(2, max_position, 2 * len(frequencies), dtype=torch.float32, device=device)
    if table.is_meta:  # on meta tensors arange and outer would import torch's compiler, which takes seconds
        return table
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32, device=device), frequencies.to(device))
    cos, sin = angles.cos(), angles.sin()
    torch.cat((cos, cos), -1, out=table[0])
    torch.cat((-sin, sin), -1, out=table[1])
    return table if rope.attention_factor == 1.0 else table.mul_(rope.attention_factor)


def pair_axes(sections: Sequence[int], half: int, *, interleaved: bool) -> torch.Tensor:
    """Return whether each rotated dimension turns with time, height or width (0, 1, 2): int64 ``[2 * half]``.

    Source: M-RoPE, arXiv 2409.12191, section 2.1.

    Args:
        sections: number of pairs of dimensions of each kind.
        half: number of all pairs.
        interleaved: pairs of the three kinds take turns, as far as there are pairs in height and in width.
    """
    kinds = torch.zeros(half, dtype=torch.int64)
    if interleaved:
        for kind in (1, 2):
            kinds[kind : 3 * sections[kind] : 3] = kind
    else:
        kinds = torch.repeat_interleave(torch.arange(3), torch.tensor(list(sections)))
    return kinds.repeat(2)


def rows_in_space(table: torch.Tensor, positions: torch.Tensor, axes: torch.Tensor) -> torch.Tensor:
    """Return the rows of a table for tokens with positions in time, height and width: ``[2, num_tokens, rotary_dim]``.

    Args:
        positions: int64 ``[3, num_tokens]``.
        axes: as ``pair_axes`` returns them, on the device.
    """
    return table[:, positions].gather(1, axes.expand(2, 1, positions.shape[1], -1)).squeeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate dimension ``i`` with dimension ``i + rotary_dim / 2`` by the position's angle; keep the other dimensions.

    Args:
        x: ``[num_tokens, heads, head_dim]``, any strides.
        cos, sin: ``[num_tokens, 1, rotary_dim]`` rows of ``rope_table``, in ``x``'s dtype.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]), -1)
    return x.roll(rotary_dim // 2, -1).mul_(sin).addcmul_(x, cos)
