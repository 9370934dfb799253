"""Settings of Llama 4's attention, from ``config.json``: chunks, norms without weights, and queries that are scaled."""

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.protocol.errors import ConfigError
from quire.protocol.model.config_fields import Fields
from quire.protocol.model.rope_config import RopeConfig

CHUNKED = "chunked_attention"


class QueryScale(msgspec.Struct, frozen=True, kw_only=True):
    """A factor on the queries of layers without rotary embedding, which grows with a token's position (arXiv
    2501.19399): ``1 + weight * log(1 + floor((position + 1) / interval))``.
    """

    interval: int
    weight: float


def parse_chunked(field: Fields, types: Sequence[str], rope: RopeConfig, max_position: int) -> dict[str, Any]:
    """Return fields of ``ModelConfig``. A chunk at least as long as the longest context counts as none.

    Args:
        types: the attention type of each layer.

    Raises:
        ConfigError: a field is of a wrong type or out of range, or the rope scales cosines and sines.
    """
    size = field.size("attention_chunk_size", high=2**31 - 1) if field.has("attention_chunk_size") else 0
    size = 0 if size >= max_position else size
    normalised = field.flag("use_qk_norm")
    if normalised and rope.attention_factor != 1.0:
        # The norm comes after the rotation, and would undo the factor. Without one, the two can change places.
        raise ConfigError(
            f"{field.where}: use_qk_norm is not supported with rope type {rope.kind}, which scales queries and keys: "
            f"it must be false, or the rope type default, linear or llama3"
        )
    tuned = field.raw.get("attn_temperature_tuning")
    tuned = field.flag("attn_temperature_tuning") if type(tuned) is not int else tuned > 0  # once 4 instead of true
    scale = QueryScale(interval=field.size("floor_scale", high=2**31 - 1), weight=field.number("attn_scale", 0.1))
    return {
        "chunks": [size if name == CHUNKED else 0 for name in types] if size and CHUNKED in types else [],
        "interleaved_rope": True,
        "qk_norm": "unit" if normalised else "",
        "query_scale": scale if tuned else None,
    }
