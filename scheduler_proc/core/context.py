"""What the parts of the core, and the features, share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from quire.protocol.config import EngineConfig
from quire.protocol.wire.front_end_messages import EndReason, Rejected, SchedulerToFrontEnd, Statistics
from quire.protocol.wire.worker_messages import SideJob
from quire.scheduler_proc.core.feature import Calls
from quire.scheduler_proc.core.in_flight import StepsInFlight
from quire.scheduler_proc.core.step import StepPlan
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.messages.arrivals import Refusal
from quire.scheduler_proc.messages.outputs import OutputCollector
from quire.scheduler_proc.requests.decisions import Counters, RecentDecisions
from quire.scheduler_proc.requests.hooks import SchedulerHooks
from quire.scheduler_proc.requests.reasons import PreemptReason, WaitReason
from quire.scheduler_proc.requests.request import Request, RequestStatus
from quire.scheduler_proc.requests.request_table import RequestTable
from quire.scheduler_proc.requests.step_clock import StepClock


class Finish(Protocol):
    """``Results.finish``."""

    def __call__(
        self,
        request: Request,
        reason: EndReason,
        *,
        stop_reason: int | None = None,
        detail: str = "",
        num_output_tokens: int | None = None,
    ) -> None: ...


@dataclass(slots=True, eq=False)
class Core:
    """What the parts of the core and the features share. Its owner is the Scheduler.

    Attributes:
        config: can be replaced between two steps, for example with a smaller token budget. What must not change with
            it is read once, at construction.
        outputs: what the steps have for clients.
        replies: pending (client, message) pairs that belong to no step.
        side_jobs: what is to be sent to the workers.
        refused: the first waiting request when it was last not admitted for lack of rows or blocks.
        num_without_tokens: requests that have ended with a result other than tokens.
        finish: ends a request; every ending of an accepted request goes through it.
        reject: rejects a request that has no output yet: for its client, it was not accepted at all.
        admit: ``Planner.admit``; preempt: ``Preemption.preempt``; statistics: ``Scheduler.statistics``.
    """

    config: EngineConfig
    table: RequestTable
    kv: KVCacheManager
    in_flight: StepsInFlight
    decisions: RecentDecisions
    stats: Counters
    hooks: SchedulerHooks
    calls: Calls
    outputs: OutputCollector = field(default_factory=OutputCollector)
    replies: list[tuple[int, SchedulerToFrontEnd]] = field(default_factory=list)
    side_jobs: list[SideJob] = field(default_factory=list)
    refused: Request | None = None
    num_without_tokens: int = 0
    finish: Finish = field(init=False)
    reject: Callable[[Request, Rejected], None] = field(init=False)
    admit: Callable[[StepPlan, Request], WaitReason | None] = field(init=False)
    preempt: Callable[[Request, StepPlan, Request | None, PreemptReason], None] = field(init=False)
    statistics: Callable[[int, bool], Statistics] = field(init=False)

    @property
    def clock(self) -> StepClock:
        return self.table.steady_decode.clock

    @property
    def next_step(self) -> int:
        """The step that is being planned, or will be next."""
        return self.table.steady_decode.clock.sent + 1

    @property
    def num_results(self) -> int:
        """Number of output tokens, and of results other than tokens, since start: it grows while there is progress."""
        return self.stats.generation_tokens + self.num_without_tokens

    def fail(self, request: Request, why: Refusal) -> None:
        """End a request with an error: for its client it was not accepted at all, if it has not run."""
        if request.num_output_tokens or request.status is not RequestStatus.WAITING:
            self.finish(request, EndReason.ERROR, detail=f"{why.code}: {why.text}")
        else:
            self.reject(request, why.message(request.request_id))

    def remove(self, request: Request, status: RequestStatus) -> None:
        """Take a request out of all features and of the table. Its blocks must have been freed."""
        for feature in self.calls.ending:
            feature.ending(request)
        self.table.end(request, status)
        for feature in self.calls.ended:
            feature.ended(request)
