"""Arriving requests: accepts or rejects them, holds and releases them."""

from collections.abc import Callable
from functools import partial

from quire.protocol.config import EngineConfig
from quire.protocol.wire.adapter_messages import AdapterLoaded, UnloadAdapter
from quire.protocol.wire.front_end_messages import EndReason, Rejected, SchedulerToFrontEnd
from quire.scheduler_proc.adapters.adapters import Adapters
from quire.scheduler_proc.core.admission import Admission, ArrivalFields, Refusal
from quire.scheduler_proc.core.beams import Beams
from quire.scheduler_proc.core.forks import Forks
from quire.scheduler_proc.core.request_table import RequestTable
from quire.scheduler_proc.core.results import Results
from quire.scheduler_proc.core.statistics import Counters, RecentDecisions
from quire.scheduler_proc.core.transfers import Transfers
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.programs.programs import Programs
from quire.scheduler_proc.requests.events import Hold, Refuse, Release
from quire.scheduler_proc.requests.hooks import NO_HOOKS, SchedulerHooks
from quire.scheduler_proc.requests.reasons import HOLD_REASONS, Decision, PreemptReason, WaitReason
from quire.scheduler_proc.requests.request import Request, RequestStatus


class Arrivals:
    """Adds requests to the table, and removes held requests that turn out to be invalid.

    Attributes:
        replies: pending (client, message) pairs that belong to no step.
    """

    def __init__(
        self,
        config: EngineConfig,
        table: RequestTable,
        kv: KVCacheManager,
        results: Results,
        stats: Counters,
        decisions: RecentDecisions,
        hooks: SchedulerHooks,
        transfers: Transfers,
        forks: Forks,
        beams: Beams,
        adapters: Adapters,
        programs: Programs,
    ) -> None:
        self.admission = Admission(config, kv, adapters, programs)
        self.replies: list[tuple[int, SchedulerToFrontEnd]] = []
        self._max_waiting = config.max_num_queued_reqs
        self._kv = kv
        self._table = table
        self._results = results
        self._stats = stats
        self._decisions = decisions
        self._hooks = hooks
        self._transfers = transfers
        self._forks = forks
        self._beams = beams
        self._adapters = adapters
        self._programs = programs

    def follow(self, request: Request) -> None:
        """Report blocks that the request fills, and its outputs."""
        if self._hooks is not NO_HOOKS:
            request.tokens.follow(partial(self._hooks.block_filled, request.handle))
        self._results.outputs.set_owner(request.handle, request.client)

    def add(self, event: ArrivalFields, client: int, make: Callable[[], Request]) -> None:
        """Accept a request, or reply with a rejection.

        Args:
            event: a full queue does not refuse a resubmission, which a previous scheduler accepted.
            make: creates the request, or raises Refusal.
        """
        try:
            request = self._accept(event.request_id, client, make, limit=0 if event.resubmitted else self._max_waiting)
        except Refusal as refusal:
            self._stats.num_requests_refused += 1
            self.replies.append((client, refusal.message(event.request_id)))
            return
        self._table.add(request)
        self.follow(request)
        self._stats.prompt_tokens += request.num_prompt_tokens
        if request.needs_no_more_steps:  # a resubmission with all of its output
            self._results.finish(request, EndReason.LENGTH)
        elif request.repeats_itself:
            self._results.finish(request, EndReason.REPETITION)
        else:
            job_id, hint, is_last = event.job_id, event.hint, event.is_last_step
            self._programs.arrived(request, job_id=job_id, hint=hint, is_last_step=is_last)
            self._beams.begin(request)
            self._forks.hold(request)
            self._adapters.arrived(request)

    def _accept(self, request_id: str, client: int, make: Callable[[], Request], limit: int) -> Request:
        if (client, request_id) in self._table.requests:
            raise Refusal("duplicate_request_id", "request_id", f"request_id {request_id!r} is in use")
        if limit and self._table.num_waiting >= limit:
            raise Refusal("queue_full", "", f"the queue is full: {limit} requests wait already")
        return make()

    def hold_or_release(self, event: Hold | Release, request: Request) -> None:
        """Hold a request, which is preempted first if it runs; or release it."""
        table = self._table
        is_held = request.handle in table.skipped_waiting and request.wait_reason in HOLD_REASONS
        if isinstance(event, Release) and is_held:
            table.release(request)
            self._forks.hold(request)
        elif isinstance(event, Hold) and not is_held and event.reason in HOLD_REASONS and not self._beams.wait(request):
            self._transfers.stop_waiting(request)
            self._forks.stop_waiting(request)
            self._adapters.stop_waiting(request)
            step = table.steady_decode.clock.sent + 1
            if request not in table.waiting:
                self._preempt(request, step)
            request.ignore_results_until = step - 1  # the steps in flight sample without what it waits for
            table.hold(request, WaitReason(event.reason))
            self._decisions.note(Decision(step, "wait", request.request_id, request.wait_reason))
        else:
            self._stats.num_stray_messages += 1

    def _preempt(self, request: Request, step: int) -> None:
        """Return a request that runs to the queue."""
        self._decisions.preempted(step, request, PreemptReason.HELD)
        self._table.preempt(request)
        self._kv.free(request)
        self._stats.num_preemptions += 1

    def refuse(self, event: Refuse, request: Request) -> None:
        """Reject a held request that can never run.

        A request that ran before it was held ends with an error instead.
        """
        if request.handle not in self._table.skipped_waiting or request.wait_reason not in HOLD_REASONS:
            self._stats.num_stray_messages += 1
        elif request.introduced:
            self._results.finish(request, EndReason.ERROR, detail=f"{event.code}: {event.message}")
        else:
            self._reject(request, Rejected(event.request_id, event.code, event.param, event.message))

    def adapter_loaded(self, answer: AdapterLoaded) -> None:
        """Continue with the requests of an adapter, or end them if it could not be loaded."""
        adapter = self._adapters.loaded(answer)
        self._stats.num_stray_messages += adapter is None
        if adapter is not None and answer.problem:
            for request in [r for r in self._table.requests.values() if r.adapter is adapter and r.client >= 0]:
                if request.num_output_tokens or request.status is not RequestStatus.WAITING:
                    detail = f"adapter_not_loaded: {answer.problem}"
                    self._results.finish(request, EndReason.ERROR, detail=detail)
                else:
                    rejected = Rejected(request.request_id, "adapter_not_loaded", "model", answer.problem)
                    self._reject(request, rejected)

    def _reject(self, request: Request, answer: Rejected) -> None:
        """Reject a waiting request: for its client, it was not accepted at all."""
        self._transfers.forget(request)
        self._forks.forget(request)
        self._beams.forget(request)
        self._programs.refused(request)
        self._table.end(request, RequestStatus.FINISHED_ERROR)
        self._adapters.ended(request)
        self._stats.num_requests_refused += 1
        self._stats.prompt_tokens -= request.num_prompt_tokens
        self.replies.append((request.client, answer))

    def unload(self, event: UnloadAdapter) -> bool:
        """Drop an adapter if no request has it under this name. Returns whether that is so now."""
        named = [r for r in self._table.requests.values() if r.adapter_name == event.name and r.adapter is not None]
        named = [r for r in named if r.adapter is not None and r.adapter.ref.digest == event.digest]
        if event.force:
            for request in named:
                self._results.finish(request, EndReason.ABORTED)
        elif named:
            return False
        adapter = self._adapters.slots.known.get(event.digest)
        return (adapter is not None and adapter.num_requests > 0) or self._adapters.unload(event.digest)

    def take_replies(self) -> list[tuple[int, SchedulerToFrontEnd]]:
        replies, self.replies = self.replies, []
        return replies
