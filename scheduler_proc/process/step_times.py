"""The parts of a step's time, as histograms of seconds."""

import msgspec

from quire.protocol.wire.front_end_messages import Statistics
from quire.scheduler_proc.kv.block_metrics import Observations

BOUNDS = (
    *(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02),
    *(0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)


class StepObservations:
    """One observation per step and part; the caller measures.

    Attributes:
        schedule: to decide a step and send it to the workers.
        worker: from then, or from the previous result if that is later, to the step's result.
        update: to apply the result.
        reply: to send the tokens of a turn to the front ends.
    """

    def __init__(self) -> None:
        self.schedule, self.worker = Observations(BOUNDS), Observations(BOUNDS)
        self.update, self.reply = Observations(BOUNDS), Observations(BOUNDS)

    def result(self, worker: float | None, update: float) -> None:
        """Record a result. ``worker``: None for one that belongs to no step."""
        if worker is not None:
            self.worker.observe(worker)
            self.update.observe(update)

    def add_to(
        self,
        statistics: Statistics,
        *,
        num_trace_lines_lost: int,
        num_slow_steps: int,
        num_invalid_draft_tokens: int,
        block_size: int,
    ) -> Statistics:
        """Return the statistics with the histograms and the other figures of this process."""
        return msgspec.structs.replace(
            statistics,
            num_trace_lines_lost=num_trace_lines_lost,
            num_slow_steps=num_slow_steps,
            num_invalid_draft_tokens=num_invalid_draft_tokens,
            block_size=block_size,
            step_schedule=self.schedule.histogram(),
            step_worker=self.worker.histogram(),
            step_update=self.update.histogram(),
            step_reply=self.reply.histogram(),
        )
