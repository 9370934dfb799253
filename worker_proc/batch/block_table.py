"""Which blocks each row holds in one KV group: host truth, and the copy that kernels read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.model.kv_layout import NULL_BLOCK_ID
from quire.worker_proc.batch.input_batch import StepRefused

Ints = npt.NDArray[np.integer[Any]]

POISON_BLOCK_ID = -(2**31)
"""Past the rows' lengths, when a test asks for it: no kernel that reads there can go unnoticed."""

KNOWN = np.iinfo(np.int32).max
"""Where the part of a row begins that the device does not know: nowhere."""


class BlockTable:
    """One group's table: int32 ``[max_rows, max_blocks]``. Only entries below a row's length mean anything.

    Host truth and the device's copy are one tensor on a CPU. On a GPU they are two, and what changed is sent by
    ``MultiGroupBlockTable.commit``: of each row the entries from the first that the device does not know. A moved row
    is sent anew rather than copied on the device: runs are written in no order, so that a copy could read what
    another run of the same step has overwritten, and a row is a few KiB at most.

    Blocks may be larger where they are given out than where kernels read them: block ``b`` of ``block_size`` then is
    the kernel's blocks ``b * ratio`` up to ``b * ratio + ratio - 1``. Entries, and all names below that do not say
    otherwise, are the kernel's.

    Attributes:
        block_size: positions in a kernel's block, for which an entry stands.
        ratio: kernel's blocks in one that is given out.
        num_blocks_per_row: int32 ``[max_rows]``.
        device_copy: what kernels read.
    """

    def __init__(
        self,
        block_size: int,
        max_rows: int,
        max_model_len: int,
        num_blocks: int,
        device: torch.device,
        *,
        kernel_block_size: int | None = None,
        null_allowed: bool = False,
        own_copy: bool | None = None,
    ) -> None:
        """
        Args:
            block_size: positions in a block that the scheduler gives out.
            num_blocks: blocks in the pool, the null block included.
            kernel_block_size: that of the attention kernels; None: the same.
            null_allowed: whether the null block may stand for blocks that are read no more.
            own_copy: whether the device's copy is another tensor; None: as the device needs it.

        Raises:
            ValueError: block sizes that do not go together.
        """
        self.block_size = block_size if kernel_block_size is None else kernel_block_size
        if self.block_size < 1 or block_size % self.block_size:
            raise ValueError(f"blocks of {block_size} cannot be cut into blocks of {self.block_size}")
        self.ratio = block_size // self.block_size
        if num_blocks * self.ratio > 2**31:
            raise ValueError(f"{num_blocks} blocks of {self.ratio} need more than 32 bits")
        self._num_pool_blocks = num_blocks
        self._lowest_id = NULL_BLOCK_ID if null_allowed else NULL_BLOCK_ID + 1
        columns = -(-max_model_len // block_size) * self.ratio
        self._ids = np.full((max_rows, columns), NULL_BLOCK_ID, np.int32)
        self.num_blocks_per_row = np.zeros(max_rows, np.int32)
        host = torch.from_numpy(self._ids)
        self.has_own_copy = device.type != "cpu" if own_copy is None else own_copy
        self.device_copy = host.to(device, copy=True) if self.has_own_copy else host
        self._unknown_from = np.full(max_rows, KNOWN, np.int32)
        self._changed = False

    # ---- rows

    def append_row(self, row: int, block_ids: Sequence[int] | Ints) -> None:
        """Add blocks, as they are given out, at the end of a row: some that ``require_blocks`` lets pass."""
        ids = np.asarray(block_ids, np.int64)
        start = int(self.num_blocks_per_row[row])
        end = start + len(ids) * self.ratio
        self._ids[row, start:end] = ids if self.ratio == 1 else self._kernel_blocks(ids).ravel()
        self.num_blocks_per_row[row] = end
        self._stage(row, start)

    def append_rows(self, rows: Ints, block_ids: Ints) -> None:
        """``append_row`` for many rows at once: a block for each of ``rows``, in the order in which rows get theirs."""
        ids = np.asarray(block_ids, np.int64)
        columns = self.num_blocks_per_row[rows] + self.ratio * rank_among_equals(rows)
        self._ids[rows[:, None], columns[:, None] + np.arange(self.ratio)] = self._kernel_blocks(ids)
        np.minimum.at(self._unknown_from, rows, columns.astype(np.int32))
        np.maximum.at(self.num_blocks_per_row, rows, columns.astype(np.int32) + self.ratio)
        self._changed = True

    def require_blocks(self, block_ids: Sequence[int] | Ints) -> None:
        """Raises StepRefused: one is no block, as they are given out, that this table may hold."""
        ids = np.asarray(block_ids, np.int64)
        if len(ids) and not self._lowest_id <= ids.min() <= ids.max() < self._num_pool_blocks:
            raise StepRefused(f"a block id is not from {self._lowest_id} to {self._num_pool_blocks - 1}")

    def require_room(self, end: int) -> None:
        """Raises StepRefused: no row may have as many entries."""
        if end > self._ids.shape[1]:
            most = self._ids.shape[1] // self.ratio
            raise StepRefused(f"a request has {end // self.ratio} blocks, {most} are the most")

    def _kernel_blocks(self, block_ids: Ints) -> Ints:
        """``[len(block_ids), ratio]``"""
        return block_ids[:, None] * self.ratio + np.arange(self.ratio)

    def move_row(self, source: int, target: int) -> None:
        if source == target:
            return
        end = int(self.num_blocks_per_row[source])
        self._ids[target, :end] = self._ids[source, :end]
        self._ids[target, end : self.num_blocks_per_row[target]] = NULL_BLOCK_ID
        self.num_blocks_per_row[target] = end
        self._stage(target, 0)

    def clear_row(self, row: int) -> None:
        self._ids[row, : self.num_blocks_per_row[row]] = NULL_BLOCK_ID
        self.num_blocks_per_row[row] = 0

    def _stage(self, row: int, start: int) -> None:
        self._unknown_from[row] = min(self._unknown_from[row], start)
        self._changed = True

    def take_staged(self) -> tuple[Ints, npt.NDArray[np.int32]] | None:
        """What the device does not know yet, and is taken to know from now on; None: nothing.

        Returns:
            ``[num_runs, 3]``: row, first column, length; and the entries, one run behind the other.
        """
        if not self._changed:
            return None
        self._changed = False
        rows = np.flatnonzero(self._unknown_from < self.num_blocks_per_row)
        starts = self._unknown_from[rows].astype(np.int64)
        lengths = self.num_blocks_per_row[rows] - starts
        self._unknown_from[:] = KNOWN
        first = np.cumsum(lengths) - lengths
        columns = np.arange(lengths.sum()) + np.repeat(starts - first, lengths)
        return np.stack((rows, starts, lengths), 1), self._ids[np.repeat(rows, lengths), columns]

    # ---- reading

    def block_ids(self, row: int) -> Ints:
        """The blocks that a row holds, as they were given out."""
        return self._ids[row, : self.num_blocks_per_row[row] : self.ratio] // self.ratio

    def rows(self, rows: npt.NDArray[np.int64], max_seq_len: int) -> torch.Tensor:
        """``[len(rows), ceil(max_seq_len / block_size)]`` on the device, for a kernel."""
        table = self.device_copy[:, : -(-max_seq_len // self.block_size)]
        if len(rows) and rows[-1] == len(rows) - 1:  # rows ascend: all of the first ones
            return table[: len(rows)]
        return table[torch.from_numpy(rows).to(table.device)]

    def slots(self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where each token's KV goes: ``block_id * block_size + offset`` for (row, position) pairs.

        Raises:
            StepRefused: a position whose block the row does not hold, or for which it holds the null block.
        """
        index, offset = np.divmod(positions, self.block_size)
        if (index < 0).any() or (index >= self.num_blocks_per_row[rows]).any():
            raise StepRefused("a token has no block to be written to")
        blocks = self._ids[rows, index].astype(np.int64)
        if (blocks < self.ratio).any():  # the null block is the kernel's blocks 0 to ratio - 1
            raise StepRefused("a token has no block to be written to: its place holds the null block")
        return blocks * self.block_size + offset

    # ---- invariants

    def check(self) -> None:
        """Raise AssertionError unless the device's copy holds every row's entries as the host does. Waits for it."""
        assert not self._changed or not self.has_own_copy, "what changed is not committed"
        assert (self.num_blocks_per_row % self.ratio == 0).all(), "a block is held in part"
        held = np.arange(self._ids.shape[1]) < self.num_blocks_per_row[:, None]
        ids = self._ids[held]
        most = self._num_pool_blocks * self.ratio
        assert ((ids >= self._lowest_id * self.ratio) & (ids < most)).all(), "an entry is no block of the pool"
        assert np.isin(self._ids[~held], (NULL_BLOCK_ID, POISON_BLOCK_ID)).all(), "an id is left past a row's length"
        known = self.device_copy.cpu().numpy()
        assert (known[held] == ids).all(), "the device does not know what the host does"

    def poison(self) -> None:
        """Past every row's length put an id that is none, where kernels read: for tests. Lasts until rows change."""
        past = torch.from_numpy(np.arange(self._ids.shape[1]) >= self.num_blocks_per_row[:, None])
        self.device_copy[past.to(self.device_copy.device)] = POISON_BLOCK_ID


def rank_among_equals(values: Ints) -> Ints:
    """How many equal values stand before each: of ``[3, 5, 3, 3]``, ``[0, 0, 1, 2]``."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))) if len(values) else order
    ranks = np.empty(len(values), np.int64)
    ranks[order] = np.arange(len(values)) - np.repeat(starts, np.diff(np.append(starts, len(values))))
    return ranks
