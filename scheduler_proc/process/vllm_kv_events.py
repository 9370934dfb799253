"""Publishes KV cache events as vLLM 0.33 does: in the schema of its ``vllm/distributed/kv_events.py``, and by its
protocol for replays.

A batch is a MessagePack array and each event a map, whose key ``type`` has the name of the event. Values that equal
their defaults are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, assert_never

import msgspec
import zmq

from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent
from quire.scheduler_proc.kv.events import DescribingRecorder, Origin
from quire.scheduler_proc.process.kv_event_publisher import ANSWER_BATCHES, ANSWER_BYTES, KVEventPublisher

END_SEQUENCE = b"\xff" * 8
"""Sequence number -1 of the last message of a replay."""
HASH_MASK = 2**63 - 1
"""vLLM publishes the last 64 bits of a hash, as an integer. The first of them is 0 here, because some routers decode
them as signed numbers."""
MEDIA = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
VLLM_KINDS = {"latent_attention": "mla_attention", "chunked_local": "chunked_local_attention"}
"""vLLM's names of the kinds of KV groups that it names otherwise."""
MAX_ANSWERS = 64
"""Most replays at a time; further requests are dropped, and their peers request again."""


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


class VllmEncoder:
    """Turns the events of a step into a batch of vLLM."""

    def __init__(self, rank: int) -> None:
        """``rank``: number of this engine among those of the server."""
        self._rank = rank
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, now: float, events: Sequence[KVEvent], recorder: DescribingRecorder) -> bytes:
        """``now``: seconds since 1970. ``recorder``: has the origins of what ``events`` store."""
        translated = [each for event in events for each in _translate(event, recorder)]
        return self._encoder.encode(VllmBatch(now, translated, self._rank))


def _translate(event: KVEvent, recorder: DescribingRecorder) -> Iterator[VllmEvent]:
    match event:
        case BlocksStored():
            yield from _stored(event, recorder.layout, recorder.origins)
        case BlocksRemoved():
            yield RemovedBlocks([_number(name) for name in event.hashes], MEDIA[event.medium], event.group)
        case AllBlocksCleared():  # of one medium too: what another still has is then missing, which costs only hits
            yield ClearedBlocks()
        case _:
            assert_never(event)


class _Run(NamedTuple):
    """Blocks that follow each other in one prompt, and their origins; none if they are not known."""

    hashes: list[bytes]
    origins: list[Origin]


def _stored(
    event: BlocksStored, layout: KVLayout, origins: Mapping[tuple[bytes, int], Origin]
) -> Iterator[StoredBlocks]:
    """Name the tokens of blocks on the device; tiers hold what the device has had, as with vLLM's offloading."""
    group = layout.groups[event.group]
    found = origins if event.medium == "device" else {}
    for run in _runs(event, found):
        first = run.origins[0] if run.origins else Origin(None, [], None, ())
        lora_id, lora_name = first.label or (None, None)
        yield StoredBlocks(
            [_number(name) for name in run.hashes],
            None if first.parent is None else _number(first.parent),
            list(chain.from_iterable(origin.token_ids for origin in run.origins)),
            event.block_size if run.origins else 0,
            lora_id,
            MEDIA[event.medium],
            lora_name,
            _extra_keys(run.origins),
            event.group,
            VLLM_KINDS.get(group.kind, group.kind),
            group.sliding_window or None,
        )


def _runs(event: BlocksStored, origins: Mapping[tuple[bytes, int], Origin]) -> list[_Run]:
    runs: list[_Run] = []
    for name in event.hashes:
        origin, last = origins.get((name, event.group)), runs[-1] if runs else None
        if last is not None and origin is None and not last.origins:
            last.hashes.append(name)
        elif last is not None and origin is not None and last.origins and origin.parent == last.hashes[-1]:
            last.hashes.append(name)
            last.origins.append(origin)
        else:
            runs.append(_Run([name], [] if origin is None else [origin]))
    return runs


def _extra_keys(origins: Sequence[Origin]) -> list[tuple[str, ...] | None] | None:
    """Return for each block the name of its adapter, the digests of its images and, of a prompt's first block, the
    salts."""
    keys = [(*(() if o.label is None else (o.label[1],)), *o.covered, *o.salts) for o in origins]
    return [key or None for key in keys] if any(keys) else None


def _number(name: bytes) -> int:
    return int.from_bytes(name[-8:], "big") & HASH_MASK


class VllmPublisher(KVEventPublisher):
    """Answers a request with all batches that are kept, a part of them in a call, and then an end marker."""

    envelope = (b"",)

    def __init__(
        self, context: "zmq.Context[Any]", endpoint: str, replay_endpoint: str, topic: str, **options: Any
    ) -> None:
        """``options``: as of KVEventPublisher."""
        super().__init__(context, endpoint, replay_endpoint, 0, topic=topic.encode(), **options)
        self._answers: dict[bytes, int] = {}
        """The number of the next batch for each peer that waits for the rest of an answer."""

    @property
    def is_answering(self) -> bool:
        return bool(self._answers)

    def answer(self) -> None:
        """Take a request, if any, and continue one answer; peers take turns. One that does not read loses the rest."""
        if self._replay is None:
            return
        if (request := self._replay.receive()) is not None and len(self._answers) < MAX_ANSWERS:
            self._answers[request[0]] = request[1]
        if not self._answers:
            return
        peer = next(iter(self._answers))
        sequence, room = max(self._answers.pop(peer), self.oldest_sequence), ANSWER_BYTES
        end = min(sequence + ANSWER_BATCHES, self.next_sequence)
        while sequence < end and room > 0:
            payload = self._kept[sequence - self.oldest_sequence]
            if not self._replay.send(peer, [self._topic, sequence.to_bytes(8, "big"), payload]):
                return
            room -= len(payload)
            sequence += 1
        if sequence < self.next_sequence:
            self._answers[peer] = sequence  # after all others
        else:
            self._replay.send(peer, [b"", END_SEQUENCE, b""])
