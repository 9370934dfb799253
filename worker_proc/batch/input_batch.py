"""The persistent dense batch: one row per request held, kept over steps, rows ``[0, num_rows)`` without holes.

Per-row state lives in columns that register themselves, so that adding, moving and clearing a row are loops over
columns and no feature can be forgotten in one of them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quire.protocol.request.logits_processors import AddedRequest, MoveDirectionality, MovedRequest
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.worker_messages import NewRequestData
from quire.worker_proc.batch.batch_update import BatchUpdateBuilder


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
    """The tokens of each request as far as the host knows them: int32 ``[max_rows, max_model_len]``.

    Those that came with it, and of those sampled here the ones that ``TokenHistory`` has caught up with.
    """

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


class OutputLists:
    """The running answers as lists, of those rows whose processors look at them; None for the others."""

    def __init__(self, max_rows: int) -> None:
        self.data: list[list[int] | None] = [None] * max_rows
        self.num_kept = 0

    def set_row(self, row: int, tokens: list[int] | None) -> None:
        self.num_kept += (tokens is not None) - (self.data[row] is not None)
        self.data[row] = tokens

    def move_row(self, source: int, target: int) -> None:
        self.set_row(target, self.data[source])

    def clear_row(self, row: int) -> None:
        self.set_row(row, None)


class StepRefused(Exception):
    """A diff that does not fit what this worker holds; nothing of the step is computed."""


class InputBatch:
    """Which request is in which row, and the rows' columns.

    Columns, all ``[max_rows]``:
        num_computed: positions whose KV is written by steps so far.
        num_known: tokens known: given ones, and one more per sample taken.
        num_prompt: of these, the prompt's.
        active: runs one token per step unless told otherwise; parked rows do not.
        serial: of the addition that made the row, from 1; never used again.
        seed, temperature, top_k, top_p, min_p, num_logprobs, num_prompt_logprobs (-1: none): the request's sampling.

    Attributes:
        generation: counts the steps in which a row changed hands.
    """

    def __init__(
        self, max_rows: int, max_model_len: int, keeps_output: Callable[[SamplingParams], bool] = lambda sampling: False
    ) -> None:
        """``keeps_output``: whether a request's answer is to be kept as a list, for its processors."""
        self.max_rows = max_rows
        self.num_rows = 0
        self.row_of: dict[int, int] = {}
        self.generation = 0
        self.builder = BatchUpdateBuilder()
        self._keeps_output = keeps_output
        self._stores: list[RowStore] = []
        self.tokens = TokenColumn(max_rows, max_model_len)
        self.register(self.tokens)
        self.outputs = OutputLists(max_rows)
        self.register(self.outputs)
        self.handles = self._column(np.int32)
        self.num_computed = self._column(np.int32)
        self.num_known = self._column(np.int32)
        self.num_prompt = self._column(np.int32)
        self.active = self._column(np.bool_)
        self.serial = self._column(np.int64)
        self._num_added = 0
        self.seed = self._column(np.uint64)
        self.temperature = self._column(np.float32)
        self.top_k = self._column(np.int32)
        self.top_p = self._column(np.float32)
        self.min_p = self._column(np.float32)
        self.num_logprobs = self._column(np.int32, -1)
        self.num_prompt_logprobs = self._column(np.int32, -1)

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

        The diff is trusted: ``DiffCheck`` has looked at the whole step.

        Args:
            tokens: the new requests' tokens, packed.

        Returns:
            The new requests' rows, in order.
        """
        for row in [self.row(handle) for handle in removed]:
            del self.row_of[int(self.handles[row])]
            self.builder.removed_append(row)
            for store in self._stores:
                store.clear_row(row)
        self.generation += bool(removed or new)
        rows = [self._take_row() for _ in new]
        self._fill(new, rows, tokens)
        self._close()
        return [self.row_of[n.handle] for n in new]

    def _take_row(self) -> int:
        """For a new request: holes from the left first, then the end."""
        row = self.builder.pop_removed()
        if row is None:
            row = self.num_rows
            self.num_rows += 1
        return row

    def _fill(self, new: Sequence[NewRequestData], rows: list[int], tokens: Int32 | None) -> None:
        start = 0
        for request, row in zip(new, rows, strict=True):
            assert tokens is not None and request.handle not in self.row_of
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
            self.num_prompt[row] = request.num_prompt_tokens
            self._num_added += 1
            self.serial[row] = self._num_added
            self.num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
            self.num_prompt_logprobs[row] = -1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs
            self._tell_processors(row, request)

    def _tell_processors(self, row: int, request: NewRequestData) -> None:
        prompt: list[int] = []
        output: list[int] = []
        if self._keeps_output(request.sampling):
            known: list[int] = self.tokens.data[row, : request.num_tokens].tolist()
            prompt, output = known[: request.num_prompt_tokens], known[request.num_prompt_tokens :]
            self.outputs.set_row(row, output)
        self.builder.added.append(AddedRequest(row, request.sampling, prompt, output))

    def _close(self) -> None:
        """Fill each hole that remains with the last row."""
        holes = self.builder.removed[::-1]
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
            self.builder.moved.append(MovedRequest(last, target, MoveDirectionality.UNIDIRECTIONAL))

    def check(self) -> None:
        """Raise AssertionError unless rows are dense and the map of handles is exact."""
        assert sorted(self.row_of.values()) == list(range(self.num_rows)), "rows are not dense"
        for handle, row in self.row_of.items():
            assert self.handles[row] == handle, f"handle {handle} is not in row {row}"
            assert 0 <= self.num_computed[row] <= self.num_known[row]
            assert 0 < self.num_prompt[row] <= self.tokens.length[row] <= self.num_known[row]
            output = self.outputs.data[row]
            known = self.tokens.data[row, self.num_prompt[row] : self.tokens.length[row]]
            assert output is None or output == known.tolist(), f"the list of handle {handle} is not its answer"
        assert self.outputs.num_kept == sum(output is not None for output in self.outputs.data)
        assert not self.active[self.num_rows :].any(), "an empty row is active"
