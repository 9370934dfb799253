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
"""Shorter prefixes are not reported: the CPU's kernel computes whole runs of 256 keys (``SPLIT``) for all rows."""

MAX_PREFIXES = 32
"""Prefixes of one batch, and ..."""

MAX_FORKS = 32
"""... places at which rows of a prefix part that a search looks at: limits of its time, milliseconds for 256 rows."""


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
        self._rows = np.zeros(0, np.int64)
        self._needed = np.zeros(0, np.int64)  # context at which each of `_rows` has its prefix
        self._shared: tuple[SharedPrefix, ...] = ()

    def of_step(self, rows: npt.NDArray[np.int64], contexts: Ints) -> tuple[SharedPrefix, ...]:
        """Return the prefixes that rows of a step share, in indices of the step.

        Args:
            rows: the step's rows, ascending.
            contexts: number of computed tokens of each; a row that is still computing its prefix is left out.
        """
        if self._version != self._tables.version:
            self._version, self._found = self._tables.version, find_prefixes(self._table, MIN_KEYS)
            self._rows = self._rows[:0]
        if not self._found:
            return ()
        if np.array_equal(rows, self._rows) and (contexts >= self._needed).all():
            return self._shared
        needed, shared, whole = np.zeros(len(rows), np.int64), [], True
        for prefix in self._found:
            length = prefix.num_blocks * self._table.block_size
            own = np.flatnonzero(np.isin(rows, prefix.rows))
            ready = own[contexts[own] >= length]
            whole = whole and len(ready) == len(own)
            needed[own] = length
            if len(ready) > 1:
                shared.append(SharedPrefix(ready, length))
        if whole:  # as long as the same rows run and no context shrinks below its prefix, this holds
            self._rows, self._needed, self._shared = rows, needed, tuple(shared)
        return tuple(shared)


def find_prefixes(table: BlockTable, min_keys: int) -> list[RowsOfPrefix]:
    """Return prefixes of at least ``min_keys`` keys that rows share, each row in at most one.

    Rows are followed from their first block to where most of them stay together, and the place at which the most keys
    need not be read again is taken; then the same for the remaining rows.
    """
    lengths = table.num_blocks_per_row
    remaining = np.flatnonzero(lengths)
    min_blocks = -(-min_keys // table.block_size)
    found: list[RowsOfPrefix] = []
    for _ in range(MAX_PREFIXES):
        rows = remaining[_most_common(table.host_ids[remaining, 0])] if len(remaining) > 1 else remaining
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
    best, most, depth = RowsOfPrefix(rows, 0), 0, 1
    for _ in range(MAX_FORKS):
        if (len(rows) - 1) * int(lengths[rows].max(initial=0)) <= most:
            break
        depth = _fork(ids, rows, depth, int(lengths[rows].min()))
        if (len(rows) - 1) * depth > most:
            best, most = RowsOfPrefix(rows, depth), (len(rows) - 1) * depth
        rows = rows[lengths[rows] > depth]
        if len(rows):
            rows = rows[_most_common(ids[rows, depth])]
    return best


def _fork(ids: npt.NDArray[np.int32], rows: npt.NDArray[np.int64], depth: int, end: int) -> int:
    """Return the first column from ``depth`` on in which ``rows`` differ, at most ``end``."""
    step = 16
    while depth < end:
        stop = min(depth + step, end)
        differ = (ids[rows[1:], depth:stop] != ids[rows[0], depth:stop]).any(0)
        if differ.any():
            return depth + int(differ.argmax())
        depth, step = stop, 2 * step
    return end


def _most_common(values: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Return which values equal the most frequent one."""
    distinct, counts = np.unique(values, return_counts=True)
    return np.asarray(values == distinct[counts.argmax()])
