"""The event log: everything that a Scheduler consumed, in the order it did, and the diffs it produced.

Order, not time, makes a live asynchronous run replayable exactly. Records keep the frames as they came over the wire,
so that recording a step costs one append; a ring of the newest is always kept.
"""

import enum
from collections import deque
from collections.abc import Iterator

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.channel import Frames
from quire.scheduler_proc.core.hooks import NO_HOOKS, SchedulerHooks
from quire.scheduler_proc.core.scheduler import Scheduler
from quire.scheduler_proc.kv.events import KVEventRecorder
from quire.scheduler_proc.trace.keyframe import IdleState, encode_state


class RecordKind(enum.IntEnum):
    """CONSUMED: the scheduler took a message. PRODUCED: ``schedule()`` gave a diff. TICK: it was asked and gave none.
    DROPPED: a front end went away. EPOCH: what ran began again. HALVED: steps have half as many tokens from here on.
    KEYFRAME: nobody lived, and this is what the Scheduler was like. RESTARTED: as EPOCH, with other workers."""

    CONSUMED = 1
    PRODUCED = 2
    TICK = 3
    DROPPED = 4
    EPOCH = 5
    HALVED = 6
    KEYFRAME = 7
    RESTARTED = 8


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

    def make_scheduler(
        self, *, steady_decode: bool = True, hooks: SchedulerHooks = NO_HOOKS, kv_events: KVEventRecorder | None = None
    ) -> Scheduler:
        return Scheduler(
            self.config, self.kv_layout, self.num_blocks, steady_decode=steady_decode, hooks=hooks, kv_events=kv_events
        )


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

    def worker_epoch_began(self, now: float, *, new_workers: bool = False) -> None:
        """``new_workers``: with other workers."""
        self._append(Record(RecordKind.RESTARTED if new_workers else RecordKind.EPOCH, now))

    def steps_halved(self, now: float) -> None:
        self._append(Record(RecordKind.HALVED, now))

    @property
    def is_keyframe_due(self) -> bool:
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
