"""Moves KV blocks of a GPU to pages and back, through pinned memory of the host."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count, cycle
from threading import Condition, Thread
from typing import Any

import msgspec
import numpy as np

from quire.kernels.cpu.native.library import Native
from quire.kernels.cpu.pages.page_moves import Int32
from quire.protocol.wire.transfer_messages import (
    BlocksMoved,
    DiskContents,
    DiskPages,
    HostPages,
    MoveBlocks,
    MoveKind,
)
from quire.worker_proc.side_work import Answers
from quire.worker_proc.transfers.mover import BlockMover
from quire.worker_proc.transfers.parts import one_line
from quire.worker_proc.transfers.staging import BUFFERS, BlockCopier, DeviceBlocks, Staging
from quire.worker_proc.transfers.state_parts import StateParts, num_ids

Forward = Callable[[MoveBlocks], "Future[BlocksMoved]"]
"""Submits a message to the mover of pinned memory, under a number of its own."""


class StagedMover:
    """Moves blocks as ``BlockMover`` does, with the same methods, where the host cannot access them.

    Owns pinned memory, and a ``BlockMover`` whose pool it is: a block goes from the device to a slot of that pool, then
    from the slot to its page, or the reverse. Tiers, pages and tags are those of the inner mover. Each direction has a
    thread and two buffers of slots, so that the device and the host work on different ones; loads and stores of pages
    on disk have their own.

    A transfer begins after all steps that were launched before its message arrived: then a store reads what they have
    written, and no step reads or writes the blocks of a load. The threads wait for this, and never the loop.
    """

    def __init__(
        self,
        native: Native | None,
        blocks: DeviceBlocks,
        wake: Callable[[], None],
        *,
        check_tags: bool = True,
        with_disk: bool = False,
        parts: StateParts | None = None,
    ) -> None:
        """``wake``, ``check_tags``, ``parts``: as in ``BlockMover``; ``with_disk``: whether ``open`` may be called."""
        kinds = [
            (kind, on_disk) for on_disk in (False, True)[: 1 + with_disk] for kind in (MoveKind.LOAD, MoveKind.STORE)
        ]
        self._blocks, self._parts = blocks, parts
        self._num_ids = num_ids(len(blocks.layouts), blocks.num_blocks, parts)
        self._staging = Staging(blocks, BUFFERS * len(kinds))
        slots = self._staging.num_slots
        self._inner = BlockMover(native, self._staging.groups, slots, self._woken, check_tags=check_tags)
        self.page_bytes = self._inner.page_bytes
        self._lanes = {
            kind: _Lane(
                blocks.copier(self._staging.buffer_bytes),
                self._staging,
                range(BUFFERS * index, BUFFERS * (index + 1)),
                self._forward,
            )
            for index, kind in enumerate(kinds)
        }
        self._first_on_disk: int | None = None
        self._numbers = count(1)
        self._forwarded: dict[int, Future[BlocksMoved]] = {}
        self._answers = Answers[BlocksMoved | DiskContents](wake)
        self.take_answers = self._answers.take

    def begin_worker_epoch(self) -> None:
        """As in ``BlockMover``. Lanes wait for the inner mover, which ends all that they wait for."""
        for lane in self._lanes.values():
            lane.stop()
        self._inner.end_transfers()
        for lane in self._lanes.values():
            lane.join()
        self._inner.begin_worker_epoch()
        self._first_on_disk = None
        self._forwarded = {}
        self._answers.clear()

    close = begin_worker_epoch

    @property
    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        return {HostPages: self.map, DiskPages: self.open, MoveBlocks: self.submit}

    def map(self, message: HostPages) -> None:
        """As in ``BlockMover``."""
        self._inner.map(message)

    def open(self, message: DiskPages) -> None:
        """As in ``BlockMover``."""
        self._inner.open(message)
        self._first_on_disk = message.first_page

    def submit(self, message: MoveBlocks) -> None:
        """As in ``BlockMover``; call it when all steps before the message have been launched."""
        self._inner.check(message, self._num_ids)
        message = message if self._parts is None else self._parts.resolve(message)
        if message.kind is MoveKind.DEMOTE:
            self._forward(message).add_done_callback(lambda moved: self._ended(message, moved.result()))
            return
        on_disk = self._first_on_disk is not None and bool((message.page_ids >= self._first_on_disk).any())
        self._lanes[message.kind, on_disk].submit(_Job(message, self._blocks.steps(), self._ended))

    def _ended(self, message: MoveBlocks, moved: BlocksMoved) -> None:
        self._answers.add(msgspec.structs.replace(moved, transfer=message.transfer))

    # ---- the inner mover

    def _forward(self, message: MoveBlocks) -> "Future[BlocksMoved]":
        number, moved = next(self._numbers), Future[BlocksMoved]()
        self._forwarded[number] = moved  # before the message is submitted: its answer may be there at once
        self._inner.submit(msgspec.structs.replace(message, transfer=number))
        return moved

    def _woken(self) -> None:
        """Take the answers of the inner mover; called in its threads."""
        for answer in self._inner.take_answers():
            if isinstance(answer, BlocksMoved):
                self._forwarded.pop(answer.transfer).set_result(answer)
            else:
                self._answers.add(answer)


@dataclass(slots=True)
class _Job:
    """A message in a queue, and what has become of its blocks.

    Attributes:
        wait_for_steps: waits until the steps have run that were launched before the message arrived.
        failures: reason for each block that failed, by its index.
        waited: seconds for which its thread waited for steps.
    """

    message: MoveBlocks
    wait_for_steps: Callable[[], None]
    ended: Callable[[MoveBlocks, BlocksMoved], None]
    failures: dict[int, str] = field(default_factory=dict)
    waited: float = 0.0
    disk_seconds: float = 0.0

    def wait(self) -> None:
        began = time.perf_counter()
        self.wait_for_steps()
        self.waited += time.perf_counter() - began


@dataclass(slots=True)
class _Piece:
    """Blocks of one group, at ``indices`` of the message, and a slot of one buffer for each."""

    group: int
    indices: Int32
    slots: range
    moved: "Future[BlocksMoved]" = field(default_factory=Future)


class _Lane:
    """Owns the queue of one kind of transfers, their thread, a copier and its buffers."""

    def __init__(self, copier: BlockCopier, staging: Staging, buffers: Sequence[int], forward: Forward) -> None:
        self._copier, self._staging, self._buffers, self._forward = copier, staging, buffers, forward
        # The condition guards everything below.
        self._changed = Condition()
        self._jobs: deque[_Job] = deque()
        self._closing = False
        self._thread: Thread | None = None

    def submit(self, job: _Job) -> None:
        with self._changed:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="device mover", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def stop(self) -> None:
        """Drop the jobs in the queue, and begin no more pieces."""
        with self._changed:
            self._closing = True
            self._jobs.clear()
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the pieces that are being copied. ``submit`` may be called again."""
        if self._thread is not None:
            self._thread.join()
        self._thread, self._closing = None, False

    # ---- the thread

    def _run(self) -> None:
        while (job := self._next()) is not None:
            began = time.perf_counter()
            self._move(job)
            seconds = time.perf_counter() - began - job.waited
            failed = sorted(job.failures)
            reason = job.failures[failed[0]] if failed else ""
            moved = BlocksMoved(0, failed, seconds, reason, min(job.disk_seconds, seconds))
            job.ended(job.message, moved)

    def _next(self) -> _Job | None:
        """Wait for a job, and return it; None when closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._jobs)
            return None if self._closing else self._jobs.popleft()

    def _move(self, job: _Job) -> None:
        """Copy all pieces. The device copies one while the inner mover copies the piece before or after it."""
        flying: deque[_Piece] = deque()
        for piece in self._pieces(job.message):
            if self._closing:
                break
            if len(flying) == BUFFERS:
                self._try(self._end, job, flying.popleft())
            if self._try(self._begin, job, piece):
                flying.append(piece)
        for piece in flying:
            self._try(self._end, job, piece)

    def _pieces(self, message: MoveBlocks) -> Iterator[_Piece]:
        groups = _groups(message)
        buffers = cycle(self._buffers)
        for group in np.unique(groups).tolist():
            left = np.flatnonzero(groups == group).astype(np.int32)
            while len(left):
                slots = self._staging.slots(next(buffers), group)[: len(left)]
                yield _Piece(group, left[: len(slots)], slots)
                left = left[len(slots) :]

    def _try(self, copy: Callable[[_Job, _Piece], None], job: _Job, piece: _Piece) -> bool:
        """Return whether there was no error: otherwise the blocks of the piece have failed."""
        try:
            copy(job, piece)
        except Exception as error:  # an answer in any case: the scheduler keeps the blocks until it has one
            job.failures |= dict.fromkeys(piece.indices.tolist(), one_line(error))
            return False
        return True

    def _begin(self, job: _Job, piece: _Piece) -> None:
        """Bring the piece to the slots if it is stored, and submit it to the inner mover."""
        message, chosen = job.message, piece.indices
        if not message.is_load:
            job.wait()
            ids = message.block_ids[chosen].astype(np.int64)
            self._copier.store(piece.group, ids, self._staging.lines(piece.group, piece.slots))
        keys = np.frombuffer(message.keys, np.uint8).reshape(len(message.block_ids), -1)
        piece.moved = self._forward(
            MoveBlocks(
                message.transfer,
                message.kind,
                np.array(piece.slots, np.int32),
                message.page_ids[chosen],
                message.generations[chosen],
                keys[chosen].tobytes(),
                np.full(len(chosen), piece.group, np.int32),
            )
        )

    def _end(self, job: _Job, piece: _Piece) -> None:
        """Wait for the inner mover, and bring the blocks whose pages are good to the device if they are loaded."""
        moved = piece.moved.result()
        ids = job.message.block_ids[piece.indices].astype(np.int64)
        job.disk_seconds += moved.disk_seconds
        if moved.failed:
            first = moved.failed[0]
            slot, block = (f"for block {number}: " for number in (piece.slots[first], ids[first]))
            reason = moved.reason.replace(slot, block, 1)
            job.failures |= dict.fromkeys(piece.indices[moved.failed].tolist(), reason)
            ids[moved.failed] = -1
        if job.message.is_load and (ids >= 0).any():
            job.wait()
            self._copier.load(piece.group, ids, self._staging.lines(piece.group, piece.slots))


def _groups(message: MoveBlocks) -> Int32:
    return np.zeros(len(message.block_ids), np.int32) if message.groups is None else message.groups
