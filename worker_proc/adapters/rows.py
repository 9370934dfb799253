"""The adapter of each row, and the check that rows which run have theirs in a slot."""

import numpy as np

from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.worker_proc.batch.diff_check import After
from quire.worker_proc.batch.input_batch import InputBatch, StepRefused


class RowAdapters:
    """Owns the column of the rows' adapters. It is there without LoRA too, and then refuses every adapter.

    Attributes:
        numbers: int32 ``[max_rows]``: number of each row's adapter; 0 for none.
        slot_of: slot of each adapter that steps may use, by its number; changed in place.
    """

    def __init__(self, batch: InputBatch) -> None:
        self._batch = batch
        self.numbers = batch.column(np.int32, lambda new: new.adapter)
        self.slot_of: dict[int, int] = {}

    def require(self, step: SchedulerOutput, after: After) -> None:
        """Check that the adapter of each row that runs is in a slot, and is that of the row it is forked from.

        Raises:
            StepRefused: it is not.
        """
        numbers = after.column(self.numbers, lambda new: new.adapter)
        for handle, parent in step.forks:
            own, other = numbers[after.row(handle)], numbers[after.row(parent)]
            if own != other:
                raise StepRefused(
                    f"handle {handle} with adapter {own} cannot be forked from handle {parent} with adapter {other}"
                )
        for row in np.flatnonzero(((after.lengths > 0) | after.is_forked) & (numbers != 0)).tolist():
            if int(numbers[row]) not in self.slot_of:
                raise _without_slot(after.handle(row), numbers[row])

    def require_slot(self, row: int) -> None:
        """Raise StepRefused if the adapter of a row is in no slot."""
        if self.numbers[row] and int(self.numbers[row]) not in self.slot_of:
            raise _without_slot(int(self._batch.handles[row]), self.numbers[row])


def _without_slot(handle: int, number: int) -> StepRefused:
    return StepRefused(f"handle {handle} uses adapter {number}, which is in no slot")
