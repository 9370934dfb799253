"""Arriving requests: accepts or rejects them, holds and releases them."""

from collections.abc import Callable
from functools import partial

from quire.protocol.wire.front_end_messages import EndReason, Rejected, SchedulerToFrontEnd
from quire.scheduler_proc.core.admission import Admission
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.messages.arrivals import ArrivalFields, Refusal
from quire.scheduler_proc.requests.events import Hold, Refuse, Release
from quire.scheduler_proc.requests.hooks import NO_HOOKS
from quire.scheduler_proc.requests.reasons import HOLD_REASONS, Decision, PreemptReason, WaitReason
from quire.scheduler_proc.requests.request import Request, RequestStatus


class Arrivals:
    """Adds requests to the table, and removes held requests that turn out to be invalid."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.admission = Admission(core)
        self._max_waiting = core.config.max_num_queued_reqs
        self._table = core.table

    def follow(self, request: Request) -> None:
        """Report blocks that the request fills, and its outputs."""
        if self.core.hooks is not NO_HOOKS:
            request.tokens.follow(partial(self.core.hooks.block_filled, request.handle))
        self.core.outputs.set_owner(request.handle, request.client)

    def add(self, event: ArrivalFields, client: int, make: Callable[[], Request]) -> None:
        """Accept a request, or reply with a rejection.

        Args:
            event: a full queue does not refuse a resubmission, which a previous scheduler accepted.
            make: creates the request, or raises Refusal.
        """
        try:
            request = self._accept(event.request_id, client, make, limit=0 if event.resubmitted else self._max_waiting)
        except Refusal as refusal:
            self.core.stats.num_requests_refused += 1
            self.core.replies.append((client, refusal.message(event.request_id)))
            return
        self._table.add(request)
        self.follow(request)
        self.core.stats.prompt_tokens += request.num_prompt_tokens
        if request.needs_no_more_steps:  # a resubmission with all of its output
            self.core.finish(request, EndReason.LENGTH)
        elif request.repeats_itself:
            self.core.finish(request, EndReason.REPETITION)
        else:
            for feature in self.core.calls.arrived:
                feature.arrived(request, event)

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
            for feature in self.core.calls.released:
                feature.released(request)
        elif isinstance(event, Hold) and not is_held and event.reason in HOLD_REASONS and self._may_hold(request):
            for feature in self.core.calls.stop_waiting:
                feature.stop_waiting(request)
            step = self.core.next_step
            if request not in table.waiting:
                self._preempt(request, step)
            request.ignore_results_until = step - 1  # the steps in flight sample without what it waits for
            table.hold(request, WaitReason(event.reason))
            self.core.decisions.note(Decision(step, "wait", request.request_id, request.wait_reason))
        else:
            self.core.stats.num_stray_messages += 1

    def _may_hold(self, request: Request) -> bool:
        return all(feature.may_hold(request) for feature in self.core.calls.may_hold)

    def _preempt(self, request: Request, step: int) -> None:
        """Return a request that runs to the queue."""
        self.core.decisions.preempted(step, request, PreemptReason.HELD)
        self._table.preempt(request)
        self.core.kv.free(request)
        self.core.stats.num_preemptions += 1

    def refuse(self, event: Refuse, request: Request) -> None:
        """Reject a held request that can never run.

        A request that ran before it was held ends with an error instead.
        """
        if request.handle not in self._table.skipped_waiting or request.wait_reason not in HOLD_REASONS:
            self.core.stats.num_stray_messages += 1
        elif request.introduced:
            self.core.finish(request, EndReason.ERROR, detail=f"{event.code}: {event.message}")
        else:
            self.reject(request, Rejected(event.request_id, event.code, event.param, event.message))

    def reject(self, request: Request, answer: Rejected) -> None:
        """Reject a waiting request: for its client, it was not accepted at all."""
        for feature in self.core.calls.refused:
            feature.refused(request)
        self.core.remove(request, RequestStatus.FINISHED_ERROR)
        self.core.stats.num_requests_refused += 1
        self.core.stats.prompt_tokens -= request.num_prompt_tokens
        self.core.replies.append((request.client, answer))

    def take_replies(self) -> list[tuple[int, SchedulerToFrontEnd]]:
        replies, self.core.replies = self.core.replies, []
        return replies
