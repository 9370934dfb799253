"""Check of a diff against the worker's state: the whole step is checked before any part of it is applied.

Only the changes in the diff are checked, so a step without changes costs nothing here. Such a step may still lack a
block for a row whose last block is full; ``BlockTable.slots`` finds that before the step runs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import NULL_BLOCK_ID
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.worker_messages import NewRequestData, SchedulerOutput
from quire.worker_proc.batch.block_table import BlockTable, Ints
from quire.worker_proc.batch.group_tables import MultiGroupBlockTable
from quire.worker_proc.batch.input_batch import InputBatch, StepRefused, ValueOf

NOTHING: Int32 = np.zeros(0, np.int32)
MAX_HANDLE = 2**31 - 1


class RowCheck(Protocol):
    """What one capability checks of a diff."""

    def require(self, step: SchedulerOutput, after: "After") -> None:
        """Raise StepRefused if the worker cannot compute the step."""
        ...


class DiffCheck:
    """Checks diffs against the batch and its block tables. Changes neither."""

    def __init__(
        self, batch: InputBatch, tables: MultiGroupBlockTable, config: EngineConfig, checks: Sequence[RowCheck]
    ) -> None:
        self._batch, self._tables, self._checks = batch, tables, checks
        self._vocab_size, self._max_tokens = config.model.vocab_size, config.max_num_batched_tokens

    def require(self, step: SchedulerOutput) -> None:
        """Check the step's diff.

        Raises:
            StepRefused: the step refers to unknown requests or blocks, would write to a block that is in use, or is
                inconsistent.
        """
        if not _changes(step):
            return
        if _only_appends(step):
            self._require_appends(step)
            return
        after = After(self._batch, step, self._max_tokens)
        for check in self._checks:
            check.require(step, after)
        self._require_chosen(step)
        self._require_new(step)
        self._require_blocks(step, after)
        self._tables.require_copies(step.block_copies, after.leaving)

    def _require_appends(self, step: SchedulerOutput) -> None:
        """Check a diff that only appends blocks, as in steady decode for rows whose next token starts a block."""
        rows, groups, ids = _appended(step, partial(_held_row, self._batch))
        _require_groups(groups, len(self._tables.tables))
        batch = self._batch
        computed, runs = batch.num_computed[: batch.num_rows], batch.active[: batch.num_rows]
        for group, table in enumerate(self._tables.tables):
            span = table.block_size * table.ratio
            of_group = groups == group
            own_rows = rows[of_group]
            _require_appended(table, group, ids[of_group], own_rows, self._handle)
            appended = np.bincount(own_rows, minlength=batch.num_rows)
            held = table.num_blocks_per_row[: batch.num_rows] // table.ratio + appended
            _require_room(table, held, self._handle)
            short = (held * span <= computed) & runs
            if short.any():
                row = int(short.argmax())
                raise StepRefused(_no_block(self._handle(row), group, int(computed[row]), int(held[row])))
        self._tables.require_free(ids, ())

    def _handle(self, row: int) -> int:
        return int(self._batch.handles[row])

    def _require_new(self, step: SchedulerOutput) -> None:
        tokens = NOTHING if step.token_ids is None else step.token_ids
        total = sum(new.num_tokens for new in step.new_requests)
        if len(tokens) != total:
            raise StepRefused(f"number of token ids is {len(tokens)}, but the new requests have {total} tokens")
        if len(tokens) and tokens.view(np.uint32).max() >= self._vocab_size:  # as unsigned, a negative id is a huge one
            at = int(np.argmax(tokens.view(np.uint32) >= self._vocab_size))
            for new in step.new_requests:
                if at < new.num_tokens:
                    where = f"handle {new.handle}: token {at}"
                    break
                at -= new.num_tokens
            raise StepRefused(f"{where} {self._outside(int(tokens.view(np.uint32).max().view(np.int32)))}")
        for new in step.new_requests:
            for name, ids in new.sampling.named_token_ids().items():
                if max(ids, default=0) >= self._vocab_size:
                    raise StepRefused(f"handle {new.handle}: {name} {self._outside(max(ids))}")

    def _outside(self, token_id: int) -> str:
        return f"has id {token_id}, which is outside the vocabulary of {self._vocab_size} tokens"

    def _require_chosen(self, step: SchedulerOutput) -> None:
        """Check that each row with a chosen token stays, and that its last token was sampled and is not computed."""
        for handle, token in _once(step.chosen):
            row = _held_row(self._batch, handle)
            if handle in step.removed:
                raise StepRefused(f"handle {handle} has a chosen token, but this step removes it")
            known, computed = int(self._batch.num_known[row]), int(self._batch.num_computed[row])
            if known != computed + 1 or known <= self._batch.num_prompt[row]:
                raise StepRefused(f"handle {handle} has a chosen token, but {computed} of {known} tokens are computed")
            if not 0 <= token < self._vocab_size:
                raise StepRefused(f"handle {handle}: the chosen token {self._outside(token)}")

    def _require_blocks(self, step: SchedulerOutput, after: "After") -> None:
        """Check that every position to compute has a block that no other row writes or reads."""
        given = _split(step.new_requests, step.block_ids, len(self._tables.tables))
        rows, groups, ids = _appended(step, after.row)
        _require_groups(groups, len(self._tables.tables))
        claimed: list[Ints] = [ids]
        for group, table in enumerate(self._tables.tables):
            own = groups == group
            held = np.concatenate(
                (table.num_blocks_per_row[: after.num_held] // table.ratio, [len(of[group]) for of in given])
            ).astype(np.int64)
            for row, (new, of) in enumerate(zip(step.new_requests, given, strict=True), after.num_held):
                claimed.append(_require_new_blocks(table, group, of[group], int(after.computed[row]), new.handle))
            own_rows = rows[own]
            _require_appended(table, group, ids[own], own_rows, after.handle)
            held += np.bincount(own_rows, minlength=len(held))
            _require_room(table, held, after.handle)
            span = table.block_size * table.ratio
            short = (-(-(after.computed + after.lengths) // span) > held) & ((after.lengths > 0) | after.is_forked)
            if short.any():
                row = int(short.argmax())
                last = int(after.computed[row] + after.lengths[row]) - 1
                raise StepRefused(_no_block(after.handle(row), group, last, int(held[row])))
        self._tables.require_free(np.concatenate(claimed), after.leaving)


class After:
    """The rows after the diff: the present rows at their indices, followed by the new requests.

    Attributes:
        num_held: number of rows before the step, including those that the step removes.
        leaving: rows of the requests that the step removes.
        lengths: int64: maximum number of tokens that each row computes; 0 for removed and parked rows.
        computed: int64: number of computed positions of each row before the step.
        is_forked: whether each row samples from the logits of another row.
    """

    def __init__(self, batch: InputBatch, step: SchedulerOutput, max_tokens: int) -> None:
        self.num_held = batch.num_rows
        self._batch = batch
        self._new = {new.handle: self.num_held + index for index, new in enumerate(step.new_requests)}
        self.leaving = [_held_row(batch, handle) for handle in step.removed]
        self._forks = dict(_once(step.forks))
        if len(set(self.leaving)) != len(self.leaving):
            raise StepRefused(f"duplicate handle {_duplicate(step.removed)} among the removed requests")
        self._removed = set(step.removed)
        self._require_rows(step)
        self._added = step.new_requests
        self.computed = self.column(batch.num_computed, lambda new: new.num_computed_tokens)
        self._known = self.column(batch.num_known, lambda new: new.num_tokens)
        self.is_forked = np.zeros(len(self.computed), np.bool_)
        self.is_forked[[self.row(handle) for handle in self._forks]] = True
        self.lengths = self._lengths(step)
        self._require_forks()
        if not self.lengths.any():
            raise StepRefused(f"step {step.step} without running requests")
        if int(self.lengths.sum()) > max_tokens:
            raise StepRefused(f"step of {int(self.lengths.sum())} tokens exceeds the maximum of {max_tokens}")

    def column(self, held: npt.NDArray[Any], of: ValueOf) -> npt.NDArray[np.int64]:
        """Return a column of the batch after the diff. ``of``: its value for a new request."""
        return np.concatenate((held[: self.num_held], [of(new) for new in self._added])).astype(np.int64)

    def row(self, handle: int) -> int:
        """Return the row of ``handle`` after the diff. Raise StepRefused if the handle is unknown or removed."""
        found = self._new.get(handle)
        if found is None and handle in self._removed:
            raise StepRefused(f"handle {handle} is not held: this step removes it")
        return _held_row(self._batch, handle) if found is None else found

    def handle(self, row: int) -> int:
        """Return the handle of a row after the diff."""
        return int(self._batch.handles[row]) if row < self.num_held else list(self._new)[row - self.num_held]

    def _require_rows(self, step: SchedulerOutput) -> None:
        new, batch = step.new_requests, self._batch
        if self.num_held - len(step.removed) + len(new) > batch.max_rows:
            raise StepRefused(f"{len(new)} new requests do not fit in {batch.max_rows} rows")
        if len(self._new) != len(new):
            duplicate = _duplicate([request.handle for request in new])
            raise StepRefused(f"duplicate handle {duplicate} among the new requests")
        for request in new:
            handle, longest = request.handle, batch.tokens.data.shape[1] - 1
            if not 0 <= handle <= MAX_HANDLE:
                raise StepRefused(f"handle of a new request must be between 0 and {MAX_HANDLE} (got {handle})")
            if handle in batch.row_of and handle not in self._removed:
                raise StepRefused(f"handle {handle} of a new request is in use")
            if not 0 < request.num_tokens <= longest:
                raise StepRefused(f"handle {handle}: length must be between 1 and {longest} (got {request.num_tokens})")
            if not 0 < request.num_prompt_tokens <= request.num_tokens:
                raise StepRefused(
                    f"handle {handle} has {request.num_prompt_tokens} prompt tokens of {request.num_tokens} tokens"
                )
            if not 0 <= request.num_computed_tokens < request.num_tokens + (handle in self._forks):
                raise StepRefused(
                    f"handle {handle} has {request.num_computed_tokens} computed tokens of {request.num_tokens} tokens"
                )
            if not 0 <= request.seed < 2**64:
                raise StepRefused(f"handle {handle}: seed must be between 0 and {2**64 - 1} (got {request.seed})")

    def _lengths(self, step: SchedulerOutput) -> npt.NDArray[np.int64]:
        lengths = np.ones(len(self.computed), np.int64)
        lengths[: self.num_held] = self._batch.active[: self.num_held]
        for handle in step.parked:
            row = _held_row(self._batch, handle)
            if handle in self._removed:
                raise StepRefused(f"handle {handle} to park is removed by this step")
            if not lengths[row]:
                raise StepRefused(f"handle {handle} to park is already parked")
            lengths[row] = 0
        for handle in step.unparked:
            row = self.row(handle)
            if lengths[row]:
                raise StepRefused(f"handle {handle} to unpark is not parked")
            lengths[row] = 1
        lengths[self.leaving] = 0
        lengths[self.is_forked] = 0
        for handle, count in _once(step.counts):
            row = self.row(handle)
            longest = self._batch.tokens.data.shape[1] - 1
            if not lengths[row]:
                raise StepRefused(f"handle {handle} with a token count is parked")
            if not 0 < count <= longest:
                raise StepRefused(f"handle {handle}: token count must be between 1 and {longest} (got {count})")
            lengths[row] = count
        known = self._known
        if step.drafts:
            known = self._known.copy()
            for handle, allowed in _once(step.drafts):
                row = self.row(handle)
                if not 0 < allowed < lengths[row] or self.computed[row] + lengths[row] - allowed != known[row]:
                    raise StepRefused(f"handle {handle} cannot have {allowed} draft tokens among {lengths[row]} tokens")
                known[row] += allowed
        unknown = (self.computed + lengths > known) & (lengths > 0)
        if unknown.any():
            row = int(unknown.argmax())
            raise StepRefused(
                f"handle {self.handle(row)} would compute {lengths[row]} tokens after {self.computed[row]}, "
                f"but only {known[row]} are known"
            )
        return lengths

    def _require_forks(self) -> None:
        """Check that each forked row is new, and that its parent computes the last of the same number of tokens."""
        for handle, parent in self._forks.items():
            row, of = self.row(handle), self.row(parent)
            if row < self.num_held or self.computed[row] != self._known[row]:
                raise StepRefused(f"handle {handle} is forked, but is not new or has tokens to compute")
            end = self.computed[of] + self.lengths[of]
            if not self.lengths[of] or end != self._known[of] or end != self._known[row]:
                raise StepRefused(
                    f"handle {handle} with {self._known[row]} tokens cannot be forked from handle {parent}, which has "
                    f"{self._known[of]} and computes up to {end}"
                )


def _changes(step: SchedulerOutput) -> bool:
    """Return whether the diff has changes.

    Raises:
        StepRefused: the diff uses fields that this version does not support.
    """
    if step.draft_token_ids is not None:
        raise StepRefused(f"step {step.step} uses draft_token_ids, which this version does not support")
    lists = _lists(step)
    appended = step.appended_handles, step.appended_block_ids, step.appended_groups
    arrays = (step.token_ids, step.block_ids, step.state_slots, *appended)
    return lists or any(array is not None for array in arrays)


def _only_appends(step: SchedulerOutput) -> bool:
    return not _lists(step) and step.token_ids is None and step.block_ids is None and step.state_slots is None


def _lists(step: SchedulerOutput) -> bool:
    rows = step.removed or step.parked or step.new_requests or step.unparked
    states = step.state_copies or step.blocks_to_zero
    return bool(rows or step.counts or step.drafts or step.forks or step.chosen or step.block_copies or states)


def _held_row(batch: InputBatch, handle: int) -> int:
    """Return the row of a handle that the batch has before the step. Raise StepRefused if it does not have it."""
    row = batch.row_of.get(handle)
    if row is None:
        raise StepRefused(f"handle {handle} is not held")
    return row


def _require_groups(groups: Ints, num_groups: int) -> None:
    if len(groups) and not 0 <= groups.min() <= groups.max() < num_groups:
        group = int(groups.min() if groups.min() < 0 else groups.max())
        raise StepRefused(f"KV group must be between 0 and {num_groups - 1} (got {group})")


def _once(pairs: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    if len({handle for handle, _ in pairs}) != len(pairs):
        raise StepRefused(f"duplicate handle {_duplicate([handle for handle, _ in pairs])} in a list of pairs")
    return pairs


def _duplicate(handles: Sequence[int]) -> int:
    """Return the first handle that occurs twice."""
    return next(handle for at, handle in enumerate(handles) if handle in handles[:at])


def _split(new: Sequence[NewRequestData], block_ids: Int32 | None, num_groups: int) -> list[list[Int32]]:
    """Return the blocks of each new request, per group."""
    ids = NOTHING if block_ids is None else block_ids
    for request in new:
        if len(request.num_blocks) != num_groups:
            given = f"block counts for {len(request.num_blocks)} KV groups"
            raise StepRefused(f"handle {request.handle} has {given}, expected {num_groups}")
        if min(request.num_blocks, default=0) < 0:
            group = request.num_blocks.index(min(request.num_blocks))
            raise StepRefused(f"handle {request.handle} has {request.num_blocks[group]} blocks in KV group {group}")
    lengths = [count for request in new for count in request.num_blocks]
    if len(ids) != sum(lengths):
        raise StepRefused(f"number of block ids is {len(ids)}, but the new requests have {sum(lengths)} blocks")
    pieces = np.split(ids, np.cumsum(lengths)[:-1]) if lengths else []
    return [pieces[at * num_groups : (at + 1) * num_groups] for at in range(len(new))]


def _appended(step: SchedulerOutput, row_of: Callable[[int], int]) -> tuple[Ints, Ints, Ints]:
    """Return row, group and id of each appended block; ``row_of`` maps handles to rows."""
    handles, ids, groups = step.appended_handles, step.appended_block_ids, step.appended_groups
    handles = NOTHING if handles is None else handles
    ids = NOTHING if ids is None else ids
    groups = np.zeros_like(handles) if groups is None else groups
    if not len(handles) == len(ids) == len(groups):
        sizes = f"{len(handles)} handles, {len(groups)} groups, {len(ids)} ids"
        raise StepRefused(f"lists of appended blocks have different lengths: {sizes}")
    return np.array([row_of(handle) for handle in handles.tolist()], np.int64), groups, ids


def _no_block(handle: int, group: int, position: int, num_blocks: int) -> str:
    return f"handle {handle}, KV group {group}: no block for position {position} (the request has {num_blocks} blocks)"


def _require_room(table: BlockTable, held: npt.NDArray[np.int64], handle_of: Callable[[int], int]) -> None:
    """Check the number of blocks of each row after the diff. ``handle_of`` maps a row to its handle."""
    most = int(held.max(initial=0))
    if most > table.max_blocks:
        handle = handle_of(int(held.argmax()))
        raise StepRefused(f"handle {handle}: {most} blocks are more than the maximum of {table.max_blocks} per request")


def _require_ids(table: BlockTable, ids: Ints, handle_of: Callable[[int], int]) -> None:
    """Check that the table may hold these ids. ``handle_of`` maps an index into ``ids`` to a handle."""
    lowest, highest = table.id_range
    if len(ids) and not lowest <= ids.min() <= ids.max() <= highest:
        at = int(np.argmax((ids < lowest) | (ids > highest)))
        raise StepRefused(f"handle {handle_of(at)}: block ids must be between {lowest} and {highest} (got {ids[at]})")


def _require_new_blocks(table: BlockTable, group: int, ids: Int32, num_computed: int, handle: int) -> Int32:
    """Return the blocks that the row will write; the null block may only occur before them."""
    _require_ids(table, ids, lambda at: handle)
    first = num_computed // (table.block_size * table.ratio)
    own = ids[first:]
    if not own.all():
        at = first + int(np.argmax(own == NULL_BLOCK_ID))
        raise StepRefused(
            f"handle {handle}, KV group {group}: entry {at} of the block table will be written, but is the null block"
        )
    return own


def _require_appended(table: BlockTable, group: int, ids: Ints, rows: Ints, handle_of: Callable[[int], int]) -> None:
    """Check block ids appended to ``rows``, which will write to them, so the null block is not allowed.

    ``handle_of`` maps a row to its handle.
    """
    _require_ids(table, ids, lambda at: handle_of(int(rows[at])))
    if not ids.all():
        handle = handle_of(int(rows[np.argmax(ids == NULL_BLOCK_ID)]))
        raise StepRefused(f"handle {handle}, KV group {group}: appended block id {NULL_BLOCK_ID} is the null block")
