"""The event log: everything that a Scheduler consumed, in the order it did, and the diffs it produced.

Order, not time, makes a live asynchronous run replayable exactly. Records keep the frames as they came over the wire,
so that recording a step costs one append; a ring of the newest is always kept.
"""

import enum
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from quire.protocol.channel import Frames
from quire.protocol.codec import Codec
from quire.protocol.config import EngineConfig
from quire.protocol.kv_layout import KVLayout
from quire.protocol.messages import (
    Consumed,
    SchedulerOutput,
)
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.keyframe import IdleState, decode_state, encode_state, idle_state, restore


class RecordKind(enum.IntEnum):
    """CONSUMED: the scheduler took a message. PRODUCED: ``schedule()`` gave a diff. TICK: it was asked and gave none.
    DROPPED: a front end went away. EPOCH: what ran began again. HALVED: steps have half as many tokens from here on.
    KEYFRAME: nobody lived, and this is what the Scheduler was like."""

    CONSUMED = 1
    PRODUCED = 2
    TICK = 3
    DROPPED = 4
    EPOCH = 5
    HALVED = 6
    KEYFRAME = 7


class Record(msgspec.Struct, array_like=True, frozen=True):
    kind: int
    now: float
    client: int = 0
    frames: list[bytes] = []


KEYFRAMES_PER_RING = 4
"""At most: one of these parts of the ring must have come since the last, and none is larger than such a part."""


class TraceHeader(msgspec.Struct, frozen=True):
    """What a replay needs to build the same Scheduler."""

    config: EngineConfig
    kv_layout: KVLayout
    num_blocks: int

    def make_scheduler(self, *, cruise: bool = True) -> Scheduler:
        return Scheduler(self.config, self.kv_layout, self.num_blocks, cruise=cruise)


class EventLog:
    """A ring of records, bounded in bytes. ``dropped`` counts what fell out at the old end.

    A ring that has dropped records cannot be replayed from its start, but from its oldest keyframe, if it has one:
    ``complete`` tells.
    """

    def __init__(self, max_bytes: int = 64 * 2**20) -> None:
        self._records: deque[Record] = deque()
        self._sizes: deque[int] = deque()
        self._appended = self._gone = self._at_keyframe = 0
        """Bytes: since the start, of these dropped, and as many as there were at the last keyframe."""
        self._max_bytes = max_bytes
        self.dropped = 0

    def consumed(self, now: float, client: int, frames: Frames) -> None:
        self._append(Record(RecordKind.CONSUMED, now, client, frames))  # type: ignore[arg-type]

    def produced(self, now: float, frames: Frames) -> None:
        self._append(Record(RecordKind.PRODUCED, now, 0, frames))  # type: ignore[arg-type]

    def tick(self, now: float) -> None:
        self._append(Record(RecordKind.TICK, now))

    def client_dropped(self, now: float, client: int) -> None:
        self._append(Record(RecordKind.DROPPED, now, client))

    def epoch_began(self, now: float) -> None:
        self._append(Record(RecordKind.EPOCH, now))

    def steps_halved(self, now: float) -> None:
        self._append(Record(RecordKind.HALVED, now))

    @property
    def wants_keyframe(self) -> bool:
        """Whether enough has come since the last one."""
        return (self._appended - self._at_keyframe) * KEYFRAMES_PER_RING >= self._max_bytes

    def keyframe(self, now: float, state: IdleState) -> None:
        """The Scheduler is idle, and like this. Of a pool so large that a few would fill the ring, nothing is kept."""
        data = encode_state(state)
        if len(data) * KEYFRAMES_PER_RING <= self._max_bytes:
            self._append(Record(RecordKind.KEYFRAME, now, 0, [data]))
        self._at_keyframe = self._appended

    @property
    def complete(self) -> bool:
        """Whether ``readable`` begins at the start of the run, or at a keyframe."""
        return self.dropped == 0 or any(record.kind == RecordKind.KEYFRAME for record in self._records)

    def readable(self) -> list[Record]:
        """From the first that a replay can begin at; all of them where there is none."""
        records = list(self._records)
        if self.dropped == 0:
            return records
        first = (at for at, record in enumerate(records) if record.kind == RecordKind.KEYFRAME)
        return records[next(first, 0) :]

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def _append(self, record: Record) -> None:
        size = 64 + sum(len(frame) for frame in record.frames)
        self._records.append(record)
        self._sizes.append(size)
        self._appended += size
        while self._appended - self._gone > self._max_bytes:
            self._records.popleft()
            self._gone += self._sizes.popleft()
            self.dropped += 1


class Difference(msgspec.Struct, frozen=True):
    """The first step whose decision was not the recorded one."""

    record: int
    step: int
    recorded: str
    decided: str


def replay(header: TraceHeader, records: Iterable[Record], *, check: bool = False) -> Difference | None:
    """Feed a fresh Scheduler what the recorded one consumed; None when every decision is the same.

    A first record that is a keyframe is where it begins; a later one must be what the Scheduler is like then.

    Args:
        check: call the Scheduler's ``check()`` after every record.
    """
    scheduler = header.make_scheduler()
    consumed: Codec[Any] = Codec(Consumed)
    produced: Codec[Any] = Codec(SchedulerOutput)
    for index, record in enumerate(records):
        difference = _replay_record(scheduler, record, index, consumed, produced)
        scheduler.take_messages()
        if difference is not None:
            return difference
        if check:
            scheduler.check()
    return None


def _replay_record(
    scheduler: Scheduler, record: Record, index: int, consumed: Codec[Any], produced: Codec[Any]
) -> Difference | None:
    match RecordKind(record.kind):
        case RecordKind.CONSUMED:
            scheduler.consume(consumed.decode(record.frames).message, record.client)
        case RecordKind.DROPPED:
            scheduler.drop_client(record.client)
        case RecordKind.EPOCH:
            scheduler.begin_epoch()
        case RecordKind.HALVED:
            scheduler.halve_steps()
        case RecordKind.KEYFRAME if index == 0:
            restore(scheduler, decode_state(record.frames[0]))
        case RecordKind.KEYFRAME:
            state = decode_state(record.frames[0])
            if idle_state(scheduler) != state:
                return Difference(index, state.step, "a keyframe", "another state")
        case RecordKind.TICK:
            decided = scheduler.schedule(record.now)
            if decided is not None:
                return Difference(index, decided.step, "nothing", describe(decided))
        case RecordKind.PRODUCED:
            recorded = produced.decode(record.frames).message
            decided = scheduler.schedule(record.now)
            told = "nothing" if decided is None else describe(decided)
            if told != describe(recorded):
                return Difference(index, recorded.step, describe(recorded), told)
    return None


def appended_blocks(diff: SchedulerOutput) -> Iterator[tuple[int, int, int]]:
    """(handle, group, block id) of each block given to a held request."""
    if diff.appended_handles is not None and diff.appended_block_ids is not None:
        groups = diff.appended_groups
        for i, (handle, block) in enumerate(zip(diff.appended_handles, diff.appended_block_ids, strict=True)):
            yield int(handle), 0 if groups is None else int(groups[i]), int(block)


def describe(diff: SchedulerOutput) -> str:
    """All of a decision but the tokens themselves, which an opaque replay does not know."""
    blocks = None if diff.block_ids is None else diff.block_ids.tolist()
    appended = list(appended_blocks(diff))
    new = [(n.handle, n.request_id, n.num_tokens, n.num_computed_tokens, n.num_blocks) for n in diff.new_requests]
    return (
        f"step {diff.step}: removed {diff.removed}, parked {diff.parked}, new {new} with blocks {blocks}, "
        f"unparked {diff.unparked}, appended {appended}, counts {diff.counts}, drafts {diff.drafts}, "
        f"awaits {diff.awaits_sample_inputs}"
    )
