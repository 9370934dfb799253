"""Planner: fills the token budget of the next step, first with running requests, then with waiting ones."""

from collections import Counter
from collections.abc import Callable

from quire.protocol.config import EngineConfig
from quire.scheduler_proc.adapters.adapters import Adapters
from quire.scheduler_proc.core.beams import Beams
from quire.scheduler_proc.core.decode_blocks import SteadyBlockAllocator
from quire.scheduler_proc.core.forks import Forks
from quire.scheduler_proc.core.preemption import Preemption
from quire.scheduler_proc.core.request_table import RequestTable
from quire.scheduler_proc.core.statistics import Counters, RecentDecisions
from quire.scheduler_proc.core.step import StepPlan, StepRow
from quire.scheduler_proc.core.suspects import Suspects
from quire.scheduler_proc.core.tenants import TenantShares, equal_parts
from quire.scheduler_proc.core.transfers import Transfers
from quire.scheduler_proc.kv.coordinator import GroupBlocks
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.kv.pressure import Pressure
from quire.scheduler_proc.programs.programs import Programs
from quire.scheduler_proc.requests.drafting import DraftPolicy
from quire.scheduler_proc.requests.hooks import SchedulerHooks
from quire.scheduler_proc.requests.reasons import Decision, WaitReason
from quire.scheduler_proc.requests.request import Request, RequestStatus

_HELD = (WaitReason.LOADING, WaitReason.ADAPTER)
"""Reasons for which a request is held, so that the next one is considered."""
_LASTING = (WaitReason.MAX_NUM_SEQS, WaitReason.KV_BLOCKS, WaitReason.PROGRAM_LIMIT, WaitReason.FULL_SEQUENCE)
"""Reasons to wait that do not depend on which prefills a step has."""


class Planner:
    """Plans steps: schedules tokens and KV blocks, admits, preempts, and records why requests wait.

    Moves requests between the lists of the RequestTable, and allocates and frees blocks. It does not change the
    progress of requests, so a row can be withdrawn until the plan is committed.

    Attributes:
        config: can be replaced between two steps, for example with a smaller token budget.
        decode_blocks: fast path of block allocation for requests in steady decode.
    """

    def __init__(
        self,
        config: EngineConfig,
        table: RequestTable,
        kv: KVCacheManager,
        drafting: DraftPolicy,
        decisions: RecentDecisions,
        stats: Counters,
        suspects: Suspects,
        hooks: SchedulerHooks,
        transfers: Transfers,
        forks: Forks,
        beams: Beams,
        adapters: Adapters,
        programs: Programs,
        *,
        preemption_class: Callable[..., Preemption] = Preemption,
    ) -> None:
        self.config = config
        self.table = table
        self.steady_decode = table.steady_decode
        self.kv = kv
        self.decode_blocks = SteadyBlockAllocator(kv)
        self.tenants = TenantShares(table, kv)
        self._drafting = drafting
        self._decisions = decisions
        self._stats = stats
        self._suspects = suspects
        self._hooks = hooks
        self._transfers = transfers
        self._forks = forks
        self._beams = beams
        self._adapters = adapters
        self._programs = programs
        self._pressure = Pressure(kv.pool)
        self.preemption = preemption_class(table, kv, self.tenants, decisions, stats)
        self._refused: tuple[object, ...] = (None,)
        self._refusal: WaitReason | None = None

    def plan(self, step: int, pause: str) -> StepPlan:
        """Return the plan of step ``step``.

        There are no prefill and decode phases: a request has one position to compute in decode, more in a prefill.

        Args:
            pause: if not empty, no request is admitted.
        """
        plan = self._fill(StepPlan(step, self.config, self.kv), pause)
        num_waiting = len(self._adapters.turns.waiting)
        while num_waiting and not (plan.rows or self.steady_decode.batch):
            self._adapters.pass_turns()
            num_waiting, plan = num_waiting - 1, self._fill(StepPlan(step, self.config, self.kv), pause)
        return plan

    def _fill(self, plan: StepPlan, pause: str) -> StepPlan:
        # If waiting requests can preempt running ones, no row is final before all waiting requests were considered.
        can_claim = self.config.scheduling_policy == "priority" or self.table.num_tenants > 1
        self._beams.settle()
        if (suspect := self._suspects.alone) is not None:
            self.preemption.preempt_others(plan, suspect)
        self._schedule_running(plan)
        keep_free = self._keep_free
        self._forks.plan(plan, keep_free, paused=bool(pause))
        self._beams.suspend_leaders()
        if not can_claim:
            self._cache_rows(plan)
        if self.table.waiting:
            self._schedule_waiting(plan, pause)
        if can_claim:
            self._cache_rows(plan)
        self._forks.plan(plan, keep_free, sampling=True, paused=bool(pause))
        return plan

    def _schedule_running(self, plan: StepPlan) -> None:
        """Schedule decoding requests, then partial prefills, each in order of admission."""
        evicted = self.kv.pool.num_evicted_blocks
        if plan.budget < len(self.table.running):  # less than one token for each: the order of admission decides
            for request in list(self.steady_decode.batch.values()):
                self.table.leave_steady(request)
        self.table.move_to_leaving()
        self._adapters.next_step()
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
        if self.decode_blocks.can_allocate(len(due)) and not table.to_compute()[1]:
            plan.grown, plan.new_blocks = due, self.decode_blocks.allocate(due)
            self.steady_decode.mark_handled(due, plan.step)
        else:
            for request in due:
                table.leave_steady(request)

    def schedule_decodes(self, plan: StepPlan, decodes: list[Request]) -> None:
        """Schedule one token for each request, and drafts only from the budget that remains after that."""
        num_decoding = len(self.steady_decode.batch) + len(decodes)
        wanted = self._drafting.choose([request.draft_state for request in decodes], num_decoding, plan.step)
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
        """Schedule prefills in order of admission, with equal parts of the budget for tenants that want them."""
        if self.table.num_tenants < 2:
            for request in prefills:
                self.schedule_prefill(plan, request, plan.prefill_budget)
            return
        wanted = Counter({request.tenant: 0 for request in prefills})
        for request in prefills:
            wanted[request.tenant] += request.num_tokens_to_compute
        if self.table.waiting and prefills:  # the first waiting request may be admitted in this step
            first = self.table.waiting.peek_request()
            if first is not self._refused[0]:
                wanted[first.tenant] += first.num_tokens
        parts = equal_parts(plan.prefill_budget, wanted)
        for request in prefills:
            self.schedule_prefill(plan, request, parts[request.tenant])
            if request.handle in plan.rows:
                parts[request.tenant] -= plan.rows[request.handle].num_tokens

    def schedule_prefill(self, plan: StepPlan, request: Request, most: int) -> None:
        """Schedule at most ``most`` positions of a prefill, or return the request to the queue to join its load."""
        if request.split_at:
            if request.num_computed_tokens >= request.split_at:
                self.preemption.preempt_to_join(plan.step, request)
                self._transfers.join(request)
                return
            most = min(most, request.split_at - request.num_computed_tokens)
        most = plan.prefill_tokens(request, min(most, request.num_tokens_to_compute), request.num_computed_tokens)
        if most > 0:
            self._allocate(plan, StepRow(request, most, None, is_prefill=True))

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
            if row.num_drafts:
                row.num_tokens, row.num_drafts = row.num_tokens - row.num_drafts, 0
                continue
            if self.kv.holds.end_one_kept(request.handle):
                continue
            victim, reason = self.preemption.victim()
            if victim is request and self._transfers.yields():
                return  # the blocks of the stores in flight suffice, or the next try is without stores
            self.preemption.preempt(victim, plan, request, reason)

    def _cache_rows(self, plan: StepPlan) -> None:
        """Publish the hashes of blocks that the step fills. Rows must be final: unwritten blocks must not be found."""
        self.decode_blocks.cache(plan.grown)
        for row in plan.rows.values():
            if row.num_tokens > 1 or any(row.new_blocks or ()):
                self._cache_written(row.request, row.num_tokens)

    def _cache_written(self, request: Request, num_new_tokens: int) -> None:
        self.kv.cache_blocks(request, min(request.num_computed_tokens + num_new_tokens, request.num_tokens))

    def _schedule_waiting(self, plan: StepPlan, pause: str) -> None:
        if (suspect := self._suspects.alone) is not None:
            self.schedule_alone(plan, pause, suspect)
            return
        while self.table.waiting:
            request = self.table.waiting.peek_request()
            reason = WaitReason.PAUSED if pause else self.admission_obstacle(plan, request)
            if reason is not None and reason not in _HELD:
                self._waits_for(plan, request, reason)
                return

    def _waits_for(self, plan: StepPlan, request: Request, reason: WaitReason) -> None:
        if request.wait_reason is not reason:
            self._decisions.note(Decision(plan.step, "wait", request.request_id, reason))
            request.wait_reason = reason

    def schedule_alone(self, plan: StepPlan, pause: str, suspect: Request) -> None:
        """Admit the suspect and no other request."""
        if suspect in self.table.waiting:
            reason = WaitReason.PAUSED if pause else self.admit(plan, suspect, others_preempted=True)
            if reason is not None:
                self._waits_for(plan, suspect, reason)
        first = self.table.waiting.peek_request() if self.table.waiting else None
        if first is not None and first is not suspect:
            self._waits_for(plan, first, WaitReason.SUSPECT)

    def admission_obstacle(self, plan: StepPlan, request: Request) -> WaitReason | None:
        """Call ``admit`` for the first waiting request, unless nothing has changed since it returned a reason to wait.

        The number of running requests represents their identity: they change without the pool only when one leaves.
        """
        state = (
            request,
            request.num_tokens,
            request.num_in_flight,
            self.kv.pool.num_changes,
            len(self.table.running),
            self.table.num_tenants,
            plan.budget,
            plan.prefill_budget,
            len(plan.preempted),
            self.config,
            self._programs.protected_blocks(request),
        )
        if state == self._refused:
            return self._refusal
        reason = self.admit(plan, request)
        if reason not in _LASTING and reason is not WaitReason.RESULT_IN_FLIGHT:
            return reason
        if self.table.num_tenants > 1 and self._admit_claimant(plan, request, reason):
            return None
        if reason in _LASTING:
            self._refused, self._refusal = state, reason
        return reason

    def _admit_claimant(self, plan: StepPlan, head: Request, reason: WaitReason) -> bool:
        """Admit a request of a tenant below its share ahead of ``head``, whose tenant has its share.

        Returns whether a request was admitted.
        """
        lacks_row = reason in (WaitReason.MAX_NUM_SEQS, WaitReason.RESULT_IN_FLIGHT)
        if not self.tenants.has_its_share(head, self.config if lacks_row else None):
            return False
        for request in self.table.waiting.heads():
            if request is not head and not request.awaits_result:
                if lacks_row:
                    victims = self.tenants.can_claim_row(request, self.config)
                else:
                    victims = self.tenants.can_claim_blocks(request, self.kv.num_blocks_for(request.num_tokens))
                if victims and self.admit(plan, request) is None:
                    return True
        return False

    def admit(self, plan: StepPlan, request: Request, *, others_preempted: bool = False) -> WaitReason | None:
        """Admit a waiting request, or return its reason to wait. ``others_preempted``: they made room for this one."""
        if len(plan.preempted) > plan.num_claimed and not others_preempted:
            return WaitReason.PREEMPTING
        if request.awaits_result:  # recently preempted: its token in flight belongs to the tokens to recompute
            return WaitReason.RESULT_IN_FLIGHT
        if not self._adapters.is_loaded(request):
            return WaitReason.ADAPTER
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
        choice = self._transfers.choose(request, hits, num_hit_tokens, step_tokens)
        if choice is not None and choice.kind == "load":
            return WaitReason.LOADING
        missing = request.num_tokens - num_hit_tokens
        while (reason := plan.lacks_room(request, num_hit_tokens)) is not None:
            if not self.preemption.for_tokens(plan, request):
                return reason
        num_tokens = plan.prefill_tokens(request, missing, num_hit_tokens)
        if choice is not None and choice.front:
            num_tokens = min(num_tokens, choice.front - num_hit_tokens)
        evicted = self.kv.pool.num_evicted_blocks
        while (reason := self._lacks_blocks(request, hits, num_hit_tokens, num_tokens)) is not None:
            if not (self.kv.holds.end_one_kept(request.handle) or self.preemption.for_blocks(plan, request, reason)):
                self._transfers.yields(others_run=bool(self.table.running))
                return reason
        self.note_evictions(plan, evicted, request)
        self.table.admit(request)
        self.kv.holds.end_kept(request.handle)
        request.begin(num_hit_tokens)
        self._programs.admitted(request, num_hit_tokens)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens, request.admitted = num_hit_tokens, self.kv.pool.now
            self._stats.prefix_cache_queries += request.num_tokens
            self._stats.prefix_cache_hit_tokens += num_hit_tokens
            self.table.waiting.charge(request.tenant, missing)
        elif request.split_at and num_hit_tokens > request.split_at:
            loaded = num_hit_tokens - request.split_at  # while it computed the tokens before
            request.num_cached_tokens += loaded
            self._stats.prefix_cache_hit_tokens += loaded
            self.table.waiting.charge(request.tenant, -loaded)
        request.split_at = 0
        self._hooks.admitted(request, num_hit_tokens)
        self._decisions.follow(request, "scheduled", num_tokens=num_hit_tokens)
        self._transfers.admitted(request, choice)  # before hashes are published: it probes for what the device lacks
        if self._adapters.may_run(request):
            plan.add(StepRow(request, num_tokens, None, is_prefill=True))
            self._cache_written(request, num_tokens)
        return None

    def has_room_for_prompt(self, request: Request, hits: GroupBlocks, protected: int) -> bool:
        """Whether the pool has blocks for all known tokens of a request of which this step computes only a chunk."""
        return self.kv.can_fit_full_sequence(request, request.num_tokens, hits, keep_free=protected)

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
        protected = self._programs.protected_blocks(request)
        reason = WaitReason.PROGRAM_LIMIT if protected else WaitReason.KV_BLOCKS
        if num_hit_tokens + num_tokens < request.num_tokens and not self.has_room_for_prompt(request, hits, protected):
            return reason
        keep_free = self._keep_free + protected
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
