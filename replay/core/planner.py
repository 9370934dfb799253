"""A Planner that schedules steps as another engine would."""

from collections.abc import Collection
from operator import attrgetter

from quire.replay.core.policies import Policies
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.planner import Planner
from quire.scheduler_proc.core.preemption import Preemption
from quire.scheduler_proc.core.step import StepPlan
from quire.scheduler_proc.kv.coordinator import GroupBlocks
from quire.scheduler_proc.requests.reasons import PreemptReason
from quire.scheduler_proc.requests.request import Request

_by_order = attrgetter("order")


class ImitatingPreemption(Preemption):
    """A Preemption that follows ``Policies``."""

    def __init__(self, core: Core, policies: Policies) -> None:
        super().__init__(core)
        self._policies = policies

    def by_priority(self, plan: StepPlan, request: Request, among: Collection[Request] | None = None) -> bool:
        return self._policies.priority_preempts and super().by_priority(plan, request, among)

    def victim(self) -> tuple[Request, PreemptReason]:
        if self._policies.least_loss:
            return super().victim()
        return self.choose(self._table.running.values()), PreemptReason.YOUNGEST

    def choose(self, candidates: Collection[Request]) -> Request:
        if self._policies.least_loss:
            return super().choose(candidates)
        fcfs = self._table.waiting.policy == "fcfs"
        return max(candidates, key=_by_order if fcfs else self._table.waiting.key)


class ImitatingPlanner(Planner):
    """A Planner that follows ``Policies``."""

    def __init__(self, core: Core, policies: Policies) -> None:
        super().__init__(core)
        self.preemption = ImitatingPreemption(core, policies)
        self._policies = policies

    def has_room_for_prompt(self, request: Request, hits: GroupBlocks, reserved: int) -> bool:
        return not self._policies.admit_whole_prompts or super().has_room_for_prompt(request, hits, reserved)

    def schedule_rows(self, plan: StepPlan, prefills: list[Request], decodes: list[Request]) -> None:
        if prefills and not self._policies.decodes_first:
            self._schedule_in_order(plan, prefills[0].order)
        else:
            super().schedule_rows(plan, prefills, decodes)

    def _schedule_in_order(self, plan: StepPlan, first: int) -> None:
        """Schedule all running requests in order of admission, prefills included.

        ``first`` is the position of the earliest prefill. Requests in steady decode after it leave steady decode,
        because the budget may be exhausted before them.
        """
        later = [r for r in self.steady_decode.batch.values() if r.order > first and r not in plan.grown]
        plan.budget += len(later)
        for request in later:
            self.table.leave_steady(request)
        plan.bound_prefill(len(self.steady_decode))
        for request in sorted(self.table.computed(), key=_by_order):
            if request.num_tokens_to_compute > 1 or not request.on_worker:
                self.schedule_prefill(plan, request, plan.prefill_budget)
            else:
                self.schedule_decodes(plan, [request])
