"""Rotary embeddings from ``config.json``, in the field names of transformers 4 and 5.

transformers 4 has ``rope_theta`` beside ``rope_scaling``, and ``rope_local_base_freq`` for Gemma 3's layers with a
sliding window; transformers 5 has ``rope_parameters``, flat or with one object per layer type.
"""

import math

import msgspec

from quire.protocol.errors import ConfigError, printable
from quire.protocol.model.config_fields import Fields

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_OTHER_NAMES = {"su": "longrope", "mrope": "default"}
"""Also the one for positions in time, height and width (``vision_config.py``), whose frequencies are the same."""
_HAVE_ORIGINAL_LENGTH = ("dynamic", "llama3", "yarn", "longrope")


class RopeConfig(msgspec.Struct, frozen=True):
    """One rotary embedding; ``worker_proc/attention/rope.py`` documents the use of the numbers.

    Attributes:
        kind: one of ``ROPE_KINDS``.
        original_max_position: positions of the training context before it was extended.
        partial_factor: fraction of each head's dimensions, counted from the first, that is rotated.
        attention_factor: factor on cosines and sines (yarn, longrope).
        beta_fast, beta_slow: rotations within the original length above which yarn keeps a frequency, and below which
            it interpolates; ``truncate`` rounds both bounds to whole dimensions.
        short_factor, long_factor: divisors of each frequency (longrope), ``[rotary_dim / 2]``.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    partial_factor: float = 1.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: list[float] = []
    long_factor: list[float] = []

    def rotary_dim(self, head_dim: int) -> int:
        return int(head_dim * self.partial_factor)


def parse_ropes(
    field: Fields, head_dim: int, local_head_dim: int, max_position: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the model's rotary embedding, and that of its layers with a sliding window if they have their own.

    Args:
        head_dim, local_head_dim: head dimensions of the other layers, and of those with a window. If they differ, so do
            the rotary embeddings.
    """
    alike = head_dim == local_head_dim
    new = field.raw.get("rope_parameters")
    if isinstance(new, dict) and ("full_attention" in new or "sliding_attention" in new):
        parts = Fields(new, field.where)
        whole = _rope(field, parts.part("full_attention"), head_dim, max_position)
        local = _rope(field, parts.part("sliding_attention"), local_head_dim, max_position)
        return whole, (None if local == whole and alike else local)
    name = "rope_parameters" if new is not None else "rope_scaling"
    whole = _rope(field, field.part(name), head_dim, max_position)
    if not field.has("rope_local_base_freq"):
        return whole, None if alike else whole
    local = RopeConfig(theta=field.number("rope_local_base_freq", 1.0))
    return whole, (None if local == whole and alike else local)


def _rope(field: Fields, inner: Fields, head_dim: int, max_position: int) -> RopeConfig:
    """Parse one object of settings (``inner``) and the fields beside it (``field``)."""
    raw = inner.raw
    kind = raw.get("rope_type") or raw.get("type") or "default"
    kind = _OTHER_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    if kind == "yarn" and "short_factor" in raw:
        kind = "longrope"  # the first Phi-3 checkpoints name it yarn
    if kind not in ROPE_KINDS:
        raise ConfigError(
            f"{field.where}: rope type {printable(kind)} is not supported; supported: {', '.join(ROPE_KINDS)}"
        )
    partial = inner.number("partial_rotary_factor", field.number("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * partial)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise ConfigError(
            f"{field.where}: partial_rotary_factor {partial} rotates {rotary_dim} of {head_dim} dimensions; "
            f"the number must be even, from 2 to {head_dim}"
        )
    rope = RopeConfig(
        theta=inner.number("rope_theta", field.number("rope_theta", 10000.0)),
        kind=kind,
        factor=inner.number("factor", 1.0),
        low_freq_factor=inner.number("low_freq_factor", 1.0),
        high_freq_factor=inner.number("high_freq_factor", 4.0),
        original_max_position=_original(field, inner, kind, max_position),
        partial_factor=partial,
    )
    if kind in ("yarn", "longrope"):
        return _stretched(rope, inner, rotary_dim, max_position)
    return rope


def _original(field: Fields, inner: Fields, kind: str, max_position: int) -> int:
    name = "original_max_position_embeddings"
    if kind not in _HAVE_ORIGINAL_LENGTH:
        return RopeConfig().original_max_position
    if kind == "dynamic":
        return max_position
    # Phi-3 has this field beside its rope settings, where it takes precedence.
    return (field if field.has(name) else inner).size(name, default=max_position, low=2, high=2**31 - 1)


def _stretched(rope: RopeConfig, inner: Fields, rotary_dim: int, max_position: int) -> RopeConfig:
    """Add the fields of yarn (arXiv 2309.00071, section 3.4) or longrope (arXiv 2402.13753); both also scale cosines
    and sines.
    """
    factor = inner.number("factor", max_position / rope.original_max_position)
    given = inner.optional_number("attention_factor")
    replace = msgspec.structs.replace
    if rope.kind == "longrope":
        grown = math.sqrt(1 + math.log(factor) / math.log(rope.original_max_position)) if factor > 1 else 1.0
        return replace(
            rope,
            factor=factor,
            attention_factor=given or grown,
            short_factor=inner.numbers("short_factor", rotary_dim // 2),
            long_factor=inner.numbers("long_factor", rotary_dim // 2),
        )
    if inner.raw.get("mscale") and inner.raw.get("mscale_all_dim"):
        derived = yarn_factor(factor, inner.number("mscale", 1.0)) / yarn_factor(
            factor, inner.number("mscale_all_dim", 1.0)
        )
    else:
        derived = yarn_factor(factor, 1.0)
    return replace(
        rope,
        factor=factor,
        attention_factor=given or derived,
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        truncate=inner.flag("truncate", True),
    )


def yarn_factor(factor: float, weight: float) -> float:
    """Return yarn's factor on cosines and sines, or on scores (arXiv 2309.00071, section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
