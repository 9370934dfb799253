"""Which blocks each row holds, per KV group: host truth, and the copy that kernels read."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.kv_layout import NULL_BLOCK_ID
from quire.worker_proc.input_batch import StepRefused


class BlockTable:
    """One group's table: int32 ``[max_rows, max_blocks]``. Entries past a row's length are the null block.

    Host truth and device copy are different tensors on a GPU, and only rows that changed are copied; on a CPU they
    are one.
    """

    def __init__(
        self, block_size: int, max_rows: int, max_model_len: int, num_blocks: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self._num_pool_blocks = num_blocks
        self._ids = np.full((max_rows, -(-max_model_len // block_size)), NULL_BLOCK_ID, np.int32)
        self.num_blocks_per_row = np.zeros(max_rows, np.int32)
        self._host = torch.from_numpy(self._ids)
        self._device_copy = self._host if device.type == "cpu" else self._host.to(device)
        self._dirty: set[int] = set()

    def append_row(self, row: int, block_ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Add blocks at the end of a row.

        Raises:
            StepRefused: an id that is not a block requests may write to, or more blocks than a request can have.
        """
        start = int(self.num_blocks_per_row[row])
        end = start + len(block_ids)
        if end > self._ids.shape[1]:
            raise StepRefused(f"a request has {end} blocks, {self._ids.shape[1]} are the most")
        if len(block_ids) and not (min(block_ids) > NULL_BLOCK_ID and max(block_ids) < self._num_pool_blocks):
            raise StepRefused(f"a block id is not from 1 to {self._num_pool_blocks - 1}")
        self._ids[row, start:end] = block_ids
        self.num_blocks_per_row[row] = end
        self._dirty.add(row)

    def move_row(self, source: int, target: int) -> None:
        self._ids[target] = self._ids[source]
        self.num_blocks_per_row[target] = self.num_blocks_per_row[source]
        self._dirty.add(target)

    def clear_row(self, row: int) -> None:
        self._ids[row, : self.num_blocks_per_row[row]] = NULL_BLOCK_ID
        self.num_blocks_per_row[row] = 0
        self._dirty.discard(row)

    def swap_row(self, a: int, b: int) -> None:
        self._ids[[a, b]] = self._ids[[b, a]]
        self.num_blocks_per_row[[a, b]] = self.num_blocks_per_row[[b, a]]
        self._dirty |= {a, b}

    def commit(self) -> None:
        """Bring the device's copy up to date."""
        if self._dirty and self._device_copy is not self._host:
            rows = sorted(self._dirty)
            self._device_copy[rows] = self._host[rows].to(self._device_copy.device)
        self._dirty.clear()

    def rows(self, rows: npt.NDArray[np.int64], max_seq_len: int) -> torch.Tensor:
        """``[len(rows), ceil(max_seq_len / block_size)]`` on the device, for a kernel."""
        table = self._device_copy[:, : -(-max_seq_len // self.block_size)]
        if len(rows) and rows[-1] == len(rows) - 1:  # rows ascend: all of the first ones
            return table[: len(rows)]
        return table[torch.from_numpy(rows).to(table.device)]

    def slots(self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where each token's KV goes: ``block_id * block_size + offset`` for (row, position) pairs.

        Raises:
            StepRefused: a position whose block the row does not hold.
        """
        blocks = self._ids[rows, positions // self.block_size].astype(np.int64)
        if not blocks.all():
            raise StepRefused("a token has no block to be written to")
        return blocks * self.block_size + positions % self.block_size


class MultiGroupBlockTable:
    """One BlockTable per KV group, moved together."""

    def __init__(self, tables: Sequence[BlockTable]) -> None:
        self.tables = list(tables)

    def add_row(self, row: int, block_ids: Sequence[npt.NDArray[np.int32]]) -> None:
        """Set a row's blocks, per group."""
        for table, ids in zip(self.tables, block_ids, strict=True):
            table.clear_row(row)
            table.append_row(row, ids)

    def append_row(self, row: int, group: int, block_ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        if not 0 <= group < len(self.tables):
            raise StepRefused(f"KV group {group} does not exist")
        self.tables[group].append_row(row, block_ids)

    def move_row(self, source: int, target: int) -> None:
        for table in self.tables:
            table.move_row(source, target)

    def clear_row(self, row: int) -> None:
        for table in self.tables:
            table.clear_row(row)

    def swap_row(self, a: int, b: int) -> None:
        for table in self.tables:
            table.swap_row(a, b)

    def commit(self) -> None:
        for table in self.tables:
            table.commit()
