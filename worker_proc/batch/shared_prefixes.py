"""Leading blocks that rows of the batch share, for attention that reads them once for all of these rows.

Rows share blocks only by hits of the prefix cache, so what they share changes only when rows are added or removed:
blocks that a running row gets later are its own. So the worker finds it in its block tables after such a change. In
all other steps it only checks that the tables are the same; the scheduler and its messages have no part in it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.worker_proc.attention.backend import SharedPrefix
from quire.worker_proc.batch.block_table import BlockTable, Ints
from quire.worker_proc.batch.group_tables import MultiGroupBlockTable

MIN_KEYS = 256
"""Shorter prefixes are not reported: a pass of their own would cost as much as it saves."""


@dataclass(frozen=True, slots=True)
class RowsOfPrefix:
    """Rows of the batch (int64, ascending) whose first ``num_blocks`` blocks are the same."""

    rows: npt.NDArray[np.int64]
    num_blocks: int


class SharedPrefixes:
    """Owns the prefixes found in the block table of one full attention group."""

    def __init__(self, tables: MultiGroupBlockTable, group: int) -> None:
        self._tables, self._table = tables, tables.tables[group]
        self._version = -1
        self._found: list[RowsOfPrefix] = []

    def of_step(self, rows: npt.NDArray[np.int64], contexts: Ints) -> tuple[SharedPrefix, ...]:
        """Return the prefixes that rows of a step share, in indices of the step.

        Args:
            rows: the step's rows, ascending.
            contexts: number of computed tokens of each; a row that is still computing its prefix is left out.
        """
        if self._version != self._tables.version:
            self._version, self._found = self._tables.version, find_prefixes(self._table, MIN_KEYS)
        shared = []
        for prefix in self._found:
            length = prefix.num_blocks * self._table.block_size
            own = np.flatnonzero(np.isin(rows, prefix.rows) & (contexts >= length))
            if len(own) > 1:
                shared.append(SharedPrefix(own, length))
        return tuple(shared)


def find_prefixes(table: BlockTable, min_keys: int) -> list[RowsOfPrefix]:
    """Return prefixes that rows share, each row in at most one.

    Rows are followed from their first block to where most of them stay together, and the place at which the most keys
    need not be read again is taken; then the same for the remaining rows.
    """
    lengths = table.num_blocks_per_row
    remaining = np.flatnonzero(lengths)
    min_blocks = -(-min_keys // table.block_size)
    found = []
    while len(remaining) > 1:
        first = _most_common(table.host_ids[remaining, 0])
        rows = remaining[first]
        if len(rows) < 2:
            break
        prefix = _best(table.host_ids, lengths, rows)
        if prefix.num_blocks >= min_blocks:
            found.append(prefix)
            rows = prefix.rows
        remaining = np.setdiff1d(remaining, rows, assume_unique=True)
    return found


def _best(ids: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32], rows: npt.NDArray[np.int64]) -> RowsOfPrefix:
    """Return the prefix of some of ``rows``, which have the same first block, that saves the most reads of blocks."""
    best, most, depth = RowsOfPrefix(rows, 0), 0, 0
    while len(rows) > 1 and (len(rows) - 1) * int(lengths[rows].max()) > most:
        end = int(lengths[rows].min())
        differ = (ids[rows[1:], depth:end] != ids[rows[0], depth:end]).any(0)
        depth = depth + int(differ.argmax()) if differ.any() else end
        if (len(rows) - 1) * depth > most:
            best, most = RowsOfPrefix(rows, depth), (len(rows) - 1) * depth
        rows = rows[lengths[rows] > depth]
        if len(rows) > 1:
            rows = rows[_most_common(ids[rows, depth])]
    return best


def _most_common(values: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Return which values equal the most frequent one."""
    distinct, counts = np.unique(values, return_counts=True)
    return np.asarray(values == distinct[counts.argmax()])
