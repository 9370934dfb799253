"""Planner: fills the token budget of the next step, first with running requests, then with waiting ones."""

from collections.abc import Iterable

from quire.protocol.config import EngineConfig
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.preemption import Preemption
from quire.scheduler_proc.core.step import StepPlan
from quire.scheduler_proc.kv.coordinator import GroupBlocks
from quire.scheduler_proc.kv.decode_blocks import SteadyBlockAllocator
from quire.scheduler_proc.kv.pressure import Pressure
from quire.scheduler_proc.messages.steps import StepRow
from quire.scheduler_proc.requests.reasons import KEPT_REASONS, LASTING_REASONS, Decision, WaitReason
from quire.scheduler_proc.requests.request import Request, RequestStatus


class Planner:
    """Plans steps: schedules tokens and KV blocks, admits, preempts, and records why requests wait.

    Moves requests between the lists of the RequestTable, and allocates and frees blocks. It does not change the
    progress of requests, so a row can be withdrawn until the plan is committed.

    Attributes:
        decode_blocks: fast path of block allocation for requests in steady decode.
    """

    def __init__(self, core: Core) -> None:
        self.core = core
        self.calls = core.calls
        self.table = core.table
        self.steady_decode = core.table.steady_decode
        self.kv = core.kv
        self.decode_blocks = SteadyBlockAllocator(core.kv)
        self._decisions = core.decisions
        self._pressure = Pressure(core.kv.pool)
        self.preemption = Preemption(core)
        self._refused: tuple[object, ...] = (None,)
        self._refusal: WaitReason | None = None

    @property
    def config(self) -> EngineConfig:
        return self.core.config

    def plan(self, step: int, pause: str) -> StepPlan:
        """Return the plan of step ``step``.

        There are no prefill and decode phases: a request has one position to compute in decode, more in a prefill.

        Args:
            pause: if not empty, no request is admitted.
        """
        plan = self._fill(step, pause)
        if plan.rows or self.steady_decode.batch:
            return plan
        for feature in self.calls.give_way:
            for _ in feature.give_way():
                plan = self._fill(step, pause)
                if plan.rows or self.steady_decode.batch:
                    return plan
        return plan

    def _fill(self, step: int, pause: str) -> StepPlan:
        """Return a plan that was filled in an order in which each part may rely on the ones before.

        1. Features settle what changed since the last step, so that no row is given to what waits for others.
        2. Running requests before waiting ones: they hold blocks, and each step that leaves them out keeps these from
           everyone else. Among them decodes before prefills: their clients wait for the next token.
        3. Hashes of blocks that the step fills are published only when its rows are final, because a withdrawn row
           would leave names of blocks that are never written. If waiting requests can preempt running ones, that is
           after all waiting requests were considered; otherwise before, so that these find the blocks of this step.
        4. Last, what needs certainty about the rows of this step.
        """
        # Most engines have no feature for these hooks: then a step pays for no comprehension.
        calls, config = self.calls, self.config
        budgets = [feature.budget() for feature in calls.budget] if calls.budget else ()
        chunks = [feature.chunk for feature in calls.chunk] if calls.chunk else ()
        plan = StepPlan(step, config, self.kv, budgets, chunks)
        can_claim = config.scheduling_policy == "priority" or any(each.claims() for each in calls.claims)
        for feature in calls.begin_plan:
            feature.begin_plan(plan)
        self._schedule_running(plan)
        plan.keep_free = self._keep_free
        for feature in calls.after_running:
            feature.after_running(plan, is_paused=bool(pause))
        if not can_claim:
            self._cache_rows(plan)
        if self.table.waiting:
            self._schedule_waiting(plan, pause)
        if can_claim:
            self._cache_rows(plan)
        for feature in calls.after_waiting:
            feature.after_waiting(plan, is_paused=bool(pause))
        return plan

    def _schedule_running(self, plan: StepPlan) -> None:
        """Schedule decoding requests, then partial prefills, each in order of admission."""
        evicted = self.kv.pool.num_evicted_blocks
        # Steady decode takes a token for each of its members without asking. With fewer tokens than requests that would
        # be decided by who joined, so all compete again in order of admission.
        if plan.budget < len(self.table.running):  # less than one token for each: the order of admission decides
            for request in list(self.steady_decode.batch.values()):
                self.table.leave_steady(request)
        # Before any row is scheduled: a request whose last token is in flight would get a row that nothing waits for,
        # and would keep its place in the batch for a step longer.
        self.table.move_to_leaving()
        for feature in self.calls.before_rows:
            feature.before_rows()
        self._handle_due(plan)
        plan.budget -= len(self.steady_decode.batch)
        self.schedule_rows(plan, *self.table.to_compute())
        self.note_evictions(plan, evicted, None)

    def schedule_rows(self, plan: StepPlan, prefills: list[Request], decodes: list[Request]) -> None:
        """Schedule running requests outside of steady decode. Both lists are in order of admission."""
        self.schedule_decodes(plan, decodes)
        if prefills or self.table.waiting:
            plan.bound_prefill(len(self.steady_decode))
        self._schedule_prefills(plan, prefills)

    def _handle_due(self, plan: StepPlan) -> None:
        """Handle requests in steady decode that are due.

        A request that needs a block gets one; a request that may have drafts leaves steady decode. The fast path of
        allocation is used if blocks suffice for all and no other decode competes for them. Otherwise the due requests
        leave steady decode, are scheduled like others, and join it again.
        """
        table, due = self.table, self.steady_decode.due(plan.step)
        if not due:
            return
        plan.last = [r for r in due if r.last_step == plan.step]
        for request in [r for r in due if r.leave_step == plan.step < r.last_step]:
            table.leave_steady(request)
        due = [r for r in due if r.block_step == plan.step]
        if not due:
            return
        # Both conditions keep the order of allocation: with few blocks, or with other decodes, the last block must go
        # to the request that was admitted first, whichever way it is scheduled.
        if self.decode_blocks.can_allocate(len(due)) and not table.to_compute()[1]:
            plan.grown, plan.new_blocks = due, self.decode_blocks.allocate(due)
            self.steady_decode.mark_handled(due, plan.step)
        else:
            for request in due:
                table.leave_steady(request)

    def schedule_decodes(self, plan: StepPlan, decodes: list[Request]) -> None:
        """Schedule one token for each request, and drafts only from the budget that remains after that."""
        num_decoding = len(self.steady_decode.batch) + len(decodes)
        wanted: Iterable[int] = [0] * len(decodes)
        for feature in self.calls.speculate:  # also without decodes: the choice must not depend on what joins
            wanted = feature.speculate(decodes, num_decoding, plan.step)
        if not decodes:
            return
        for served, (request, num_drafts) in enumerate(zip(decodes, wanted, strict=True)):
            self._schedule_decode(plan, request, min(num_drafts, plan.budget - (len(decodes) - served)))

    def _schedule_decode(self, plan: StepPlan, request: Request, most_drafts: int) -> None:
        ahead = request.max_total_tokens - request.num_tokens - request.num_output_placeholders
        if ahead > 0 and plan.budget > 0:  # ahead == 0: the request may end if all drafts in flight are accepted
            drafts = max(min(most_drafts, ahead - 1), 0)
            self._allocate(plan, StepRow(request, 1 + drafts, None, drafts))

    def _schedule_prefills(self, plan: StepPlan, prefills: list[Request]) -> None:
        """Schedule prefills in order of admission, each from its part of the budget if a feature divides it."""
        if not prefills:
            return
        found = (feature.divide(plan, prefills) for feature in self.calls.divide)
        parts = next((each for each in found if each is not None), None)
        for request in prefills:
            self.schedule_prefill(plan, request, plan.prefill_budget if parts is None else parts.left(request))
            if parts is not None and request.handle in plan.rows:
                parts.take(request, plan.rows[request.handle].num_tokens)

    def schedule_prefill(self, plan: StepPlan, request: Request, most: int) -> None:
        """Schedule at most ``most`` positions of a prefill."""
        wanted = request.num_tokens_to_compute
        for feature in self.calls.most_tokens:
            if (limit := feature.most_tokens(request)) is not None:
                wanted = min(wanted, limit)
        num_tokens = plan.prefill_tokens(request, wanted, request.num_computed_tokens, most)
        if num_tokens > 0:
            self._allocate(plan, StepRow(request, num_tokens, None, is_prefill=True))

    def _allocate(self, plan: StepPlan, row: StepRow) -> None:
        """Allocate the blocks of a running request's row and add it to the plan.

        If too few blocks are free, drafts are dropped first, then what is kept for waiting requests is released, then
        other requests are preempted. The row is dropped if the request itself was preempted.
        """
        request = row.request
        while request.status is RequestStatus.RUNNING:
            row.new_blocks = self.kv.allocate_slots(request, row.num_tokens)
            if row.new_blocks is not None:
                plan.add(row)
                return
            # Drafts are a guess. They are given up before anything is taken from another request for them.
            if row.num_drafts:
                row.num_tokens, row.num_drafts = row.num_tokens - row.num_drafts, 0
                continue
            # What is kept for a waiting request can be loaded again; a preempted request computes all of its tokens
            # again.
            if self.kv.holds.end_one_kept(request.handle):
                continue
            victim, reason = self.preemption.victim()
            # The request would preempt itself for blocks that will be free as soon as a copy is answered.
            if victim is request and self._yields(others_run=False):
                return  # the blocks that copies in flight hold suffice, or the next try is without such copies
            self.preemption.preempt(victim, plan, request, reason)

    def _cache_rows(self, plan: StepPlan) -> None:
        """Publish the hashes of blocks that the step fills. Rows must be final: unwritten blocks must not be found."""
        self.decode_blocks.cache(plan.grown)
        for row in plan.rows.values():
            if row.num_tokens > 1 or any(row.new_blocks or ()):
                self._cache_written(row.request, row.num_tokens)

    def _cache_written(self, request: Request, num_new_tokens: int) -> None:
        self.kv.cache_blocks(request, min(request.num_computed_tokens + num_new_tokens, request.num_tokens))

    def _yields(self, *, others_run: bool) -> bool:
        return any(feature.yields(others_run=others_run) for feature in self.calls.yields)

    def _schedule_waiting(self, plan: StepPlan, pause: str) -> None:
        if plan.alone is not None:
            self.schedule_alone(plan, pause, plan.alone)
            return
        while self.table.waiting:
            request = self.table.waiting.peek_request()
            reason = WaitReason.PAUSED if pause else self.admission_obstacle(plan, request)
            # One request that cannot be admitted stops those behind it. Otherwise small requests would pass a large one
            # again and again, and it would never find enough blocks.
            if reason is not None and request in self.table.waiting:  # otherwise it is held: the next one may run
                self._waits_for(plan, request, reason)
                return

    def _waits_for(self, plan: StepPlan, request: Request, reason: WaitReason) -> None:
        if request.wait_reason is not reason:
            self._decisions.note(Decision(plan.step, "wait", request.request_id, reason))
            request.wait_reason = reason

    def schedule_alone(self, plan: StepPlan, pause: str, alone: Request) -> None:
        """Admit one request and no other."""
        if alone in self.table.waiting:
            reason = WaitReason.PAUSED if pause else self.admit(plan, alone, others_preempted=True)
            if reason is not None:
                self._waits_for(plan, alone, reason)
        first = self.table.waiting.peek_request() if self.table.waiting else None
        if first is not None and first is not alone:
            self._waits_for(plan, first, plan.others_wait)

    def admission_obstacle(self, plan: StepPlan, request: Request) -> WaitReason | None:
        """Call ``admit`` for the first waiting request, unless nothing has changed since it returned a reason to wait.

        Without this, a full batch would look up the hits of the first waiting prompt in each step. What may change the
        answer: the request itself, the pool, the rows, the budgets, and what features say by their ``version``. The
        number of running requests represents their identity: they change without the pool only when one leaves.
        """
        state = (
            request,
            request.num_tokens,
            request.num_in_flight,
            self.kv.pool.num_changes,
            len(self.table.running),
            plan.budget,
            plan.prefill_budget,
            len(plan.preempted),
            self.config,
            *[feature.version(request) for feature in self.calls.version],
        )
        if state == self._refused:
            return self._refusal
        reason = self.admit(plan, request)
        if (reason in LASTING_REASONS or reason is WaitReason.RESULT_IN_FLIGHT) and any(
            feature.admit_before(plan, request, reason) for feature in self.calls.admit_before
        ):
            return None
        if reason in KEPT_REASONS:
            self._refused, self._refusal = state, reason
            self.core.refused = request if reason in LASTING_REASONS else None
        return reason

    def admit(self, plan: StepPlan, request: Request, *, others_preempted: bool = False) -> WaitReason | None:
        """Admit a waiting request, or return its reason to wait. ``others_preempted``: they made room for this one.

        The order of the checks is that of their cost, and each relies on those before: features, which may hold the
        request, come before anything is preempted for it; hits are looked up when there is a row; blocks are allocated
        last, because nothing gives them back when a later check fails.
        """
        # A step that had to preempt has no room. Admitting in it would take the blocks that were just freed, and the
        # next step would preempt once more.
        if len(plan.preempted) > plan.num_claimed and not others_preempted:
            return WaitReason.PREEMPTING
        if request.awaits_result:  # recently preempted: its token in flight belongs to the tokens to recompute
            return WaitReason.RESULT_IN_FLIGHT
        for feature in self.calls.obstacle:
            if (held := feature.obstacle(request)) is not None:
                return held
        while (reason := plan.lacks_tokens()) is not None:
            if not self.preemption.for_tokens(plan, request):
                return reason
        if len(self.table.running) >= self.config.max_num_seqs and not self.preemption.for_a_row(plan, request):
            return WaitReason.MAX_NUM_SEQS
        while self.table.running and self._pressure.is_high(self.config):
            if not self.preemption.by_priority(plan, request):
                return WaitReason.KV_PRESSURE
        hits, num_hit_tokens = self.kv.get_computed_blocks(request)
        step_tokens = min(plan.prefill_limit, self.config.long_prefill_token_threshold or plan.prefill_limit)
        until = 0
        for feature in self.calls.hits:
            found = feature.hits(request, hits, num_hit_tokens, step_tokens)
            if isinstance(found, WaitReason):
                return found
            until = min(found or until, until or found or 0)
        while (reason := plan.lacks_room(request, num_hit_tokens)) is not None:
            if not self.preemption.for_tokens(plan, request):
                return reason
        num_tokens = plan.prefill_tokens(request, (until or request.num_tokens) - num_hit_tokens, num_hit_tokens)
        if num_tokens < 1 and until:  # what must be computed in one step goes beyond: then all of it
            num_tokens = plan.prefill_tokens(request, request.num_tokens - num_hit_tokens, num_hit_tokens)
        if num_tokens < 1:  # it has no room in this step
            return WaitReason.TOKEN_BUDGET
        evicted = self.kv.pool.num_evicted_blocks
        while (reason := self._lacks_blocks(request, hits, num_hit_tokens, num_tokens)) is not None:
            if not (self.kv.holds.end_one_kept(request.handle) or self.preemption.for_blocks(plan, request, reason)):
                self._yields(others_run=bool(self.table.running))
                return reason
        self.note_evictions(plan, evicted, request)
        self._begin(plan, request, num_hit_tokens, num_tokens)
        return None

    def _begin(self, plan: StepPlan, request: Request, num_hit_tokens: int, num_tokens: int) -> None:
        """Run a request that has its blocks, from this step on if its features let it."""
        self.table.start(request)
        self.kv.holds.end_kept(request.handle)
        request.begin(num_hit_tokens)
        is_first = request.num_cached_tokens < 0
        if is_first:
            request.num_cached_tokens, request.admitted = num_hit_tokens, self.kv.pool.now
            self.core.stats.prefix_cache_queries += request.num_tokens
            self.core.stats.prefix_cache_hit_tokens += num_hit_tokens
            self.table.waiting.charge_for(request, request.num_tokens - num_hit_tokens)
        self.core.hooks.admitted(request, num_hit_tokens)
        self._decisions.follow(request, "scheduled", num_tokens=num_hit_tokens)
        for feature in self.calls.admitted:  # before hashes are published: one looks for what the device lacks
            feature.admitted(request, num_hit_tokens, is_first=is_first)
        if all(feature.may_run(request) for feature in self.calls.may_run):
            plan.add(StepRow(request, num_tokens, None, is_prefill=True))
            self._cache_written(request, num_tokens)

    def has_room_for_prompt(self, request: Request, hits: GroupBlocks, reserved: int) -> bool:
        """Whether the pool has blocks for all known tokens of a request of which this step computes only a chunk."""
        return self.kv.can_fit_full_sequence(request, request.num_tokens, hits, keep_free=reserved)

    def _lacks_blocks(
        self, request: Request, hits: GroupBlocks, num_hit_tokens: int, num_tokens: int
    ) -> WaitReason | None:
        """Allocate the blocks for ``num_tokens`` positions after the hits, or return the reason to wait.

        There must be room for all known tokens. Otherwise the request would be preempted before its prefill is
        complete, again and again.
        """
        if self.config.reserve_full_sequence and not self.kv.can_fit_full_sequence(
            request, request.max_total_tokens - 1, hits
        ):
            return WaitReason.FULL_SEQUENCE
        reserves = [found for each in self.calls.reserve if (found := each.reserve(request)) is not None]
        reason = reserves[0].reason if reserves else WaitReason.KV_BLOCKS
        reserved = sum(each.num_blocks for each in reserves)
        if num_hit_tokens + num_tokens < request.num_tokens and not self.has_room_for_prompt(request, hits, reserved):
            return reason
        keep_free = self._keep_free + reserved
        new_blocks = self.kv.allocate_slots(request, num_tokens, hits, num_hit_tokens, keep_free=keep_free)
        return reason if new_blocks is None else None

    @property
    def _keep_free(self) -> int:
        """Blocks that admission leaves free."""
        return self.kv.watermark_blocks if self.table.running else 0

    def note_evictions(self, plan: StepPlan, before: int, beneficiary: Request | None) -> None:
        if evicted := self.kv.pool.num_evicted_blocks - before:
            reason, request_id = ("decode", "") if beneficiary is None else ("admission", beneficiary.request_id)
            self._decisions.note(Decision(plan.step, "evict", "", reason, request_id, evicted))
