"""The event log: everything that a Scheduler consumed and the diffs that it produced, in order.

The order, not the time, makes an asynchronous run exactly replayable. Records keep the frames of the wire, so that
recording a step is one append. The newest records are kept in a ring.
"""

import enum
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.channel import Frames
from quire.scheduler_proc.costs.costs import CostState
from quire.scheduler_proc.kv.events import KVEventRecorder
from quire.scheduler_proc.requests.hooks import NO_HOOKS, SchedulerHooks
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.snapshot import take


class RecordKind(enum.IntEnum):
    """The kinds of records.

    * CONSUMED: the scheduler consumed a message.
    * PRODUCED: ``schedule()`` returned a diff.
    * TICK: ``schedule()`` returned None.
    * CLIENT_DROPPED: a front end disconnected.
    * WORKER_EPOCH: running requests restarted on the same workers.
    * BUDGET_HALVED: the token budget of steps was halved.
    * KEYFRAME: the state of the Scheduler.
    * NEW_WORKERS: running requests restarted on new workers.
    """

    CONSUMED = 1
    PRODUCED = 2
    TICK = 3
    CLIENT_DROPPED = 4
    WORKER_EPOCH = 5
    BUDGET_HALVED = 6
    KEYFRAME = 7
    NEW_WORKERS = 8


class Record(msgspec.Struct, array_like=True, frozen=True, gc=False):
    kind: int
    now: float
    client: int = 0
    frames: tuple[bytes, ...] = ()
    live: tuple[Any, ...] = ()
    """Objects to which a keyframe refers; not in the ring's bytes, because most of them are also the requests'."""


RECORD_BYTES = 88
FRAME_BYTES = 72
"""Bytes of memory that a record takes, and those of each frame beside its content."""


KEYFRAMES_PER_RING = 4
"""Most keyframes in the ring: each is at most 1/4 of it, and at least 1/4 is recorded between two."""
KEYFRAMES_UNDER_LOAD = 2
"""The same for those that delay a step: the oldest records that a dump cannot replay are less than half of the ring."""


class TraceHeader(msgspec.Struct, frozen=True):
    """The data from which a replay makes the same Scheduler."""

    config: EngineConfig
    kv_layout: KVLayout
    num_blocks: int
    num_host_pages: int = 0
    num_disk_pages: int = 0
    forgotten: int = 0
    costs: CostState = CostState()
    num_slots: int = 0

    def make_scheduler(
        self, *, steady_decode: bool = True, hooks: SchedulerHooks = NO_HOOKS, kv_events: KVEventRecorder | None = None
    ) -> Scheduler:
        return Scheduler(
            self.config,
            self.kv_layout,
            self.num_blocks,
            steady_decode=steady_decode,
            hooks=hooks,
            kv_events=kv_events,
            num_host_pages=self.num_host_pages,
            num_disk_pages=self.num_disk_pages,
            forgotten=self.forgotten,
            costs=self.costs,
            num_slots=self.num_slots,
        )


class EventLog:
    """A ring of records, bounded in bytes. ``dropped``: number of records removed at its old end.

    When records were dropped, a replay must start at the oldest keyframe; ``complete`` is false without one.
    """

    def __init__(self, max_bytes: int = 64 * 2**20) -> None:
        self._records: deque[Record] = deque()
        self._appended = self._dropped_bytes = self._at_keyframe = 0
        """Bytes appended since the start, bytes dropped, and bytes appended up to the last keyframe, or try of one."""
        self._max_bytes = max_bytes
        self.dropped = 0

    def consumed(self, now: float, client: int, frames: Frames) -> None:
        self._append(Record(RecordKind.CONSUMED, now, client, tuple([bytes(frame) for frame in frames])))

    def produced(self, now: float, frames: Frames) -> None:
        self._append(Record(RecordKind.PRODUCED, now, 0, tuple([bytes(frame) for frame in frames])))  # not their arrays

    def tick(self, now: float) -> None:
        self._append(Record(RecordKind.TICK, now))

    def client_dropped(self, now: float, client: int) -> None:
        self._append(Record(RecordKind.CLIENT_DROPPED, now, client))

    def worker_epoch_began(self, now: float, *, new_workers: bool = False) -> None:
        """Record that running requests restarted. ``new_workers``: the worker group was replaced."""
        self._append(Record(RecordKind.NEW_WORKERS if new_workers else RecordKind.WORKER_EPOCH, now))

    def token_budget_halved(self, now: float) -> None:
        self._append(Record(RecordKind.BUDGET_HALVED, now))

    def is_keyframe_due(self, *, idle: bool) -> bool:
        """Whether enough was recorded since the last keyframe. ``idle``: one would delay no step."""
        share = KEYFRAMES_PER_RING if idle else KEYFRAMES_UNDER_LOAD
        return (self._appended - self._at_keyframe) * share >= self._max_bytes

    def keyframe(self, now: float, scheduler: Scheduler) -> None:
        """Record the state of a Scheduler, unless it is so large that a few would fill the ring. O(blocks)."""
        state, live = take(scheduler)
        record = Record(RecordKind.KEYFRAME, now, 0, (msgspec.msgpack.encode(state),), tuple(live))
        if len(record.frames[0]) * KEYFRAMES_PER_RING <= self._max_bytes:
            self._append(record)
        # Also after one that was too large: the next try waits as long, because each costs a step its time.
        self._at_keyframe = self._appended

    @property
    def complete(self) -> bool:
        """Whether ``readable`` starts at the start of the run or at a keyframe."""
        return self.dropped == 0 or any(record.kind == RecordKind.KEYFRAME for record in self._records)

    def readable(self) -> list[Record]:
        """Return the records from the first at which a replay can start, or all records."""
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
        self._records.append(record)
        self._appended += _size(record)
        while self._appended - self._dropped_bytes > self._max_bytes:
            self._dropped_bytes += _size(self._records.popleft())
            self.dropped += 1


def _size(record: Record) -> int:
    frames = record.frames
    return RECORD_BYTES + FRAME_BYTES * len(frames) + sum(map(len, frames))
