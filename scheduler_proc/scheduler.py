"""The scheduler: events in, decisions out. No socket, clock, disk or device is reachable from here.

Reading order: ``consume`` (what can happen), ``schedule`` (what runs next), ``update_from_output`` (what came of it).
Requests that only ever need one more token cruise (cruise.py); whatever else happens to a request happens here.
"""

from collections import Counter
from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import NamedTuple, assert_never

from quire.protocol.config import EngineConfig
from quire.protocol.kv_layout import KVLayout
from quire.protocol.messages import (
    Abort,
    AddRequest,
    Consumed,
    Control,
    EndReason,
    Hold,
    Int32,
    ModelRunnerOutput,
    OpaqueRequest,
    OpaqueResult,
    Release,
    SchedulerOutput,
    SchedulerToFrontEnd,
    Statistics,
    Stop,
)
from quire.scheduler_proc.admission import Refusal, admit
from quire.scheduler_proc.cruise import Cruise
from quire.scheduler_proc.in_flight import InFlightStep, Sampled, StepsInFlight, WorkerFault
from quire.scheduler_proc.kv.block_hash import BlockHasher
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.kv.steady import SteadyBlocks
from quire.scheduler_proc.outputs import OutputCollector
from quire.scheduler_proc.reasons import HOLD_REASONS, Decision, PreemptReason, WaitReason
from quire.scheduler_proc.request import STATUS_OF_END, Request, RequestStatus
from quire.scheduler_proc.request_table import RequestTable
from quire.scheduler_proc.statistics import Counters, DecisionLog
from quire.scheduler_proc.step import StepPlan, build_diff

__all__ = ["Scheduler", "WorkerFault"]

_by_order = attrgetter("order")


class _Ending(NamedTuple):
    reason: EndReason
    stop_reason: int | None = None
    detail: str = ""


_Verdict = Callable[[Request, int], _Ending | None]
"""Whether a request, to which a token was just added, ends with it."""


class Scheduler:
    """Decides what runs: owns every request through the RequestTable and every block through the KVCacheManager.

    Invariants (``check``), besides those of its parts: a request holds blocks exactly when it runs or leaves; what is
    in flight was sent and not answered; every accepted request ends once.
    """

    def __init__(self, config: EngineConfig, layout: KVLayout, num_blocks: int, *, cruise: bool = True) -> None:
        """
        Args:
            num_blocks: blocks of the pool, the null block included.
            cruise: False for the plain algorithm alone, which decides the same and costs more.

        Raises:
            ConfigError: a setting that is not known, or contradicts the layout.
        """
        self.config = config
        self.kv = KVCacheManager(
            layout,
            num_blocks,
            config.enable_prefix_caching,
            drop_last_block=config.drop_last_cached_block,
            watermark=config.watermark,
            max_model_len=config.max_model_len,
            max_step_tokens=config.max_num_batched_tokens,
            pipeline_depth=config.pipeline_depth,
        )
        self.in_flight = StepsInFlight(config.model.vocab_size)
        self.cruise = Cruise(self.kv.block_size, config.pipeline_depth)
        self.table = RequestTable(config.scheduling_policy, self.cruise, self.in_flight, config.model.vocab_size)
        self.pause = ""
        """Empty, ``pause_new`` (nobody is admitted) or ``pause`` (nothing runs)."""
        self.decisions = DecisionLog()
        self._cruising_allowed = cruise
        self._steady = SteadyBlocks(layout, self.kv)
        self._hasher = BlockHasher(config.prefix_caching_hash_algo, self.kv.block_size)
        self._step = 0
        self._stale_until = -1
        self._outputs = OutputCollector()
        self._replies: list[tuple[int, SchedulerToFrontEnd]] = []
        self._stats = Counters()

    # ---- events

    def consume(self, event: Consumed, client: int = 0) -> None:
        """Take one event. ``client`` is the index of the front end that it came from.

        Raises:
            WorkerFault: a result that no worker could have computed; nothing has changed.
        """
        match event:
            case AddRequest() | OpaqueRequest():
                self._add(event, client)
            case Abort():
                for request_id in event.request_ids:
                    if request := self._live(client, request_id):
                        self._finish(request, EndReason.ABORTED)
            case Stop():
                if request := self._live(client, event.request_id):
                    self._stop_at(request, event.num_output_tokens)
            case Control():
                self._control(event, client)
            case Hold() | Release():
                self._hold_or_release(event, client)
            case ModelRunnerOutput():
                self.update_from_output(event)
            case OpaqueResult():
                self._update_from_opaque(event)
            case _:
                assert_never(event)

    def drop_client(self, client: int) -> None:
        """A front end is gone: so are its requests."""
        for request in [r for r in self.table.requests.values() if r.client == client]:
            self._finish(request, EndReason.ABORTED)

    def fail_all(self, detail: str) -> None:
        """The engine cannot go on: each request ends with the reason."""
        for request in list(self.table.requests.values()):
            self._finish(request, EndReason.ERROR, detail=detail)

    def begin_epoch(self) -> None:
        """What the workers hold is not to be trusted: everyone that runs waits again with its tokens.

        Nothing in flight will be applied, and no content of the pool is found again (protocol law 6). The workers
        are told to drop the rows that they may still have.
        """
        self._stale_until = self._step
        for request in [*self.table.leaving.values(), *self.table.running.values()]:
            self._note("preempt", request, PreemptReason.NEW_EPOCH)
            self._put_out(request)
        for request in self.table.requests.values():
            request.num_in_flight = request.num_output_placeholders = request.num_drafts_in_flight = 0
        for record in self.in_flight.drop_all():
            self.table.retire_later(record.retired)
        self.cruise.acknowledged = self._step
        self.kv.reset_prefix_cache()

    def take_messages(self) -> list[tuple[int, SchedulerToFrontEnd]]:
        """(client, message) for the front ends, since the last call."""
        messages = self._replies + self._outputs.take()
        self._replies = []
        return messages

    def _live(self, client: int, request_id: str) -> Request | None:
        request = self.table.requests.get((client, request_id))
        self._stats.num_stray_messages += request is None
        return request

    def _add(self, event: AddRequest | OpaqueRequest, client: int) -> None:
        limit = self.config.max_num_queued_reqs
        try:
            if (client, event.request_id) in self.table.requests:
                raise Refusal("duplicate_request_id", "request_id", "request_id is in use")
            if limit and self.table.num_waiting >= limit:
                raise Refusal("queue_full", "", f"{limit} requests wait already, which is as many as may")
            request = admit(event, client, self.config, self.kv, self._hasher)
        except Refusal as refusal:
            self._stats.num_requests_refused += 1
            self._replies.append((client, refusal.message(event.request_id)))
            return
        self.table.add(request)
        self._outputs.own(request.handle, client)
        self._stats.prompt_tokens += request.num_prompt_tokens
        if request.needs_no_more_steps:  # a resubmission that had got everything
            self._finish(request, EndReason.LENGTH)

    def _control(self, event: Control, client: int) -> None:
        done = True
        match event.kind:
            case "statistics":
                pass
            case "pause" | "pause_new":
                self.pause = event.kind
            case "resume":
                self.pause = ""
            case "reset_prefix_cache":
                done = self.kv.reset_prefix_cache()
            case _:
                done = False
        self._replies.append((client, self.statistics(event.query, done)))

    def _hold_or_release(self, event: Hold | Release, client: int) -> None:
        request = self._live(client, event.request_id)
        if request is None:
            return
        if isinstance(event, Release) and request.handle in self.table.skipped_waiting:
            self.table.release(request)
        elif isinstance(event, Hold) and request in self.table.waiting and event.reason in HOLD_REASONS:
            self.table.hold(request, WaitReason(event.reason))
            self._note("wait", request, request.wait_reason)
        else:
            self._stats.num_stray_messages += 1

    # ---- what runs next

    @property
    def can_schedule(self) -> bool:
        """Whether ``schedule`` may be asked: something waits or runs, and the pipeline has room."""
        room = len(self.in_flight) < self.config.pipeline_depth
        return room and self.pause != "pause" and bool(self.table.running or self.table.waiting)

    def schedule(self, now: float = 0.0) -> SchedulerOutput | None:
        """Decide one step: everyone that runs gets on first, then who waits, under one token budget.

        There are no phases: a request has so many positions to compute, one while decoding and more in a prefill.

        Args:
            now: seconds on the caller's clock, which the pool's metrics go by; decisions do not.

        Returns:
            The diff for the workers, or None when nothing can run now.
        """
        if not self.can_schedule:
            return None
        self.kv.pool.now = now
        plan = StepPlan(self._step + 1, self.config.max_num_batched_tokens)
        self._schedule_running(plan)
        if self.table.waiting:
            self._schedule_waiting(plan)
        if self.config.scheduling_policy != "fcfs":  # whoever waits may have put out somebody who had a share
            self._cache_shares(plan)
        return self._commit(plan) if plan.shares or self.cruise.roster else None

    def _schedule_running(self, plan: StepPlan) -> None:
        """Decoding requests first, then partial prefills, both in order of admission."""
        evicted = self.kv.pool.num_evicted_blocks
        if plan.budget < len(self.table.running):  # not a token for each: then the order decides, and nobody cruises
            for request in list(self.cruise.roster.values()):
                self.table.unsettle(request)
        self._serve_due(plan)
        plan.budget -= len(self.cruise.roster)
        prefills: list[Request] = []
        if self.table.unsteady:
            running = sorted(self.table.unsteady.values(), key=_by_order)
            prefills = [r for r in running if r.num_tokens_to_compute > 1]
            for request in running:
                if request.num_tokens_to_compute <= 1:
                    self._share_decode(plan, request)
        if prefills or self.table.waiting:
            self._bound_prefill(plan)
        for request in prefills:
            self._share_prefill(plan, request)
        if self.config.scheduling_policy == "fcfs":
            self._cache_shares(plan)
        self._note_evictions(evicted, None)

    def _cache_shares(self, plan: StepPlan) -> None:
        """Once no share can be taken back any more, for what is not written must not be found."""
        self._steady.cache(plan.begun)
        for share in plan.shares.values():
            if share.num_tokens > 1 or any(share.new_blocks or ()):
                self._cache_written(share.request, share.num_tokens)

    def _serve_due(self, plan: StepPlan) -> None:
        """Who cruises and needs a block, gets one; whoever needs no more steps goes.

        The short way is taken where it cannot matter: blocks for all, and no other decode that might take one between.
        Else whoever is due goes the long way, and cruises again after it.
        """
        table, due = self.table, self.cruise.due(plan.step)
        for request in sorted((r for r in table.unsteady.values() if r.needs_no_more_steps), key=_by_order):
            table.let_go(request)  # length limits are known a step ahead (law 4)
        plan.last = [r for r in due if r.last_step == plan.step]
        due = [r for r in due if r.block_step == plan.step]
        if not due:
            return
        if self._steady.can_begin(len(due)) and not any(r.num_tokens_to_compute <= 1 for r in table.unsteady.values()):
            plan.begun, plan.begun_blocks = due, self._steady.begin(due)
            self.cruise.handled(due, plan.step)
        else:
            for request in due:
                table.unsettle(request)

    def _share_decode(self, plan: StepPlan, request: Request) -> None:
        ahead = request.max_total_tokens - request.num_tokens - request.num_output_placeholders
        if ahead > 0 and plan.budget > 0:  # none ahead: it is done if all drafts in flight are accepted; wait and see
            drafts = max(min(request.num_drafts, ahead - 1, plan.budget - 1), 0)
            self._share(plan, request, 1 + drafts, drafts)

    def _share_prefill(self, plan: StepPlan, request: Request) -> None:
        most = min(request.num_tokens_to_compute, plan.budget, plan.prefill_budget)
        most = min(most, self.config.long_prefill_token_threshold or most)
        if most > 0:
            num_tokens = self.kv.aligned_chunk(request, request.num_computed_tokens, most)
            if self._share(plan, request, num_tokens):
                plan.prefill_budget -= num_tokens

    def _bound_prefill(self, plan: StepPlan) -> None:
        """While others decode, prefill gets a part of the step only, or their next token would wait for all of it."""
        plan.prefill_budget = plan.budget
        if self.config.enable_chunked_prefill and (self.cruise.roster or plan.shares):
            part = int(self.config.max_prefill_share * self.config.max_num_batched_tokens)
            plan.prefill_budget = min(plan.budget, max(part, 1))

    def _share(self, plan: StepPlan, request: Request, num_tokens: int, num_drafts: int = 0) -> bool:
        """Give a running request ``num_tokens`` positions, putting others out where blocks are short.

        False when it was put out itself, now or before.
        """
        while request.status is RequestStatus.RUNNING:
            new_blocks = self.kv.allocate_slots(request, num_tokens)
            if new_blocks is not None:
                plan.add(request, num_tokens, new_blocks, num_drafts)
                return True
            self._preempt(self._victim(), plan, request)
        return False

    def _victim(self) -> Request:
        """FCFS: the last admitted, so that the oldest always gets on. Priority: the worst, among equals the latest."""
        if self.config.scheduling_policy == "fcfs":
            return next(reversed(self.table.running.values()))
        return max(self.table.running.values(), key=self.table.waiting.key)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        while self.table.waiting:
            request = self.table.waiting.peek_request()
            reason = self._admit(plan, request)
            if reason is not None:
                if request.wait_reason is not reason:
                    self._note("wait", request, reason)
                    request.wait_reason = reason
                return

    def _admit(self, plan: StepPlan, request: Request) -> WaitReason | None:
        """Let the first of the queue run, or say why not."""
        config, kv = self.config, self.kv
        if self.pause:
            return WaitReason.PAUSED
        if plan.preempted:
            return WaitReason.PREEMPTING
        if request.num_in_flight:  # preempted a moment ago: its token in flight belongs to what is recomputed
            return WaitReason.RESULT_IN_FLIGHT
        if plan.budget <= 0:
            return WaitReason.TOKEN_BUDGET
        if plan.prefill_budget <= 0:
            return WaitReason.PREFILL_SHARE
        if len(self.table.running) >= config.max_num_seqs and not self._make_way(plan, request):
            return WaitReason.MAX_NUM_SEQS
        if config.reserve_full_sequence and not kv.can_fit_full_sequence(request, request.max_total_tokens - 1):
            return WaitReason.FULL_SEQUENCE
        evicted = kv.pool.num_evicted_blocks
        hits, num_hit_tokens = kv.get_computed_blocks(request)
        missing = request.num_tokens - num_hit_tokens
        if not config.enable_chunked_prefill and missing > plan.budget:
            return WaitReason.WHOLE_PROMPT
        most = min(missing, config.long_prefill_token_threshold or missing, plan.budget, plan.prefill_budget)
        num_tokens = kv.aligned_chunk(request, num_hit_tokens, most)
        while True:
            keep_free = kv.watermark_blocks if self.table.running else 0
            if kv.allocate_slots(request, num_tokens, hits, num_hit_tokens, keep_free=keep_free) is not None:
                break
            if not self._make_way(plan, request):
                return WaitReason.KV_BLOCKS
        self._note_evictions(evicted, request)
        self.table.begin_to_run(request)
        request.num_computed_tokens = request.num_acknowledged_tokens = num_hit_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_hit_tokens
            self._stats.prefix_cache_queries += request.num_tokens
            self._stats.prefix_cache_hit_tokens += num_hit_tokens
        plan.add(request, num_tokens, None)
        plan.prefill_budget -= num_tokens
        self._cache_written(request, num_tokens)
        return None

    def _make_way(self, plan: StepPlan, request: Request) -> bool:
        """Under the priority policy a waiting request puts out a running one of a strictly worse number.

        Otherwise a long answer of little worth would keep it waiting to the end (priority inversion); among equals
        nobody gives way, or they would take turns for ever.
        """
        if self.config.scheduling_policy != "priority" or not self.table.running:
            return False
        victim = self._victim()
        if victim.priority <= request.priority:
            return False
        self._preempt(victim, plan, request)
        return True

    def _cache_written(self, request: Request, num_new_tokens: int) -> None:
        self.kv.cache_blocks(request, min(request.num_computed_tokens + num_new_tokens, request.num_tokens))

    def _preempt(self, victim: Request, plan: StepPlan, beneficiary: Request) -> None:
        """Take the victim's blocks; it waits in its old place and computes everything again, hits aside."""
        plan.take_back(victim)
        plan.preempted.append(victim)
        reason = PreemptReason.ITSELF
        if victim is not beneficiary:
            fcfs = self.config.scheduling_policy == "fcfs"
            reason = PreemptReason.YOUNGEST if fcfs else PreemptReason.LOWEST_PRIORITY
        self._note("preempt", victim, reason, beneficiary)
        self._put_out(victim)
        self._stats.num_preemptions += 1

    def _put_out(self, request: Request) -> None:
        self.table.put_out(request)
        self.kv.free(request)

    def _commit(self, plan: StepPlan) -> SchedulerOutput:
        """Fix the plan: build the diff, then advance what was scheduled."""
        table, step = self.table, plan.step
        diff = build_diff(plan, table.unsteady.values(), table.take_removed(), self.kv)
        record = InFlightStep(step, plan.shares, table.take_retired())
        for handle, share in plan.shares.items():
            request = share.request
            samples = share.num_tokens - share.num_drafts == request.num_tokens_to_compute
            request.num_computed_tokens += share.num_tokens
            request.num_in_flight += 1
            if not samples:
                continue
            request.num_output_placeholders += 1 + share.num_drafts
            request.num_drafts_in_flight += share.num_drafts
            if self.config.num_speculative_tokens and self.config.async_scheduling:
                request.num_drafts = self.config.num_speculative_tokens
            if self._may_cruise(request):
                table.steady(request, step)
                record.newcomers.append(request)
            else:
                record.sampling[handle] = request
        record.roster = self.cruise.share_roster()
        self.cruise.sent = self._step = step
        self.in_flight.records.append(record)
        for request in plan.last:
            table.unsettle(request)  # its last result ends it
        self._stats.num_steps += 1
        return diff

    def _may_cruise(self, request: Request) -> bool:
        return (
            self._cruising_allowed
            and not self.config.num_speculative_tokens
            and not request.needs_no_more_steps
            and len(self.table.running) <= self.config.max_num_batched_tokens
        )

    # ---- what came of it

    def update_from_output(self, output: ModelRunnerOutput) -> None:
        """Apply the result of the oldest step in flight: append tokens, end what ends, reply.

        Raises:
            WorkerFault: it answers another step, or its tokens or handles cannot be right; nothing has changed.
        """
        if self._is_stale(output.step, output.handles):
            return
        record, sampled = self.in_flight.match(output)
        hits = self.table.stops.positions(sampled.last_tokens)
        may_end = sampled.handles[hits].tolist() if hits else []
        bad = dict.fromkeys(output.bad, "numerical_error: the model's logits are not finite")
        self._apply(record, sampled, output, may_end, bad, self._verdict)

    def _update_from_opaque(self, event: OpaqueResult) -> None:
        """A recorded result without tokens: the same endings and block contents as the real one had."""
        if self._is_stale(event.step, event.handles):
            return
        record, sampled = self.in_flight.match_opaque(event)
        requests = record.requests()
        for handle, block_hash in event.block_hashes:
            requests[handle].block_hashes.append(block_hash)
        ended = {e.handle: _Ending(EndReason(e.reason), e.stop_reason, e.detail) for e in event.ended}
        lengths = {e.handle: e.num_output_tokens for e in event.ended}

        def verdict(request: Request, token: int) -> _Ending | None:
            there = request.cruising or request.num_output_tokens >= lengths.get(request.handle, 0)
            return ended.get(request.handle) if there else None

        bad = {handle: ending.detail for handle, ending in ended.items() if ending.reason is EndReason.ERROR}
        self._apply(record, sampled, ModelRunnerOutput(event.step, drafts=event.drafts), list(ended), bad, verdict)

    def _is_stale(self, step: int, handles: Int32 | None) -> bool:
        """Whether a result belongs to a step of before ``begin_epoch``; it tells at most where rows lie."""
        if step > self._stale_until:
            return False
        self._stats.num_stray_messages += 1
        self.in_flight.note_rows(handles)
        return True

    def _apply(
        self,
        record: InFlightStep,
        sampled: Sampled,
        output: ModelRunnerOutput,
        may_end: list[int],
        bad: dict[int, str],
        verdict: _Verdict,
    ) -> None:
        """``may_end``: handles of whom to ask ``verdict`` although they cruise; ``bad``: with what is wrong."""
        for handle in bad:
            if handle in self.cruise.roster:
                self.table.unsettle(self.cruise.roster[handle])  # before its token can be taken for one
        self.in_flight.records.popleft()
        latest = self.cruise.record(record.step, sampled.handles, sampled.last_tokens)
        self._acknowledge(record)
        self._outputs.begin_result()
        for request in (*record.newcomers, *record.sampling.values()):
            if not request.status.is_finished:
                self._outputs.introduce(request)
        cut: dict[int, int] = {}
        for position, request in self._to_look_at(record, may_end):
            if request.cruising:
                ending = verdict(request, int(latest[request.handle]))
                if ending is not None:
                    self.table.unsettle(request)
                    self._end(request, ending)
                continue
            count = sampled.count(position)
            kept = self._apply_row(record, request, sampled.row(position), output, position, bad, verdict)
            if kept < count:
                cut[position] = kept
        num_kept = len(sampled.tokens) - sum(sampled.count(at) - kept for at, kept in cut.items())
        self._stats.generation_tokens += num_kept
        self._outputs.sampled(sampled, cut, output)

    def _to_look_at(self, record: InFlightStep, may_end: list[int]) -> list[tuple[int, Request]]:
        """(position in the result, request) of those that sampled and do not cruise, or that may end."""
        now = self.cruise.roster
        if record.roster is now and not record.sampling and not may_end:
            return []
        found = {handle: r for handle, r in record.sampling.items() if not r.cruising}
        if record.roster is not now:
            for handle in record.roster.keys() - now.keys():
                found[handle] = record.roster[handle]
        for handle in may_end:
            if handle in now:
                found[handle] = now[handle]
        if not found:
            return []
        position_of = self.in_flight.position_of
        return sorted(((position_of(handle), request) for handle, request in found.items()), key=itemgetter(0))

    def _acknowledge(self, record: InFlightStep) -> None:
        for share in record.shares.values():
            request = share.request
            request.num_in_flight -= 1
            if request.status is RequestStatus.RUNNING:  # else it begins again from nothing
                request.num_acknowledged_tokens += share.num_tokens
        self.table.give_back(record.retired)

    def _apply_row(
        self,
        record: InFlightStep,
        request: Request,
        tokens: list[int],
        output: ModelRunnerOutput,
        position: int,
        bad: dict[int, str],
        verdict: _Verdict,
    ) -> int:
        """One request's part of a result; returns how many of ``tokens`` are its client's."""
        drafts = record.shares[request.handle].num_drafts
        request.num_output_placeholders -= 1 + drafts
        request.num_drafts_in_flight -= drafts
        if request.status.is_finished:
            self._stats.dropped_tokens += len(tokens)
            return 0
        if request.handle in bad:
            self._finish_bad(request, bad[request.handle])
            return 0
        self._settle_drafts(request, drafts, len(tokens) - 1, output, position)
        for kept, token in enumerate(tokens, 1):
            request.tokens.append(token)
            ending = verdict(request, token)
            if ending is not None:
                self._end(request, ending)
                return kept
        return len(tokens)

    def _settle_drafts(
        self, request: Request, drafts: int, accepted: int, output: ModelRunnerOutput, position: int
    ) -> None:
        """Claw back what was counted for rejected drafts, and see what the next step has."""
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens -= drafts - accepted
            request.num_acknowledged_tokens -= drafts - accepted
            if not self.config.async_scheduling:
                told = 0 if output.drafts is None else int(output.drafts[position])
                request.num_drafts = min(told, self.config.num_speculative_tokens)
        self._stats.num_draft_tokens += drafts
        self._stats.num_accepted_tokens += accepted

    def _verdict(self, request: Request, token: int) -> _Ending | None:
        if token in request.stop_tokens:
            own = token in request.sampling.stop_token_ids
            return _Ending(EndReason.STOPPED, token if own else None)
        if not request.cruising and request.num_tokens >= request.max_total_tokens:
            return _Ending(EndReason.LENGTH)
        return None

    def _end(self, request: Request, ending: _Ending) -> None:
        self._finish(request, ending.reason, stop_reason=ending.stop_reason, detail=ending.detail)

    def _finish_bad(self, request: Request, detail: str) -> None:
        """What it wrote may be rotten. After a preemption it is not known any more which blocks were not its own."""
        self.kv.forget_content(request, 0 if request.num_preemptions else max(request.num_cached_tokens, 0))
        self._finish(request, EndReason.ERROR, detail=detail)

    def _stop_at(self, request: Request, num_output_tokens: int) -> None:
        """The front end found a stop string; what came after it does not count."""
        self.table.unsettle(request)
        counted = max(0, min(num_output_tokens, request.num_output_tokens))
        self._stats.generation_tokens -= request.num_output_tokens - counted
        self._finish(request, EndReason.STOPPED, num_output_tokens=counted)

    def _finish(
        self,
        request: Request,
        reason: EndReason,
        *,
        stop_reason: int | None = None,
        detail: str = "",
        num_output_tokens: int | None = None,
    ) -> None:
        """The one way a request ends: its blocks go back, its client is told, its handle is given up."""
        self.table.unsettle(request)
        if request.status is RequestStatus.RUNNING:
            if reason is not EndReason.ERROR:
                self._cache_written(request, 0)
            self.kv.free(request)
        self.table.end(request, STATUS_OF_END[reason])
        counted = request.num_output_tokens if num_output_tokens is None else num_output_tokens
        self._outputs.ended(request, reason, counted, stop_reason, detail)

    # ---- looking in

    def _note(self, kind: str, request: Request, reason: str, beneficiary: Request | None = None) -> None:
        whose = "" if beneficiary is None else beneficiary.request_id
        self.decisions.note(Decision(self._step + 1, kind, request.request_id, reason, whose))

    def _note_evictions(self, before: int, beneficiary: Request | None) -> None:
        evicted = self.kv.pool.num_evicted_blocks - before
        if evicted:
            reason, whose = ("decode", "") if beneficiary is None else ("admission", beneficiary.request_id)
            self.decisions.note(Decision(self._step + 1, "evict", "", reason, whose, evicted))

    def statistics(self, query: int = 0, done: bool = True) -> Statistics:
        """Gauges as of now, and counters since start."""
        pool, table = self.kv.pool, self.table
        reasons = Counter(str(r.wait_reason) for r in table.skipped_waiting.values())
        if table.waiting:  # who waits behind the first, waits for what it waits for
            reasons[str(table.waiting.peek_request().wait_reason)] += len(table.waiting)
        return Statistics(
            query=query,
            done=done,
            num_running=len(table.running) + len(table.leaving),
            num_waiting=table.num_waiting,
            num_usable_blocks=pool.num_usable_blocks,
            num_free_blocks=pool.num_free_blocks,
            num_cached_blocks=pool.num_cached_blocks,
            num_evicted_blocks=pool.num_evicted_blocks,
            kv_block_lifetime=pool.metrics.lifetime,
            kv_block_idle_before_evict=pool.metrics.idle_before_evict,
            kv_block_reuse_gap=pool.metrics.reuse_gap,
            waiting_by_reason=dict(reasons),
            preemptions_by_reason=dict(self.decisions.preemptions),
            **self._stats.as_dict(),
        )

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold. O(blocks + requests): for tests, and for idle moments."""
        self.kv.check()
        self.table.check()
        requests = self.table.requests.values()
        for request in requests:
            told = self.cruise.progress(request)
            running = request.status is RequestStatus.RUNNING
            most = told.num_in_flight * (1 + self.config.num_speculative_tokens)
            assert 0 <= told.num_output_placeholders <= most, f"{request!r}: {told}"
            assert told.num_in_flight <= self.config.pipeline_depth, f"{request!r}: {told}"
            assert 0 <= told.num_acknowledged_tokens <= told.num_computed_tokens, f"{request!r}: {told}"
            held = self.kv.coordinator.managers[0].req_to_blocks.get(request.handle)
            assert bool(held) == running, f"{request!r}: blocks and status disagree"
        assert len(self.table.running) <= self.config.max_num_seqs
        live = {r.handle for r in requests}
        for manager in self.kv.coordinator.managers:
            assert manager.req_to_blocks.keys() <= live, "blocks are held for requests that are gone"
