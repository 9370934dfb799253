"""Block tables of all KV groups: changed together, and sent to the device in one launch."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.cache.pointer_table import TableSet
from quire.kernels.cache.staged_write import pack_runs, write_runs, write_runs_reference
from quire.protocol.model.kv_layout import KVGroup
from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.worker_proc.batch.block_table import BlockTable, Ints, num_equal_before
from quire.worker_proc.batch.slot_owners import SlotOwners
from quire.worker_proc.device.transfer import Transfer


class MultiGroupBlockTable:
    """One BlockTable per KV group, changed together and committed in one launch; a ``RowStore``.

    Attributes:
        table_set: all device copies, as ``slot_mapping`` and ``prepare_decode`` take them.
        version: changes whenever rows are added, moved or cleared.
    """

    def __init__(
        self, tables: Sequence[BlockTable], owners: SlotOwners | None = None, transfer: Transfer | None = None
    ) -> None:
        """
        Args:
            owners: the row that writes to each block; None: not tracked.
            transfer: sends changes to the device; None: one of its own.
        """
        self.tables = list(tables)
        self._owners = owners
        self.version = 0
        none = TableSet((), (), torch.empty(0, dtype=torch.int64))  # of a model without KV groups
        sizes = [table.block_size for table in tables]
        self.table_set = TableSet.of([table.device_copy for table in tables], sizes) if tables else none
        self._transfer = transfer or Transfer(self.table_set.device)

    def add_row(self, row: int, block_ids: Sequence[Sequence[int] | Ints]) -> None:
        """Set a row's blocks, per group. The row's ``num_computed`` must already be set."""
        self.clear_row(row)
        for group, (table, ids) in enumerate(zip(self.tables, block_ids, strict=True)):
            table.append_row(row, ids)
            if self._owners is not None:
                self._owners.add_blocks(row, group, table.block_ids(row))

    def add_new(self, step: SchedulerOutput, rows: Sequence[int]) -> None:
        """Set the blocks of the step's new requests, which are in ``rows``."""
        if not self.tables:
            return
        start = 0
        for request, row in zip(step.new_requests, rows, strict=True):
            assert step.block_ids is not None
            ends = start + np.cumsum(request.num_blocks)
            self.add_row(row, np.split(step.block_ids[start : ends[-1]], ends[:-1] - start))
            start = int(ends[-1])

    def append_to_held(self, step: SchedulerOutput, row: Callable[[int], int]) -> None:
        """Append the step's blocks to the rows of held requests. ``row``: returns the row of a handle."""
        handles, ids = step.appended_handles, step.appended_block_ids
        if handles is None or ids is None:
            return
        groups = np.zeros_like(handles) if step.appended_groups is None else step.appended_groups
        self.append_rows(np.array([row(handle) for handle in handles.tolist()], np.int64), groups, ids)

    def append_rows(self, rows: Ints, groups: Ints, block_ids: Ints) -> None:
        """Append one block to each of ``rows``; a row that occurs more than once gets its blocks in this order."""
        for group in np.unique(groups).tolist():
            table = self.tables[group]
            own = groups == group
            own_rows, ids = (rows, block_ids) if own.all() else (rows[own], block_ids[own])
            held = table.num_blocks_per_row[own_rows] // table.ratio
            table.append_rows(own_rows, ids)
            if self._owners is not None:
                self._owners.claim(own_rows, group, held + num_equal_before(own_rows), ids)

    def require_free(self, block_ids: Ints, leaving: Sequence[int]) -> None:
        """Check that blocks may be written; changes nothing.

        Args:
            block_ids: all blocks that a step assigns for writing, in any group, without the null block.
            leaving: rows that the step removes.

        Raises:
            StepRefused: slot overlap: a block occurs twice, or a row that stays writes or reads it.
        """
        if self._owners is not None and len(block_ids):
            self._owners.require_free(block_ids, leaving)

    def require_copies(self, copies: Sequence[tuple[int, int]], leaving: Sequence[int]) -> None:
        """Raise StepRefused unless blocks of these ids may be copied, each from the first to the second.

        Args:
            leaving: rows that the step removes.
        """
        if self._owners is not None:
            self._owners.require_copies(copies, leaving)

    def move_row(self, source: int, target: int) -> None:
        self.version += 1
        for table in self.tables:
            table.move_row(source, target)
        if self._owners is not None:
            self._owners.move_row(source, target)

    def clear_row(self, row: int) -> None:
        self.version += 1
        for table in self.tables:
            table.clear_row(row)
        if self._owners is not None:
            self._owners.clear_row(row)

    def commit(self) -> None:
        """Update the device's copies after all changes of a step.

        Needs one small copy and one launch for all groups, or nothing if there are no changes.
        """
        if self._owners is not None:
            self._owners.end_step()
        headers, values = [], []
        for group, table in enumerate(self.tables):
            staged = table.take_staged() if table.has_own_copy else None
            if staged is not None and len(staged[0]):
                runs, ids = staged
                headers.append(np.insert(runs, 0, group, axis=1))
                values.append(ids)
        if not headers:
            return
        all_headers, all_values = np.concatenate(headers), np.concatenate(values)
        (sent,) = self._transfer(pack_runs(all_headers, all_values))
        write = write_runs if self.table_set.device.type == "cuda" else write_runs_reference
        self._transfer.then(partial(write, sent, len(all_headers), self.table_set))

    def check(self) -> None:
        """Raise AssertionError unless every table's ``check`` holds and no two rows write to one block."""
        for table in self.tables:
            table.check()
        if self._owners is not None and self.tables:
            max_rows = len(self.tables[0].num_blocks_per_row)
            self._owners.check([[table.block_ids(row) for table in self.tables] for row in range(max_rows)])

    def poison(self) -> None:
        for table in self.tables:
            table.poison()


def make_block_tables(
    groups: Sequence[KVGroup],
    num_blocks: int,
    max_model_len: int,
    num_computed: npt.NDArray[np.int32],
    device: torch.device,
    kernel_block_sizes: Sequence[int] | None = None,
    transfer: Transfer | None = None,
) -> MultiGroupBlockTable:
    """Make the block tables of a layout's groups, with the check that no two rows write the same slot.

    Args:
        num_blocks: number of blocks in the pool that all groups share, including the null block.
        num_computed: the batch's column, int32 ``[max_rows]``.
        kernel_block_sizes: positions per block of the attention kernels, per group; None: those of the groups.
        transfer: as in ``MultiGroupBlockTable``.

    Raises:
        ValueError: a kernel block size does not divide its group's block size.
    """
    sizes = kernel_block_sizes or [group.block_size for group in groups]
    tables = [
        BlockTable(
            group.block_size,
            len(num_computed),
            max_model_len,
            num_blocks,
            device,
            kernel_block_size=kernel_block_size,
            null_allowed=not group.keeps_all,
        )
        for group, kernel_block_size in zip(groups, sizes, strict=True)
    ]
    return MultiGroupBlockTable(tables, SlotOwners(groups, num_blocks, num_computed), transfer)
