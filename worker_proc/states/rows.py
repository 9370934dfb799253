"""The slot of each row, the check of a diff's slots, and the calls by which a step advances its rows' states."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import STATE_GRID, KVLayout
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.worker_proc.batch.diff_check import After
from quire.worker_proc.batch.input_batch import InputBatch, RowColumn, StepRefused
from quire.worker_proc.batch.positions import Ints
from quire.worker_proc.batch.step_inputs import StepInputs
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.states.calls import NO_STATES, Places, StateCall, StateStep
from quire.worker_proc.states.pool import StatePool

_NOTHING: Int32 = np.zeros(0, np.int32)


class RowStates:
    """Owns the pool of slots and the column of the rows' slots. It is there without states too, and refuses slots then.

    A slot's state is somewhere in the pool: at its *place*. A draft's state is computed at a further place, of which
    each row has as many as it may have drafts. When drafts are accepted, the slot and the place of the last accepted
    one are exchanged, so rejected drafts never touch a slot, and nothing is copied.

    Attributes:
        slots: int64 ``[max_rows]``; 0 for rows without a request.
        place: int64 ``[num_slots]``: each slot's place in the pool.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: KVLayout,
        num_slots: int,
        batch: InputBatch,
        transfer: Transfer,
        device: torch.device,
    ) -> None:
        rows, drafts = config.max_num_seqs, config.num_speculative_tokens
        drafting = min(rows, max(num_slots - 1, 0))  # rows have no gaps, and each has a slot
        self.num_slots = num_slots
        self._batch, self._transfer = batch, transfer
        # One form, whatever is computed together: a chunk and its tokens one by one round differently.
        self._one_by_one = config.deterministic
        self.slots = np.zeros(rows, np.int64)
        self._awaits = np.zeros(rows, np.bool_)
        batch.register(RowColumn(self.slots))
        batch.register(RowColumn(self._awaits, empty=False))
        self.place = np.arange(num_slots)
        self._draft_places = num_slots + np.arange(drafting * drafts).reshape(drafting, drafts)
        self.pool: StatePool | None = None
        if layout.states:
            self.pool = StatePool(layout.states, num_slots + drafting * drafts, device, layout.slot_bytes)

    # ---- the diff

    def require(self, step: SchedulerOutput, after: After) -> None:
        """Check the step's slots: each request has one of its own, whose state is that of its computed tokens.

        Raises:
            StepRefused: it is not.
        """
        given = _NOTHING if step.state_slots is None else step.state_slots
        if self.pool is None:
            if step.state_slots is not None or step.state_copies or step.blocks_to_zero:
                raise StepRefused(f"step {step.step} has slots of recurrent states, and the model keeps no such states")
            return
        if len(given) != len(step.new_requests):
            raise StepRefused(f"{len(step.new_requests)} new requests have {len(given)} slots of recurrent states")
        named = [*given.tolist(), *step.blocks_to_zero, *(slot for pair in step.state_copies for slot in pair)]
        wrong = next((slot for slot in named if not 0 < slot < self.num_slots), None)
        if wrong is not None:
            raise StepRefused(f"slots of recurrent states must be between 1 and {self.num_slots - 1} (got {wrong})")
        slots = np.concatenate((self.slots[: after.num_held], given))
        slots[after.leaving] = 0
        owners: dict[int, int] = {}
        for row in np.flatnonzero(slots).tolist():
            other = owners.setdefault(int(slots[row]), row)
            if other != row:
                raise StepRefused(
                    f"handles {after.handle(other)} and {after.handle(row)} have the same slot {slots[row]}"
                )
        self._require_contents(step, after, owners)

    def _require_contents(self, step: SchedulerOutput, after: After, owners: dict[int, int]) -> None:
        """Check what is written to slots. ``owners``: the row after the diff of each slot that a row has."""
        copied, zeroed = {target for _, target in step.state_copies}, set(step.blocks_to_zero)
        awaits = np.concatenate((self._awaits[: after.num_held], np.zeros(len(step.new_requests), np.bool_)))
        for slot in copied | zeroed:
            row = owners.get(slot)
            if slot in zeroed and (row is None or row < after.num_held):
                raise StepRefused(f"slot {slot} to zero is not that of a new request")
            if row is not None and row < after.num_held and not awaits[row]:
                raise StepRefused(f"the state of handle {after.handle(row)} in slot {slot} would be overwritten")
        for slot, row in owners.items():
            begins = row >= after.num_held and not after.is_forked[row]
            where = f"slot {slot} of handle {after.handle(row)} with {after.computed[row]} computed tokens"
            if begins and (slot in zeroed) is bool(after.computed[row]):
                raise StepRefused(f"{where} must {'not ' if slot in zeroed else ''}be zeroed")
            # A forked row gets its parent's state by a later step, before which it computes nothing.
            if awaits[row] and after.lengths[row] and slot not in copied:
                raise StepRefused(f"{where} must be copied to")

    def apply(self, step: SchedulerOutput, rows: Sequence[int]) -> None:
        """Apply the diff, after the batch. ``rows``: of the new requests."""
        if self.pool is None:
            return
        if step.state_slots is not None:
            self.slots[rows] = step.state_slots
        self._awaits[[self._batch.row(handle) for handle, _ in step.forks]] = True
        self._awaits[np.isin(self.slots, [target for _, target in step.state_copies])] = False
        self.pool.copy([(int(self.place[source]), int(self.place[target])) for source, target in step.state_copies])
        self.pool.zero(self.place[step.blocks_to_zero].tolist() if step.blocks_to_zero else [])

    # ---- the step

    def of_step(self, inputs: StepInputs) -> StateStep:
        """Return the calls of a step; tensors among them have their content after ``Transfer.send``."""
        if self.pool is None:
            return NO_STATES
        starts = inputs.query_start_loc[:-1].astype(np.int64)
        drafts = np.zeros(len(inputs.rows), np.int64)
        if inputs.drafts is not None:
            of_row = dict(zip(inputs.sampled_rows.tolist(), map(len, inputs.drafts), strict=True))
            drafts[:] = [of_row.get(row, 0) for row in inputs.rows.tolist()]
        known = inputs.query_lens - drafts
        places = self.place[self.slots[inputs.rows]]
        firsts = inputs.seq_lens - inputs.query_lens
        calls: list[StateCall] = []
        for at in np.flatnonzero(known > 1).tolist():
            calls += self._segments(int(starts[at]), int(known[at]), int(firsts[at]), int(places[at]))
        ones = np.flatnonzero(known == 1)
        calls += self._together(starts[ones], places[ones], None)
        for number in range(int(drafts.max(initial=0))):
            own = np.flatnonzero(drafts > number)
            targets = self._draft_places[inputs.rows[own]]
            before = targets[:, number - 1] if number else places[own]
            calls += self._together(starts[own] + known[own] + number, before, targets[:, number])
        return StateStep(calls, self.pool.tensors)

    def _segments(self, start: int, count: int, first: int, place: int) -> list[StateCall]:
        """Return the calls of consecutive tokens of one row.

        Classes compute chunks of the grid's size from where a call begins. So a call that begins off the grid ends at
        it, and longer ones round as those of an uncut prompt do.

        Args:
            start: place of the first token in the step.
            first: its position.
        """
        cuts = range(1, count) if self._one_by_one else [-first % STATE_GRID]
        bounds = [0, *(cut for cut in cuts if 0 < cut < count), count]
        own = slice(place, place + 1)
        return [StateCall(slice(start + a, start + b), own, own, is_segment=True) for a, b in pairwise(bounds)]

    def _together(self, tokens: Ints, sources: Ints, targets: Ints | None) -> list[StateCall]:
        """Return the calls of one token each of some rows. ``targets``: None if they are the sources."""
        if self._one_by_one:
            each = [slice(at, at + 1) for at in range(len(tokens))]
        else:
            each = [slice(0, len(tokens))] if len(tokens) else []
        calls = []
        for own in each:
            source = self._places(sources[own])
            target = source if targets is None else self._places(targets[own])
            calls.append(StateCall(self._places(tokens[own]), source, target, is_segment=False))
        return calls

    def _places(self, values: Ints) -> Places:
        """Return a range if the values are one: what it selects is a view, which needs no copies."""
        first, last = int(values[0]), int(values[-1])
        if last - first == len(values) - 1 and (np.diff(values) == 1).all():
            return slice(first, last + 1)
        return self._transfer(np.ascontiguousarray(values))[0]

    def accept(self, rows: Ints, counts: Ints) -> None:
        """Keep the state behind the last accepted draft of each row. ``counts``: accepted drafts of each row, and 1."""
        if self.pool is None:
            return
        rows, last = rows[counts > 1], counts[counts > 1] - 2
        slots = self.slots[rows]
        places = self.place[slots]
        self.place[slots] = self._draft_places[rows, last]
        self._draft_places[rows, last] = places

    def check(self) -> None:
        """Raise AssertionError unless each row has a slot of its own, and each place belongs to one slot or draft."""
        if self.pool is None:
            return
        own = self.slots[: self._batch.num_rows]
        assert own.all() and len(set(own.tolist())) == len(own), f"rows share slots, or have none: {own}"
        assert not self.slots[self._batch.num_rows :].any(), "an empty row has a slot"
        places = np.sort(np.concatenate((self.place, self._draft_places.ravel())))
        assert (places == np.arange(len(places))).all(), "two slots have the same place"
