"""A consumer of vLLM's KV cache events: the schema as vLLM publishes it, and the prefixes that a router knows.

Written from the schema of vLLM 0.33, and not from Quire's own types.
"""

from typing import Any

import msgspec


class Event(msgspec.Struct, tag=True):
    """An event is a map whose key ``type`` has the name of its class; fields that a consumer lacks are skipped."""


class BlockStored(Event):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(Event):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


Prefix = tuple[tuple[str, ...], tuple[int, ...]]
"""What keeps contents apart besides tokens, as the first block names it; and all tokens up to the end of a block."""


class Follower:
    """Knows the prefixes of each medium, of one KV group: by parents and tokens, never by what a hash covers."""

    def __init__(self) -> None:
        self.prefixes: dict[int | bytes, Prefix] = {}
        """Of every hash that had tokens since the last clear."""
        self.media: dict[str, set[int | bytes]] = {}

    def of(self, medium: str) -> set[int | bytes]:
        return self.media.setdefault(medium, set())

    def apply(self, payload: bytes) -> Batch:
        batch = msgspec.msgpack.decode(payload, type=Batch)
        for event in batch.events:
            match event:
                case BlockStored():
                    self._stored(event)
                case BlockRemoved():
                    assert event.medium is not None
                    self.of(event.medium).difference_update(event.block_hashes)
                case AllBlocksCleared():
                    self.media.clear()
        return batch

    def _stored(self, event: BlockStored) -> None:
        assert event.medium is not None
        self.of(event.medium).update(event.block_hashes)
        if not event.token_ids:
            return
        size, count = event.block_size, len(event.block_hashes)
        assert len(event.token_ids) == size * count
        first_keys = None if event.extra_keys is None else event.extra_keys[0]
        assert event.extra_keys is None or len(event.extra_keys) == count
        parent = event.parent_block_hash
        keys, tokens = (tuple(first_keys or ()), ()) if parent is None else self.prefixes[parent]
        for at, name in enumerate(event.block_hashes):
            tokens += tuple(event.token_ids[at * size : (at + 1) * size])
            self.prefixes[name] = keys, tokens
