"""Settings of latent attention (MLA), from ``config.json``."""

import msgspec

from quire.protocol.errors import ConfigError
from quire.protocol.model.config_fields import Fields


class LatentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Attention over one latent per token, from which each head's key and value are projected (arXiv 2405.04434, 2.1).

    Attributes:
        rank: numbers of a latent from which keys and values are projected.
        rope_dim: numbers beside them that are rotated, and are a part of every head's key.
        nope_dim: dimensions of a head's key that are projected from the latent.
        value_dim: dimensions of a head's value.
        query_rank: width between the two projections of queries; 0: they have one.
    """

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int = 0

    @property
    def width(self) -> int:
        """Numbers of a token in the KV cache, of one layer: the rotated ones, then the others."""
        return self.rope_dim + self.rank

    @property
    def key_dim(self) -> int:
        """Dimensions of a head's query and key."""
        return self.nope_dim + self.rope_dim


def parse_latent(field: Fields, heads: int) -> LatentConfig:
    """Return the settings; raise ConfigError if a field is missing or out of range."""
    latent = LatentConfig(
        rank=field.size("kv_lora_rank", high=4096),
        rope_dim=field.size("qk_rope_head_dim", low=2, high=1024),
        nope_dim=field.size("qk_nope_head_dim", high=1024),
        value_dim=field.size("v_head_dim", default=max(field.size("hidden_size") // heads, 1), high=1024),
        query_rank=field.size("q_lora_rank") if field.has("q_lora_rank") else 0,
    )
    if latent.rope_dim % 2:
        raise ConfigError(f"{field.where}: qk_rope_head_dim {latent.rope_dim} must be even")
    partial = field.part("rope_parameters").number("partial_rotary_factor", field.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ConfigError(
            f"{field.where}: partial_rotary_factor must be 1 with latent attention, which rotates qk_rope_head_dim "
            f"dimensions (got {partial})"
        )
    return latent
