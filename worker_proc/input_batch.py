"""The persistent dense batch: one row per request held, kept over steps, rows ``[0, num_rows)`` without holes.

Per-row state lives in columns that register themselves, so that adding, moving and clearing a row are loops over
columns and no feature can be forgotten in one of them.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quire.protocol.messages import Int32, NewRequestData
from quire.worker_proc.batch_update import AddedRow, BatchUpdateBuilder


class RowStore(Protocol):
    """State of every row; what a table, a column or a processor registers with the batch."""

    def move_row(self, source: int, target: int) -> None: ...

    def clear_row(self, row: int) -> None: ...


class Column:
    """One value, or one short vector, per row: a NumPy array or a tensor of shape ``[max_rows, ...]``."""

    def __init__(self, data: Any, empty: Any = 0) -> None:
        self.data = data
        self._empty = empty

    def move_row(self, source: int, target: int) -> None:
        self.data[target] = self.data[source]

    def clear_row(self, row: int) -> None:
        self.data[row] = self._empty


class TokenColumn:
    """The tokens that came with each request, prompt and earlier output: int32 ``[max_rows, max_model_len]``."""

    def __init__(self, max_rows: int, max_model_len: int) -> None:
        self.data = np.zeros((max_rows, max_model_len), np.int32)
        self.length = np.zeros(max_rows, np.int32)

    def set_row(self, row: int, tokens: Int32) -> None:
        self.data[row, : len(tokens)] = tokens
        self.length[row] = len(tokens)

    def move_row(self, source: int, target: int) -> None:
        self.set_row(target, self.data[source, : self.length[source]])

    def clear_row(self, row: int) -> None:
        self.length[row] = 0


class StepRefused(Exception):
    """A diff that does not fit what this worker holds; nothing of the step is computed."""


class InputBatch:
    """Which request is in which row, and the rows' columns.

    Columns, all ``[max_rows]``:
        num_computed: positions whose KV is written by steps so far.
        num_known: tokens known: given ones, and one more per sample taken.
        active: runs one token per step unless told otherwise; parked rows do not.
        seed, temperature, top_k, top_p, min_p, num_logprobs (-1: none): the request's sampling.
    """

    def __init__(self, max_rows: int, max_model_len: int) -> None:
        self.max_rows = max_rows
        self.num_rows = 0
        self.row_of: dict[int, int] = {}
        self.builder = BatchUpdateBuilder()
        self._stores: list[RowStore] = []
        self.tokens = TokenColumn(max_rows, max_model_len)
        self.register(self.tokens)
        self.handles = self._column(np.int32)
        self.num_computed = self._column(np.int32)
        self.num_known = self._column(np.int32)
        self.active = self._column(np.bool_)
        self.seed = self._column(np.uint64)
        self.temperature = self._column(np.float32)
        self.top_k = self._column(np.int32)
        self.top_p = self._column(np.float32)
        self.min_p = self._column(np.float32)
        self.num_logprobs = self._column(np.int32, -1)

    def register(self, store: RowStore) -> None:
        """From now on ``store`` follows every change of rows."""
        self._stores.append(store)

    def _column(self, dtype: npt.DTypeLike, empty: Any = 0) -> npt.NDArray[Any]:
        column = Column(np.full(self.max_rows, empty, dtype), empty)
        self.register(column)
        return column.data  # type: ignore[no-any-return]

    def row(self, handle: int) -> int:
        """The row of ``handle``. Raises StepRefused when it is not held."""
        row = self.row_of.get(handle)
        if row is None:
            raise StepRefused(f"handle {handle} is not held")
        return row

    def change_rows(self, removed: Sequence[int], new: Sequence[NewRequestData], tokens: Int32 | None) -> list[int]:
        """Remove handles, add requests, and close the holes that remain with the last rows.

        Args:
            tokens: the new requests' tokens, packed.

        Returns:
            The new requests' rows, in order.

        Raises:
            StepRefused: an unknown handle, one held twice, too many rows, or tokens that do not add up.
        """
        if len(set(removed)) != len(removed):
            raise StepRefused("a handle is removed twice")
        holes = sorted(self.row(handle) for handle in removed)
        for row in holes:
            del self.row_of[int(self.handles[row])]
            for store in self._stores:
                store.clear_row(row)
        rows = self._place(new, holes)
        self._fill(new, rows, tokens)
        self._close(holes)
        return [self.row_of[n.handle] for n in new]

    def _place(self, new: Sequence[NewRequestData], holes: list[int]) -> list[int]:
        """A row for each new request: holes from the left first (taken out of ``holes``), then the end."""
        if self.num_rows - len(holes) + len(new) > self.max_rows:
            raise StepRefused(f"{len(new)} new requests do not fit {self.max_rows} rows")
        reused = holes[: len(new)]
        del holes[: len(new)]
        fresh = list(range(self.num_rows, self.num_rows + len(new) - len(reused)))
        self.num_rows += len(fresh)
        return reused + fresh

    def _fill(self, new: Sequence[NewRequestData], rows: list[int], tokens: Int32 | None) -> None:
        total = 0 if tokens is None else len(tokens)
        if total != sum(n.num_tokens for n in new):
            raise StepRefused("the new requests' tokens do not add up")
        start = 0
        for request, row in zip(new, rows, strict=True):
            if request.handle in self.row_of or not 0 < request.num_tokens <= self.tokens.data.shape[1]:
                raise StepRefused(f"handle {request.handle} is held already, or its length is wrong")
            if not 0 <= request.num_computed_tokens < request.num_tokens:
                raise StepRefused(f"handle {request.handle} has {request.num_computed_tokens} tokens computed")
            assert tokens is not None
            self.tokens.set_row(row, tokens[start : start + request.num_tokens])
            start += request.num_tokens
            sampling = request.sampling
            self.row_of[request.handle] = row
            self.handles[row] = request.handle
            self.num_computed[row] = request.num_computed_tokens
            self.num_known[row] = request.num_tokens
            self.active[row] = True
            self.seed[row] = request.seed
            self.temperature[row] = sampling.temperature
            self.top_k[row] = max(sampling.top_k, 0)
            self.top_p[row] = sampling.top_p
            self.min_p[row] = sampling.min_p
            self.num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
            self.builder.added.append(AddedRow(row, request.handle, sampling))

    def _close(self, holes: list[int]) -> None:
        """Fill each hole with the last row; ``holes`` ascend."""
        self.builder.removed += holes
        while holes:
            last = self.num_rows - 1
            self.num_rows -= 1
            if holes[-1] == last:
                holes.pop()
                continue
            target = holes.pop(0)
            for store in self._stores:
                store.move_row(last, target)
                store.clear_row(last)
            self.row_of[int(self.handles[target])] = target
            self.builder.moved.append((last, target))

    def check(self) -> None:
        """Raise AssertionError unless rows are dense and the map of handles is exact."""
        assert sorted(self.row_of.values()) == list(range(self.num_rows)), "rows are not dense"
        for handle, row in self.row_of.items():
            assert self.handles[row] == handle, f"handle {handle} is not in row {row}"
            assert 0 <= self.num_computed[row] <= self.num_known[row]
        assert not self.active[self.num_rows :].any(), "an empty row is active"
