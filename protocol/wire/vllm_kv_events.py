"""The KV cache events of vLLM 0.33, for routers that follow vLLM: the schema of its ``vllm/distributed/kv_events.py``.

A batch is a MessagePack array and each event a map, whose key ``type`` has the name of the event. Values that equal
their defaults are left out.
"""

from typing import TypeAlias

import msgspec

from quire.protocol.errors import ConfigError

END_SEQUENCE = b"\xff" * 8
"""Sequence number -1 of the last message of a replay."""
HASH_MASK = 2**63 - 1
"""vLLM publishes the last 64 bits of a hash, as an integer. The first of them is 0 here, because some routers decode
them as signed numbers."""
MEDIA = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
MAX_TOPIC_BYTES = 512


class StoredBlocks(msgspec.Struct, frozen=True, omit_defaults=True, tag="BlockStored"):
    """These contents can now be found, one after the other in one prompt.

    Attributes:
        parent_block_hash: of the block before the first of them; None for the first of a prompt.
        token_ids: of all blocks, ``block_size`` each; empty for blocks whose tokens an earlier event has named.
        lora_id, lora_name: of the LoRA adapter; None without one.
        extra_keys: for each block what its hash covers besides tokens, or None.
        group_idx: KV group; ``kv_cache_spec_kind`` and ``kv_cache_spec_sliding_window`` are those of its layers.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class RemovedBlocks(msgspec.Struct, frozen=True, omit_defaults=True, tag="BlockRemoved"):
    """These contents can no longer be found in the medium."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class ClearedBlocks(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    """No medium has any content."""


VllmEvent: TypeAlias = StoredBlocks | RemovedBlocks | ClearedBlocks


class VllmBatch(msgspec.Struct, array_like=True, frozen=True):
    """Changes of one step, in order. ``ts``: seconds since 1970; ``data_parallel_rank``: number of the engine."""

    ts: float
    events: list[VllmEvent]
    data_parallel_rank: int


def check_topic(topic: str, kv_events_format: str) -> None:
    """Raises ConfigError if this format has no topic of its own, or if it is too long."""
    if topic and kv_events_format != "vllm":
        raise ConfigError(f"--kv-events-topic {topic[:64]!r} needs --kv-events-format vllm: quire's topic is kv")
    if len(topic.encode(errors="surrogatepass")) > MAX_TOPIC_BYTES:
        raise ConfigError(f"--kv-events-topic must have at most {MAX_TOPIC_BYTES} bytes (got {len(topic)} characters)")
