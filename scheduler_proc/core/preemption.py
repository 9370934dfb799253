"""Preemption: chooses the victim for another request and returns it to the waiting queue."""

from quire.scheduler_proc.core.request_table import RequestTable
from quire.scheduler_proc.core.statistics import Counters, RecentDecisions
from quire.scheduler_proc.core.step import StepPlan
from quire.scheduler_proc.core.tenants import TenantShares
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.requests.reasons import Decision, PreemptReason
from quire.scheduler_proc.requests.request import Request


class Preemption:
    """Chooses victims, withdraws their rows from the plan, frees their blocks, and returns them to the queue."""

    def __init__(
        self,
        table: RequestTable,
        kv: KVCacheManager,
        tenants: TenantShares,
        decisions: RecentDecisions,
        stats: Counters,
    ) -> None:
        self._table = table
        self._kv = kv
        self._tenants = tenants
        self._decisions = decisions
        self._stats = stats

    def preempt(self, victim: Request, plan: StepPlan, beneficiary: Request | None, reason: PreemptReason) -> None:
        """Free the victim's blocks and return it to its old place in the queue.

        The victim recomputes all its tokens except prefix cache hits. A victim over its tenant's share loses its
        place, because it would otherwise be ahead of the request that it was preempted for.
        """
        plan.withdraw(victim)
        plan.preempted.append(victim)
        if victim is beneficiary:
            reason = PreemptReason.ITSELF
        if reason is PreemptReason.OVER_SHARE:
            victim.turn = -1
        beneficiary_id = "" if beneficiary is None else beneficiary.request_id
        self._decisions.note(Decision(plan.step, "preempt", victim.request_id, reason, beneficiary_id))
        self._table.preempt(victim)
        self._kv.free(victim)
        self._stats.num_preemptions += 1

    def victim(self) -> tuple[Request, PreemptReason]:
        """Return the running request to preempt when too few blocks are free.

        FCFS: the last admitted, so that the oldest always makes progress. Priority: the highest number, among equals
        the latest. If several tenants have running requests, and some of them more than one: the last of these requests
        of the tenant with the most blocks.
        """
        running, key = self._table.running.values(), self._table.waiting.key
        fcfs = self._table.waiting.policy == "fcfs"
        last = next(reversed(running)) if fcfs else max(running, key=key)
        if len(self._table.rows) > 1:
            equals = running if fcfs else sorted((r for r in running if r.priority == last.priority), key=key)
            heaviest = self._tenants.heaviest(equals)
            if heaviest is not None and heaviest is not last:
                return heaviest, PreemptReason.OVER_SHARE
        return last, PreemptReason.YOUNGEST if fcfs else PreemptReason.LOWEST_PRIORITY

    def by_priority(self, plan: StepPlan, request: Request, among: list[Request] | None = None) -> bool:
        """Preempt a running request with a strictly higher priority number than ``request``, if the policy allows it.

        Without this, a long low-priority request would block ``request`` until it ends (priority inversion). Equals
        are not preempted, because they would preempt each other for ever.

        Args:
            among: the candidates, or None for all running requests.

        Returns whether a request was preempted.
        """
        candidates = self._table.running.values() if among is None else among
        if self._table.waiting.policy != "priority" or not candidates:
            return False
        victim = max(candidates, key=self._table.waiting.key)
        if victim.priority <= request.priority:
            return False
        self.preempt(victim, plan, request, PreemptReason.LOWEST_PRIORITY)
        return True

    def for_tokens(self, plan: StepPlan, request: Request) -> bool:
        """Preempt by priority among the requests whose prefill uses tokens of this step."""
        return self.by_priority(plan, request, [row.request for row in plan.rows.values() if row.is_prefill])

    def for_a_row(self, plan: StepPlan, request: Request) -> bool:
        """Preempt for a batch slot: by priority, or from a tenant with more rows than its share."""
        return self.by_priority(plan, request) or self._claim(
            plan, request, self._tenants.can_claim_row(request, plan.config)
        )

    def for_blocks(self, plan: StepPlan, request: Request) -> bool:
        """Preempt for blocks: by priority, or from a tenant with more blocks than its share."""
        if self.by_priority(plan, request):
            return True
        if self._table.num_tenants < 2:
            return False
        num_blocks = self._kv.num_blocks_for(request.num_tokens)
        return self._claim(plan, request, self._tenants.can_claim_blocks(request, num_blocks))

    def _claim(self, plan: StepPlan, request: Request, victim: Request | None) -> bool:
        """Preempt ``victim`` unless it was admitted in this step: its block hashes are already published.

        Returns whether it was preempted.
        """
        if victim is None or (victim.handle in plan.rows and plan.rows[victim.handle].new_blocks is None):
            return False
        self.preempt(victim, plan, request, PreemptReason.OVER_SHARE)
        plan.num_claimed += 1
        return True
