"""Which request gives way to another, and what becomes of it."""

from quire.scheduler_proc.core.request_table import RequestTable
from quire.scheduler_proc.core.statistics import Counters, RecentDecisions
from quire.scheduler_proc.core.step import StepPlan
from quire.scheduler_proc.core.tenants import TenantShares
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.requests.reasons import Decision, PreemptReason
from quire.scheduler_proc.requests.request import Request


class Preemption:
    """Chooses victims, takes their rows of the plan and their blocks, and sends them back to the queue."""

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
        """Take the victim's blocks; it waits in its old place and computes everything again, hits aside.

        One that was over its tenant's share keeps no place, or it would stand before those it had to give way to.
        """
        plan.withdraw(victim)
        plan.preempted.append(victim)
        if victim is beneficiary:
            reason = PreemptReason.ITSELF
        if reason is PreemptReason.OVER_SHARE:
            victim.turn = -1
        whose = "" if beneficiary is None else beneficiary.request_id
        self._decisions.note(Decision(plan.step, "preempt", victim.request_id, reason, whose))
        self._table.preempt(victim)
        self._kv.free(victim)
        self._stats.num_preemptions += 1

    def victim(self) -> tuple[Request, PreemptReason]:
        """The running request to preempt where blocks are short.

        FCFS: the last admitted, so that the oldest always gets on. Priority: the worst, among equals the latest.
        Of several tenants the one with the most blocks gives way, but no tenant's only request for another tenant's:
        the oldest of all gets on.
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
        """Under the priority policy a waiting request preempts a running one of a strictly worse number.

        Otherwise a long answer, or a long prompt, of little worth would keep it waiting to the end (priority
        inversion); among equals none gives way, or they would take turns for ever.

        Args:
            among: the candidates; None: all that run.
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
        """The same, among those whose prefill takes tokens of this step."""
        return self.by_priority(plan, request, [row.request for row in plan.rows.values() if row.is_prefill])

    def for_a_row(self, plan: StepPlan, request: Request) -> bool:
        """The same; and a tenant with fewer rows than its share may have one of a tenant with more."""
        return self.by_priority(plan, request) or self._claim(
            plan, request, self._tenants.can_claim_row(request, plan.config)
        )

    def for_blocks(self, plan: StepPlan, request: Request) -> bool:
        """The same for blocks."""
        if self.by_priority(plan, request):
            return True
        if self._table.num_tenants < 2:
            return False
        num_blocks = self._kv.num_blocks_for(request.num_tokens)
        return self._claim(plan, request, self._tenants.can_claim_blocks(request, num_blocks))

    def _claim(self, plan: StepPlan, request: Request, victim: Request | None) -> bool:
        """A request admitted in this very step stays: its content is named already, and must be written."""
        if victim is None or (victim.handle in plan.rows and plan.rows[victim.handle].new_blocks is None):
            return False
        self.preempt(victim, plan, request, PreemptReason.OVER_SHARE)
        plan.num_claimed += 1
        return True
