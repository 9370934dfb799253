"""Copies KV blocks to host memory and to disk, and back, beside the steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quire.kernels.cpu.native.library import Native
from quire.kernels.cpu.pages.page_moves import MAX_KEY_BYTES, BlockGroup, Int32, Moves, PageMoves
from quire.protocol.wire.transfer_messages import (
    BlocksMoved,
    DiskContents,
    DiskPages,
    HostPages,
    MoveBlocks,
    MoveKind,
)
from quire.worker_proc.batch.input_batch import StepRefused
from quire.worker_proc.side_work import Answers
from quire.worker_proc.transfers.disk import DiskFile
from quire.worker_proc.transfers.host import HostTier
from quire.worker_proc.transfers.pages import MapFailed, layout_hash, page_bytes_of
from quire.worker_proc.transfers.parts import CopyPart, Pending
from quire.worker_proc.transfers.state_parts import StateParts, num_ids


class BlockMover:
    """Owns the tiers of a rank, and the answers to MoveBlocks, whose pages it divides among the tiers.

    On a CPU a store waits for no step: the loop takes a MoveBlocks from its channel after all earlier steps have run,
    because ``ModelRunner.launch`` returns when the forward pass has written its keys and values. So a transfer may run
    beside later steps, which neither write the blocks of a store nor use those of a load.
    """

    def __init__(
        self,
        native: Native | None,
        groups: Sequence[BlockGroup],
        num_blocks: int,
        wake: Callable[[], None],
        *,
        check_tags: bool = True,
        parts: StateParts | None = None,
    ) -> None:
        """
        Args:
            num_blocks: size of the pool, the null block included.
            parts: those to which the last groups belong.
            wake: called in a thread whenever ``take_answers`` has more to return.
            check_tags: whether the tags of pages of host memory are compared.
        """
        self.page_bytes = page_bytes_of(groups)
        self._native = native
        self._copies = PageMoves(native, groups, check_tags=check_tags)
        self._layouts = [group.layout for group in groups]
        self._parts, self._num_ids = parts, num_ids(len(groups), num_blocks, parts)
        self._host: HostTier | str = "there is no host memory"
        self._disk: DiskFile | str = "there is no disk"
        self._host_ids, self._disk_ids = range(0), range(0)
        self._answers = Answers[BlocksMoved | DiskContents](wake)
        self.take_answers = self._answers.take

    def begin_worker_epoch(self) -> None:
        """Drop all transfers and the tiers of the previous scheduler."""
        self.end_transfers()
        self._answers.clear()

    close = begin_worker_epoch

    def end_transfers(self) -> None:
        """End all transfers, and wait for the pages that are being copied, but not long for the disk."""
        for tier in (self._disk, self._host):  # demotions read host memory
            if not isinstance(tier, str):
                tier.close()
        self._host, self._disk = "there is no host memory", "there is no disk"
        self._host_ids, self._disk_ids = range(0), range(0)

    @property
    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        return {HostPages: self.map, DiskPages: self.open, MoveBlocks: self.submit}

    def map(self, message: HostPages) -> None:
        """Map the host memory. If that fails, all transfers to and from it fail, but steps do not.

        Raises:
            StepRefused: the memory is already mapped, or its pages are of another size.
        """
        if self._host_ids or self._disk_ids:
            raise StepRefused("HostPages arrived a second time, or after DiskPages")
        self._accept(message)
        self._host_ids = range(1, message.num_pages)
        try:
            self._host = HostTier(message, self._copies)
        except MapFailed as error:
            # A worker without host memory still computes: every transfer fails with this reason, and after three of
            # them the scheduler stores nothing more.
            self._host = str(error)

    def open(self, message: DiskPages) -> None:
        """Use the file of pages on disk. If it cannot be opened, all transfers to and from it fail, but steps do not.

        Raises:
            StepRefused: the file is already open, its pages are of another size, or ids or keys out of range.
        """
        if self._disk_ids:
            raise StepRefused("DiskPages arrived a second time")
        self._accept(message)
        if message.first_page < self._host_ids.stop or not 0 < message.key_bytes <= MAX_KEY_BYTES:
            raise StepRefused(f"DiskPages from page {message.first_page} on with keys of {message.key_bytes} bytes")
        self._disk_ids = range(message.first_page + 1, message.first_page + message.num_pages)
        self._disk = DiskFile(message, self._native, self._copies, self._host)
        if message.read_contents:
            self._disk.read_contents(self._answers.add)

    def submit(self, message: MoveBlocks) -> None:
        """Queue a transfer.

        Raises:
            StepRefused: it arrived before the tiers that it needs, or its arrays have different lengths or ids out of
                range.
        """
        self.check(message, self._num_ids)
        message = message if self._parts is None else self._parts.resolve(message)
        moves, kind = _moves(message), message.kind
        # One load may take its pages from both tiers, which then run beside each other; the scheduler gets one answer.
        on_disk = moves.pages >= self._disk_ids.start if self._disk_ids else np.zeros(len(moves.pages), bool)
        pending = Pending(message.transfer, 2 - bool(on_disk.all() or not on_disk.any()), self._answers.add)
        tiers = ((self._host, 0, ~on_disk), (self._disk, self._disk_ids.start - 1, on_disk))
        for tier, first, which in tiers:
            if not which.any():
                continue
            indices, taken = np.flatnonzero(which).tolist(), moves.take(which)
            own = replace(taken, pages=taken.pages - np.int32(first))
            part = CopyPart(kind, own, taken.pages, indices, pending.ended, on_disk=tier is self._disk)
            if isinstance(tier, str):
                part.fail(range(len(indices)), tier)
                pending.ended(part)
            else:
                tier.submit(part)

    def _accept(self, message: HostPages | DiskPages) -> None:
        """Check the size of a tier's pages, and let their headers name the weights. No copy runs yet."""
        if message.page_bytes != self.page_bytes or message.num_pages < 2:
            raise StepRefused(
                f"{type(message).__name__} with {message.num_pages} pages of {message.page_bytes} bytes: a page of "
                f"this worker has {self.page_bytes}, and at least 2 are needed"
            )
        if message.weights:
            self._copies.set_layouts([layout_hash([layout, message.weights]) for layout in self._layouts])

    def check(self, message: MoveBlocks, num_ids: Sequence[int]) -> None:
        """Check a message for pools with ``num_ids`` blocks, by group.

        Raises:
            StepRefused: as ``submit``.
        """
        name = f"MoveBlocks {message.transfer}"
        if not self._host_ids and not self._disk_ids:
            raise StepRefused(f"{name} arrived before HostPages and DiskPages")
        count = len(message.block_ids)
        groups = _groups(message)
        arrays = (message.block_ids, message.page_ids, message.generations, groups)
        # Ids become addresses in the native code, so that all of them are checked here, where a wrong one is still an
        # error and not a crash.
        if any(len(array) != count for array in arrays) or not count:
            raise StepRefused(f"{name} has arrays of {', '.join(str(len(array)) for array in arrays)} numbers")
        if not 0 < len(message.keys) <= MAX_KEY_BYTES * count or len(message.keys) % count:
            raise StepRefused(f"{name} has {len(message.keys)} bytes of keys for {count} blocks")
        demotes = message.kind is MoveKind.DEMOTE
        sources = [self._host_ids] if demotes else [range(1, max(num_ids))]
        pages = [self._disk_ids] if demotes else [self._host_ids, self._disk_ids]
        for what, ids, allowed in (
            ("groups", groups, [range(len(num_ids))]),
            ("blocks", message.block_ids, sources),
            ("pages", message.page_ids, pages),
        ):
            inside = [(ids >= part.start) & (ids < part.stop) for part in allowed]
            if not np.logical_or.reduce(inside).all():
                ranges = " and ".join(f"{part.start} to {part.stop - 1}" for part in allowed if part)
                raise StepRefused(f"{name} has {what} {ids.min()} to {ids.max()}: allowed are {ranges or 'none'}")
            if what == "pages" and not message.is_load and not any(part.all() for part in inside):
                raise StepRefused(f"{name} stores to pages of several tiers")
        if not demotes and len(past := np.flatnonzero(message.block_ids >= np.array(num_ids)[groups])):
            group = int(groups[past[0]])
            raise StepRefused(
                f"{name} has block {message.block_ids[past[0]]} of group {group}: allowed are 1 to {num_ids[group] - 1}"
            )


def _groups(message: MoveBlocks) -> Int32:
    return np.zeros(len(message.block_ids), np.int32) if message.groups is None else message.groups


def _moves(message: MoveBlocks) -> Moves:
    return Moves(message.block_ids, message.page_ids, message.generations, _groups(message), message.keys)
