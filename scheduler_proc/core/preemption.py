"""Preemption: chooses the victim for another request and returns it to the waiting queue."""

from collections.abc import Collection

from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.step import StepPlan
from quire.scheduler_proc.requests.reasons import PreemptReason, WaitReason
from quire.scheduler_proc.requests.request import Request


class Preemption:
    """Chooses victims, withdraws their rows from the plan, frees their blocks, and returns them to the queue.

    Among the requests that may be preempted, the victim is the one whose loss costs least: the fewest tokens that it
    would compute again. The oldest request with the lowest priority, the first in the order of the queue, is preempted
    last: it advances until it ends, and then another one is the oldest, so all requests end.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._table = core.table
        self._kv = core.kv

    def preempt(self, victim: Request, plan: StepPlan, beneficiary: Request | None, reason: PreemptReason) -> None:
        """Free the victim's blocks and return it to its old place in the queue.

        The victim recomputes all its tokens except prefix cache hits. A victim over its account's share loses its
        place, because it would otherwise be ahead of the request that it was preempted for.
        """
        # First of all: the row names blocks that are about to be free.
        plan.withdraw(victim)
        plan.preempted.append(victim)
        if victim is beneficiary:
            reason = PreemptReason.ITSELF
        if reason is PreemptReason.OVER_SHARE:
            victim.turn = -1
        beneficiary_id = "" if beneficiary is None else beneficiary.request_id
        self._core.decisions.preempted(plan.step, victim, reason, beneficiary_id)
        self._table.preempt(victim)
        self._kv.free(victim)
        self._core.stats.num_preemptions += 1

    def victim(self) -> tuple[Request, PreemptReason]:
        """Return the running request to preempt when too few blocks are free.

        The oldest is spared first of all, so that it ends. Then features spare what they protect. Among the rest, a
        request of an account with more than its share goes first, although its loss may cost more.
        """
        equals = self._of_lowest_priority(self._table.running.values())
        # Without a request that is never preempted, two requests that do not fit together would preempt each other for
        # ever.
        oldest = min(equals, key=self._table.waiting.key)
        candidates = [request for request in equals if request is not oldest] or equals
        by_priority = self._table.waiting.policy == "priority"
        reason = PreemptReason.LOWEST_PRIORITY if by_priority else PreemptReason.LEAST_LOSS
        for feature in self._core.calls.spare:
            candidates, decisive = feature.spare(candidates)
            reason = decisive or reason
        victim = self.choose(candidates)
        for feature in self._core.calls.over_share:
            heaviest = feature.over_share(candidates)
            if heaviest and (other := self.choose(heaviest)) is not victim:
                return other, PreemptReason.OVER_SHARE
        return victim, reason

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
        """Preempt for a batch slot: by priority, or from an account with more rows than its share."""
        return self.by_priority(plan, request) or any(
            self._claim(plan, request, feature.victims(request, plan.config)) for feature in self._core.calls.victims
        )

    def for_blocks(self, plan: StepPlan, request: Request, reason: WaitReason) -> bool:
        """Preempt for blocks: by priority, or from an account with more blocks than its share.

        Blocks that a feature reserves are not claimed: a running request would lose its own for contents that only may
        be used again.
        """
        if self.by_priority(plan, request):
            return True
        if reason not in (WaitReason.KV_BLOCKS, WaitReason.FULL_SEQUENCE):
            return False
        return any(self._claim(plan, request, feature.victims(request)) for feature in self._core.calls.victims)

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
