"""Recurrent states: ends chunks of prefills where a checkpoint is taken, and tells workers each request's slot."""

import msgspec
import numpy as np

from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.feature import Feature
from quire.scheduler_proc.core.step import StepPlan
from quire.scheduler_proc.kv.coordinator import GroupBlocks
from quire.scheduler_proc.requests.request import Request


class States(Feature):
    """The part of steps in ``kv/states.py``, which owns the slots."""

    name = "states"

    def __init__(self, core: Core) -> None:
        self._slots = core.kv.states
        self.is_enabled = self._slots is not None

    def version(self, request: Request) -> object:
        return None if self._slots is None else self._slots.pool.num_changes

    def hits(self, request: Request, hits: GroupBlocks, num_hit_tokens: int, step_tokens: int) -> int | None:
        assert self._slots is not None
        return next(iter(self._slots.stops(request, num_hit_tokens)), None)

    def most_tokens(self, request: Request) -> int | None:
        assert self._slots is not None
        stop = self._slots.next_stop(request.handle, request.num_computed_tokens)
        return stop - request.num_computed_tokens if stop else None

    def sending(self, plan: StepPlan, diff: SchedulerOutput) -> SchedulerOutput:
        slots = self._slots
        assert slots is not None
        copies, new = slots.take(), diff.new_requests
        if not (copies or new):
            return diff
        own = np.array([slots.slot(request.handle) for request in new], np.int32) if new else None
        fresh = [slots.slot(request.handle) for request in new if not request.num_computed_tokens]
        return msgspec.structs.replace(diff, state_slots=own, state_copies=copies, blocks_to_zero=fresh)
