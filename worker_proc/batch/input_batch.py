"""Persistent batch: one row per request, kept between steps, in rows ``[0, num_rows)`` without gaps.

Per-row state is kept in columns that are registered with the batch. Adding, moving and clearing a row are loops over
all columns, so that no feature can be forgotten in one of them.
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
from quire.worker_proc.batch.image_positions import given_end, rope_offset


class RowStore(Protocol):
    """State per row that follows row moves: a column, a block table or a logits processor registered with the batch."""

    def move_row(self, source: int, target: int) -> None: ...

    def clear_row(self, row: int) -> None: ...


class RowColumn:
    """One value or short vector per row: a NumPy array or tensor of shape ``[max_rows, ...]``."""

    def __init__(self, data: Any, empty: Any = 0) -> None:
        self.data = data
        self._empty = empty

    def move_row(self, source: int, target: int) -> None:
        self.data[target] = self.data[source]

    def clear_row(self, row: int) -> None:
        self.data[row] = self._empty


class TokenColumn:
    """Tokens of each request that the host has: int32 ``[max_rows, max_model_len + 1]``.

    They are the tokens from the diff, and the sampled ones that ``TokenHistory`` has copied from the device so far. A
    prompt that fills the context is followed by one token, which is never computed.
    """

    def __init__(self, max_rows: int, max_model_len: int) -> None:
        self.data = np.zeros((max_rows, max_model_len + 1), np.int32)
        self.length = np.zeros(max_rows, np.int32)

    def set_row(self, row: int, tokens: Int32) -> None:
        self.data[row, : len(tokens)] = tokens
        self.length[row] = len(tokens)

    def move_row(self, source: int, target: int) -> None:
        self.set_row(target, self.data[source, : self.length[source]])

    def clear_row(self, row: int) -> None:
        self.length[row] = 0


class OutputLists:
    """Output tokens as lists, for rows whose logits processors read them; None for the other rows."""

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


ValueOf = Callable[[NewRequestData], Any]
"""The value of a column for a new request."""


class StepRefused(Exception):
    """A diff does not fit the worker's state; no part of the step is computed."""


class InputBatch:
    """Owns the assignment of requests to rows, and the rows' columns.

    Columns, all ``[max_rows]``:
        num_computed: number of positions whose KV is written.
        num_known: number of known tokens: those from the diff and the sampled ones.
        num_prompt: number of prompt tokens.
        active: false for parked rows; an active row computes one token per step unless the diff has another count.
        samples: false for rows that end with their prompt.
        serial: number of the addition that filled the row, from 1; never reused.
        seed, temperature, top_k, top_p, min_p, num_logprobs, num_prompt_logprobs (-1: none): sampling parameters.
        logprob_tokens: lists of the tokens whose log probabilities are reported instead of the most likely ones'; None
            without one.
        searches: true for the beams of a search, whose log probabilities are those after logits processors.
        given_end: the position behind the last one whose embedding is not its token's; 0: there is none.
        rope_offset: what the rotary position of a token behind the last item is more than its position.

    Attributes:
        generation: number of steps in which requests were added or removed.
    """

    def __init__(
        self, max_rows: int, max_model_len: int, keeps_output: Callable[[SamplingParams], bool] = lambda sampling: False
    ) -> None:
        """
        Args:
            keeps_output: whether the output tokens of a request are kept as a list, for its logits processors.
        """
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
        self._of_request: list[tuple[npt.NDArray[Any], ValueOf]] = []
        column = self.column
        self.handles = column(np.int32, lambda new: new.handle)
        self.num_computed = column(np.int32, lambda new: new.num_computed_tokens)
        self.num_known = column(np.int32, lambda new: new.num_tokens)
        self.num_prompt = column(np.int32, lambda new: new.num_prompt_tokens)
        self.active = column(np.bool_, lambda new: True)
        self.samples = column(np.bool_, lambda new: new.samples)
        self.serial = column(np.int64, self._next_serial)
        self._num_added = 0
        self.seed = column(np.uint64, lambda new: new.seed)
        # Beams are chosen by the scheduler from log probabilities; what is sampled for them is ignored, and greedy is
        # the cheapest.
        self.temperature = column(
            np.float32, lambda new: 0.0 if new.sampling.use_beam_search else new.sampling.temperature
        )
        self.top_k = column(np.int32, lambda new: max(new.sampling.top_k, 0))
        self.top_p = column(np.float32, lambda new: new.sampling.top_p)
        self.min_p = column(np.float32, lambda new: new.sampling.min_p)
        self.num_logprobs = column(np.int32, lambda new: _count(new.sampling.num_candidates), -1)
        self.logprob_tokens = column(np.object_, lambda new: new.sampling.logprob_token_ids or None, None)
        self.searches = column(np.bool_, lambda new: new.sampling.use_beam_search)
        self.given_end = column(np.int32, lambda new: given_end(new.items))
        self.rope_offset = column(np.int32, lambda new: rope_offset(new.items) if new.items else 0)
        self.num_prompt_logprobs = column(np.int32, lambda new: _count(new.sampling.prompt_logprobs), -1)

    def register(self, store: RowStore) -> None:
        """Apply every future move and clearing of rows to ``store`` too."""
        self._stores.append(store)

    def column(self, dtype: npt.DTypeLike, of: ValueOf, empty: Any = 0) -> npt.NDArray[Any]:
        """Return a new column ``[max_rows]``, whose value for a new request is ``of(request)``.

        Args:
            empty: value of a row without a request.
        """
        column = RowColumn(np.full(self.max_rows, empty, dtype), empty)
        self.register(column)
        self._of_request.append((column.data, of))
        return column.data  # type: ignore[no-any-return]

    def _next_serial(self, new: NewRequestData) -> int:
        """Number the addition: a handle may be used again by a later request, and the number tells the two apart."""
        self._num_added += 1
        return self._num_added

    def row(self, handle: int) -> int:
        """Return the row of ``handle``, which the batch has: ``DiffCheck`` has looked up every handle of the step."""
        return self.row_of[handle]

    def change_rows(self, removed: Sequence[int], new: Sequence[NewRequestData], tokens: Int32 | None) -> list[int]:
        """Remove handles, add requests, and fill the remaining gaps with the last rows.

        The diff is trusted, because ``DiffCheck`` has checked it.

        Args:
            tokens: the new requests' tokens, concatenated.

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
        self._fill_gaps()
        return [self.row_of[n.handle] for n in new]

    def replace_last(self, handle: int, token: int) -> None:
        """Replace the last token of a request, which the host must have."""
        row = self.row_of[handle]
        self.tokens.data[row, self.tokens.length[row] - 1] = token
        output = self.outputs.data[row]
        if output is not None:
            output[-1] = token

    def _take_row(self) -> int:
        """Return a row for a new request: the first gap, or else a row at the end."""
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
            self.row_of[request.handle] = row
            for column, of in self._of_request:
                column[row] = of(request)
            self._record_addition(row, request)

    def _record_addition(self, row: int, request: NewRequestData) -> None:
        prompt: list[int] = []
        output: list[int] = []
        if self._keeps_output(request.sampling):
            known: list[int] = self.tokens.data[row, : request.num_tokens].tolist()
            prompt, output = known[: request.num_prompt_tokens], known[request.num_prompt_tokens :]
            self.outputs.set_row(row, output)
        self.builder.added.append(AddedRequest(row, request.sampling, prompt, output))

    def _fill_gaps(self) -> None:
        """Fill each remaining gap with the last row."""
        # After the additions, which have filled the first gaps: only what is left is closed by moving rows, and each
        # row moves once at most.
        gaps = self.builder.removed[::-1]
        while gaps:
            last = self.num_rows - 1
            self.num_rows -= 1
            if gaps[-1] == last:
                gaps.pop()
                continue
            target = gaps.pop(0)
            for store in self._stores:
                store.move_row(last, target)
                # Cleared too, so that sums over whole columns never count a request twice.
                store.clear_row(last)
            self.row_of[int(self.handles[target])] = target
            self.builder.moved.append(MovedRequest(last, target, MoveDirectionality.UNIDIRECTIONAL))

    def check(self) -> None:
        """Raise AssertionError unless rows have no gaps and ``row_of`` and the columns are consistent."""
        assert sorted(self.row_of.values()) == list(range(self.num_rows)), "rows are not dense"
        for handle, row in self.row_of.items():
            assert self.handles[row] == handle, f"handle {handle} is not in row {row}"
            assert 0 <= self.num_computed[row] <= self.num_known[row]
            assert 0 < self.num_prompt[row] <= self.tokens.length[row] <= self.num_known[row]
            output = self.outputs.data[row]
            known = self.tokens.data[row, self.num_prompt[row] : self.tokens.length[row]]
            assert output is None or output == known.tolist(), f"wrong output list of handle {handle}"
        assert self.outputs.num_kept == sum(output is not None for output in self.outputs.data)
        assert not self.active[self.num_rows :].any(), "an empty row is active"


def _count(wanted: int | None) -> int:
    return -1 if wanted is None else wanted
