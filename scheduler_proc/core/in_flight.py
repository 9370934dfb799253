"""Steps in flight: sent, not yet answered."""

from collections import deque
from collections.abc import Callable

import numpy as np

from quire.protocol.config import EngineConfig
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.scheduler_proc.messages.results import (
    DueRows,
    Sampled,
    WorkerFault,
    check_handles,
    check_side,
    check_tokens,
)
from quire.scheduler_proc.messages.steps import InFlightStep, StepRow
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.requests.steady_decode import SteadyBatch

NO_HANDLES = np.zeros(0, np.int32)


class StepsInFlight:
    """The queue of steps in flight, and the row order of the last result that contained handles."""

    def __init__(self, config: EngineConfig, due_rows: Callable[[StepRow], DueRows | None]) -> None:
        """``due_rows``: as of ``Feature``, for a row of a request that generates nothing."""
        self.records: deque[InFlightStep] = deque()
        self.handles: Int32 = NO_HANDLES
        """Handles of the last result that contained handles; they apply to results without."""
        self._positions: dict[int, int] | None = {}
        self._config = config
        self._due_rows = due_rows
        self.verified: SteadyBatch | None = None
        """The steady batch if no other request sampled in the last result; otherwise None."""

    def __len__(self) -> int:
        return len(self.records)

    def set_handles(self, handles: Int32) -> None:
        """Use ``handles`` for all following results without handles."""
        self.handles, self._positions = handles, None

    def left_steady(self, request: Request) -> None:
        """Give a request that has left steady decode rows of its own in the steps since it joined."""
        for record in self.records:
            if record.step > request.joined_step:
                record.rows[request.handle] = StepRow(request, 1, (), samples=True)

    def position_of(self, handle: int) -> int:
        """Return the index of ``handle`` in ``handles``."""
        if self._positions is None:
            self._positions = dict(zip(self.handles.tolist(), range(len(self.handles)), strict=True))
        return self._positions[handle]

    def match(self, output: ModelRunnerOutput, *, is_recorded: bool = False) -> tuple[InFlightStep, Sampled]:
        """Validate the result of the oldest step; return that step, which the caller must remove, and its tokens.

        Args:
            is_recorded: the result is from a trace, which has no rows beside tokens.

        Raises:
            WorkerFault: ``output`` cannot be the result of the oldest step; nothing has changed.
        """
        record = self.expected_step(output.step)
        tokens = NO_HANDLES if output.tokens is None else output.tokens
        handles = self.handles if output.handles is None else output.handles
        # The same mapping object means the same members, because a shared batch is copied before it changes: handles
        # were already checked against it, and a step costs O(1) while the batch is unchanged.
        if output.handles is not None or not record.only_steady or record.steady is not self.verified:
            check_handles(record, output, handles)
        check_tokens(record, output, handles, tokens, self._config.model.vocab_size)
        due = {row.request.handle: self._due_rows(row) for row in record.without_tokens if not is_recorded}
        if output.side or due:
            check_side(record, output, handles, self._config.model, due)
        if output.handles is not None:
            self.set_handles(output.handles)
        self.verified = record.steady if record.only_steady else None
        return record, Sampled.of(output, handles, tokens)

    def expected_step(self, step: int) -> InFlightStep:
        if not self.records or self.records[0].step != step:
            expected = self.records[0].step if self.records else "none"
            raise WorkerFault(f"unexpected result of step {step}, expected {expected}", "step")
        return self.records[0]

    def drop_all(self) -> list[InFlightStep]:
        """Remove and return all steps in flight, which will not be answered."""
        dropped = list(self.records)
        self.records.clear()
        return dropped
