"""Block table of one KV group: the blocks of each row on the host, and the device's copy that kernels read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.model.kv_layout import NULL_BLOCK_ID
from quire.worker_proc.batch.input_batch import StepRefused
from quire.worker_proc.device.transfer import Transfer

Ints = npt.NDArray[np.integer[Any]]

POISON_BLOCK_ID = -(2**31)
"""Written past the rows' lengths in tests, so that a kernel that reads there fails."""

NOTHING_UNSENT = np.iinfo(np.int32).max
"""First unsent column of a row without unsent entries."""


class BlockTable:
    """One group's table: int32 ``[max_rows, max_blocks]``. Entries past a row's length are undefined.

    On a CPU, the host's table and the device's copy are one tensor. On a GPU they are two, and
    ``MultiGroupBlockTable.commit`` sends the changes: of each row, the entries from the first unsent one on. A moved
    row is resent instead of being copied on the device: the order in which runs are written is undefined, so a copy
    could read entries that another run of the same step has overwritten. A row is a few KiB at most.

    The scheduler's blocks may be larger than the blocks of the attention kernels: the scheduler's block ``b`` is then
    the kernel blocks ``b * ratio`` to ``b * ratio + ratio - 1``. Table entries, and all names below unless noted, refer
    to kernel blocks.

    Attributes:
        block_size: positions per kernel block (per entry).
        ratio: kernel blocks per block of the scheduler.
        id_range: lowest and highest of the scheduler's block ids that an entry may have.
        max_blocks: the scheduler's blocks that a row can hold.
        num_blocks_per_row: int32 ``[max_rows]``: number of entries of each row.
        has_own_copy: whether ``device_copy`` is a separate tensor.
        device_copy: the tensor that kernels read.
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
            block_size: positions per block of the scheduler.
            num_blocks: number of blocks in the pool, including the null block.
            kernel_block_size: positions per block of the attention kernels; None: the same.
            null_allowed: whether entries may be the null block, for blocks that are no longer read.
            own_copy: whether the device's copy is a separate tensor; None: only if the device is not a CPU.

        Raises:
            ValueError: ``kernel_block_size`` does not divide ``block_size``, or block ids exceed 32 bits.
        """
        self.block_size = block_size if kernel_block_size is None else kernel_block_size
        if self.block_size < 1 or block_size % self.block_size:
            raise ValueError(f"block size {block_size} is not a multiple of the kernel block size {self.block_size}")
        self.ratio = block_size // self.block_size
        if num_blocks * self.ratio > 2**31:
            raise ValueError(f"{num_blocks} blocks of {self.ratio} kernel blocks need more than 32 bits")
        self.id_range = NULL_BLOCK_ID if null_allowed else NULL_BLOCK_ID + 1, num_blocks - 1
        self.max_blocks = -(-max_model_len // block_size)
        self._ids = np.full((max_rows, self.max_blocks * self.ratio), NULL_BLOCK_ID, np.int32)
        self.num_blocks_per_row = np.zeros(max_rows, np.int32)
        host = torch.from_numpy(self._ids)
        self.has_own_copy = device.type != "cpu" if own_copy is None else own_copy
        self.device_copy = host.to(device, copy=True) if self.has_own_copy else host
        self._unsent_from = np.full(max_rows, NOTHING_UNSENT, np.int32)
        self._changed = False

    # ---- rows

    def append_row(self, row: int, block_ids: Sequence[int] | Ints) -> None:
        """Append the scheduler's blocks, which ``DiffCheck`` has accepted, to a row."""
        ids = np.asarray(block_ids, np.int64)
        start = int(self.num_blocks_per_row[row])
        end = start + len(ids) * self.ratio
        self._ids[row, start:end] = ids if self.ratio == 1 else self._kernel_blocks(ids).ravel()
        self.num_blocks_per_row[row] = end
        self._stage(row, start)

    def append_rows(self, rows: Ints, block_ids: Ints) -> None:
        """Append one of the scheduler's blocks to each of ``rows``; a row may occur more than once."""
        ids = np.asarray(block_ids, np.int64)
        # A row may get several blocks in one step, each of which goes behind the one before it.
        columns = self.num_blocks_per_row[rows] + self.ratio * num_equal_before(rows)
        self._ids[rows[:, None], columns[:, None] + np.arange(self.ratio)] = self._kernel_blocks(ids)
        np.minimum.at(self._unsent_from, rows, columns.astype(np.int32))
        np.maximum.at(self.num_blocks_per_row, rows, columns.astype(np.int32) + self.ratio)
        self._changed = True

    def _kernel_blocks(self, block_ids: Ints) -> Ints:
        """Return the kernel blocks of each of the scheduler's blocks, ``[len(block_ids), ratio]``."""
        return block_ids[:, None] * self.ratio + np.arange(self.ratio)

    def move_row(self, source: int, target: int) -> None:
        if source == target:
            return
        end = int(self.num_blocks_per_row[source])
        self._ids[target, :end] = self._ids[source, :end]
        # What lies behind the new length must name no block: a kernel that reads one entry too far then reads the null
        # block and not another request's.
        self._ids[target, end : self.num_blocks_per_row[target]] = NULL_BLOCK_ID
        self.num_blocks_per_row[target] = end
        self._stage(target, 0)

    def clear_row(self, row: int) -> None:
        self._ids[row, : self.num_blocks_per_row[row]] = NULL_BLOCK_ID
        self.num_blocks_per_row[row] = 0

    def _stage(self, row: int, start: int) -> None:
        self._unsent_from[row] = min(self._unsent_from[row], start)
        self._changed = True

    def take_staged(self) -> tuple[Ints, npt.NDArray[np.int32]] | None:
        """Return the entries that were not sent to the device yet, and mark them as sent; None without changes.

        Returns:
            ``[num_runs, 3]``: row, first column, length; and the entries of all runs, concatenated.
        """
        if not self._changed:
            return None
        self._changed = False
        # Rows that were cleared since are left out: nothing reads them before they are filled again.
        rows = np.flatnonzero(self._unsent_from < self.num_blocks_per_row)
        starts = self._unsent_from[rows].astype(np.int64)
        lengths = self.num_blocks_per_row[rows] - starts
        self._unsent_from[:] = NOTHING_UNSENT
        first = np.cumsum(lengths) - lengths
        columns = np.arange(lengths.sum()) + np.repeat(starts - first, lengths)
        return np.stack((rows, starts, lengths), 1), self._ids[np.repeat(rows, lengths), columns]

    # ---- reading

    @property
    def host_ids(self) -> npt.NDArray[np.int32]:
        """The host's table, int32 ``[max_rows, max_blocks]``; must not be changed."""
        return self._ids

    def block_ids(self, row: int) -> Ints:
        """Return the scheduler's blocks that a row holds."""
        return self._ids[row, : self.num_blocks_per_row[row] : self.ratio] // self.ratio

    def rows(self, rows: npt.NDArray[np.int64], max_seq_len: int, transfer: Transfer) -> torch.Tensor:
        """Return the entries of ascending ``rows`` for a kernel: ``[len(rows), ceil(max_seq_len / block_size)]``.

        On a GPU the result has its content after ``transfer.send``.
        """
        table = self.device_copy[:, : -(-max_seq_len // self.block_size)]
        if len(rows) and rows[-1] == len(rows) - 1:  # rows 0 .. len(rows) - 1
            return table[: len(rows)]
        (index,) = transfer(rows)
        gathered = table.new_empty(len(rows), table.shape[1])
        transfer.then(lambda: torch.index_select(table, 0, index, out=gathered))
        return gathered

    def slots(self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the slot of each (row, position) pair: ``block_id * block_size + offset``.

        A step without changes passes ``DiffCheck`` unseen, so a row whose last block is full may lack the next one:
        that is found here. Such a block is never the null block, because ``DiffCheck`` accepts none where a row will
        write, and entries do not change once they are appended.

        Raises:
            StepRefused: the row has no block for a position.
        """
        index, offset = np.divmod(positions, self.block_size)
        if (index < 0).any() or (index >= self.num_blocks_per_row[rows]).any():
            at = int(np.argmax((index < 0) | (index >= self.num_blocks_per_row[rows])))
            num_blocks = int(self.num_blocks_per_row[rows[at]])
            raise StepRefused(f"row {rows[at]} has no block for position {positions[at]}: it has {num_blocks} blocks")
        return self._ids[rows, index].astype(np.int64) * self.block_size + offset

    def require_slots(self, rows: npt.NDArray[np.int64], starts: Ints, ends: Ints) -> None:
        """Check that row ``rows[i]`` has a block for each position from ``starts[i]`` to ``ends[i] - 1``.

        Raises:
            StepRefused: as in ``slots``.
        """
        first = starts // self.block_size
        counts = (ends - 1) // self.block_size - first + 1
        index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
        positions = np.maximum(np.repeat(starts, counts), index * self.block_size)
        self.slots(np.repeat(rows, counts), positions.astype(np.int64))

    # ---- invariants

    def check(self) -> None:
        """Raise AssertionError unless entries are valid and the device's copy is equal. Waits for the device."""
        assert not self._changed or not self.has_own_copy, "changes are not committed"
        assert (self.num_blocks_per_row % self.ratio == 0).all(), "a row holds part of a block"
        held = np.arange(self._ids.shape[1]) < self.num_blocks_per_row[:, None]
        ids = self._ids[held]
        lowest, highest = self.id_range
        of_pool = (ids >= lowest * self.ratio) & (ids < (highest + 1) * self.ratio)
        assert of_pool.all(), "an entry is not a block of the pool"
        assert np.isin(self._ids[~held], (NULL_BLOCK_ID, POISON_BLOCK_ID)).all(), "stale id past a row's length"
        copied = self.device_copy.cpu().numpy()
        assert (copied[held] == ids).all(), "the device's copy differs from the host's table"

    def poison(self) -> None:
        """For tests: write an invalid id past every row's length in the device's copy. Lasts until rows change."""
        past = torch.from_numpy(np.arange(self._ids.shape[1]) >= self.num_blocks_per_row[:, None])
        self.device_copy[past.to(self.device_copy.device)] = POISON_BLOCK_ID


def num_equal_before(values: Ints) -> Ints:
    """Return for each value the number of equal values before it: ``[0, 0, 1, 2]`` for ``[3, 5, 3, 3]``."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))) if len(values) else order
    found = np.empty(len(values), np.int64)
    found[order] = np.arange(len(values)) - np.repeat(starts, np.diff(np.append(starts, len(values))))
    return found
