"""Preemption: chooses the victim for another request and returns it to the waiting queue."""

from collections.abc import Collection

from quire.scheduler_proc.core.request_table import RequestTable
from quire.scheduler_proc.core.statistics import Counters, RecentDecisions
from quire.scheduler_proc.core.step import StepPlan
from quire.scheduler_proc.core.tenants import TenantShares
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.requests.reasons import PreemptReason, WaitReason
from quire.scheduler_proc.requests.request import Request


class Preemption:
    """Chooses victims, withdraws their rows from the plan, frees their blocks, and returns them to the queue.

    Among the requests that may be preempted, the victim is the one whose loss costs least: the fewest tokens that it
    would compute again. The oldest request with the lowest priority, the first in the order of the queue, is preempted
    last: it advances until it ends, and then another one is the oldest, so all requests end.
    """

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
        self._decisions.preempted(plan.step, victim, reason, beneficiary_id)
        self._table.preempt(victim)
        self._kv.free(victim)
        self._stats.num_preemptions += 1

    def preempt_others(self, plan: StepPlan, suspect: Request) -> None:
        """Preempt all requests that need more steps, except the suspect."""
        for other in [request for request in self._table.running.values() if request is not suspect]:
            self._table.leave_steady(other)
            if not other.needs_no_more_steps:
                self.preempt(other, plan, suspect, PreemptReason.SUSPECT)

    def preempt_to_join(self, step: int, request: Request) -> None:
        """Return a request to the queue that has computed up to what it loads; the prefix cache keeps its blocks."""
        self._decisions.preempted(step, request, PreemptReason.JOINS_LOAD)
        self._table.preempt(request)
        self._kv.free(request)

    def victim(self) -> tuple[Request, PreemptReason]:
        """Return the running request to preempt when too few blocks are free.

        If several tenants have running requests, and some of them more than one: a request of the tenant with the most
        blocks. Its oldest request is spared too. Before these rules: with programs that are
        admitted, ``_of_last_programs``; with pins, requests of programs without one.
        """
        equals = self._of_lowest_priority(self._table.running.values())
        oldest = min(equals, key=self._table.waiting.key)
        candidates = [request for request in equals if request is not oldest] or equals
        if by_program := self._table.waiting.policy == "program":
            candidates = self._of_last_programs(candidates)
        elif pins := self._kv.pins:
            candidates = [each for each in candidates if each.program is None or each.program.number not in pins] or (
                candidates
            )
        victim = self.choose(candidates)
        if len(self._table.rows) > 1:
            heaviest = self._tenants.heaviest(candidates)
            if heaviest and (other := self.choose(heaviest)) is not victim:
                return other, PreemptReason.OVER_SHARE
        by_priority = self._table.waiting.policy == "priority"
        if by_program:
            return victim, PreemptReason.LAST_PROGRAM
        return victim, PreemptReason.LOWEST_PRIORITY if by_priority else PreemptReason.LEAST_LOSS

    def _of_last_programs(self, candidates: list[Request]) -> list[Request]:
        """Return the candidates whose programs are not admitted; without any, those of the youngest program."""
        others = [each for each in candidates if each.program is None or not each.program.is_admitted]
        if others:
            return others
        numbers = [0 if each.program is None else each.program.number for each in candidates]
        return [each for each, number in zip(candidates, numbers, strict=True) if number == max(numbers)]

    def choose(self, candidates: Collection[Request]) -> Request:
        """Return the victim among requests that may be preempted; under the priority policy one of the highest number.

        The tokens of shared blocks are not lost: the other holders keep them. A request that would free no block is
        the last choice. Among equal losses: the last admitted. O(candidates).
        """
        return min(self._of_lowest_priority(candidates), key=self._loss)

    def _of_lowest_priority(self, candidates: Collection[Request]) -> list[Request]:
        """Return the candidates with the highest number; under fcfs all."""
        if self._table.waiting.policy != "priority":
            return list(candidates)
        lowest = max(request.priority for request in candidates)
        return [request for request in candidates if request.priority == lowest]

    def _loss(self, request: Request) -> tuple[bool, int, int]:
        lost = request.num_computed_tokens - self._kv.num_shared_tokens(request)
        return lost <= 0, lost, -request.order

    def by_priority(self, plan: StepPlan, request: Request, among: Collection[Request] | None = None) -> bool:
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
        victim = self.choose(candidates)
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

    def for_blocks(self, plan: StepPlan, request: Request, reason: WaitReason) -> bool:
        """Preempt for blocks: by priority, or from a tenant with more blocks than its share; not for pins."""
        if self.by_priority(plan, request):
            return True
        if self._table.num_tenants < 2 or reason is WaitReason.PROGRAM_LIMIT:
            return False
        num_blocks = self._kv.num_blocks_for(request.num_tokens)
        return self._claim(plan, request, self._tenants.can_claim_blocks(request, num_blocks))

    def _claim(self, plan: StepPlan, request: Request, candidates: list[Request]) -> bool:
        """Preempt one of the ``candidates``, unless one of them has not been sent to the workers yet.

        If it was admitted in this step, its block hashes are already published, and it would pass the victim.

        Returns whether one was preempted.
        """
        if not candidates or not all(candidate.on_worker for candidate in candidates):
            return False
        self.preempt(self.choose(candidates), plan, request, PreemptReason.OVER_SHARE)
        plan.num_claimed += 1
        return True
