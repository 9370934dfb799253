"""The scheduler: events in, decisions out. No socket, clock, disk or device is reachable from here.

Reading order: ``consume`` (what can happen), ``schedule`` (what runs next), ``update_from_output`` (what came of it).
"""

from collections import deque
from typing import assert_never

from quire.protocol.config import EngineConfig
from quire.protocol.kv_layout import KVLayout
from quire.protocol.messages import (
    Abort,
    AddRequest,
    Consumed,
    Control,
    EndReason,
    ModelRunnerOutput,
    OpaqueRequest,
    OpaqueResult,
    SchedulerOutput,
    SchedulerToFrontEnd,
    Statistics,
    Stop,
)
from quire.scheduler_proc.admission import Refusal, admit
from quire.scheduler_proc.handles import HandlePool
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.outputs import OutputCollector, fault_of_extras
from quire.scheduler_proc.request import STATUS_OF_END, Request, RequestStatus
from quire.scheduler_proc.request_queue import FCFSRequestQueue
from quire.scheduler_proc.statistics import Counters
from quire.scheduler_proc.step import InFlightStep, StepPlan, build_diff


class WorkerFault(Exception):
    """A worker's result cannot be what it computed: nothing of it was applied."""


class Scheduler:
    """Owns every request and, through the KVCacheManager, every block.

    Invariants (``check``): a request is in exactly one of ``running``, ``waiting`` and ``leaving``; it holds blocks
    exactly when running or leaving; what is in flight was sent and not answered; every accepted request ends once.
    """

    def __init__(self, config: EngineConfig, layout: KVLayout, num_blocks: int) -> None:
        """``num_blocks``: blocks of the pool, the null block included."""
        self.config = config
        self.kv = KVCacheManager(layout, num_blocks, config.enable_prefix_caching)
        self.requests: dict[tuple[int, str], Request] = {}
        self.waiting = FCFSRequestQueue()
        self.running: list[Request] = []
        self.leaving: dict[int, Request] = {}
        """Requests whose last token is in flight: gone from the workers, but not yet ended."""
        self.in_flight: deque[InFlightStep] = deque()
        self.paused = False
        self._step = 0
        self._handles = HandlePool()
        self._retired: list[int] = []
        self._removed: list[int] = []
        self.sampled_handles: list[int] = []
        """Whose tokens a result holds that does not say: the same as the last one that did."""
        self._outputs = OutputCollector()
        self._replies: list[tuple[int, SchedulerToFrontEnd]] = []
        self._stats = Counters()

    # ---- events

    def consume(self, event: Consumed, client: int = 0) -> None:
        """Take one event. ``client`` is the index of the front end that it came from.

        Raises:
            WorkerFault: a result that no worker could have computed.
        """
        match event:
            case AddRequest() | OpaqueRequest():
                self._add(event, client)
            case Abort():
                for request_id in event.request_ids:
                    request = self.requests.get((client, request_id))
                    if request is not None:
                        self._finish(request, EndReason.ABORTED)
            case Stop():
                request = self.requests.get((client, event.request_id))
                if request is not None:
                    self._stop_at(request, event.num_output_tokens)
            case Control():
                self._control(event, client)
            case ModelRunnerOutput():
                self.update_from_output(event)
            case OpaqueResult():
                self._update_from_opaque(event)
            case _:
                assert_never(event)

    def drop_client(self, client: int) -> None:
        """A front end is gone: so are its requests."""
        for request in [r for r in self.requests.values() if r.client == client]:
            self._finish(request, EndReason.ABORTED)

    def fail_all(self, detail: str) -> None:
        """The engine cannot go on: each request ends with the reason."""
        for request in list(self.requests.values()):
            self._finish(request, EndReason.ERROR, detail=detail)

    def take_messages(self) -> list[tuple[int, SchedulerToFrontEnd]]:
        """(client, message) for the front ends, since the last call."""
        messages = self._replies + self._outputs.take()
        self._replies = []
        return messages

    def _add(self, event: AddRequest | OpaqueRequest, client: int) -> None:
        try:
            if (client, event.request_id) in self.requests:
                raise Refusal("duplicate_request_id", "request_id", "request_id is in use")
            request = admit(event, client, self.config, self.kv.max_tokens, self.kv.block_size)
        except Refusal as refusal:
            self._replies.append((client, refusal.message(event.request_id)))
            return
        request.handle = self._handles.take()
        self.requests[client, request.request_id] = request
        self.waiting.add_request(request)
        self._stats.prompt_tokens += request.num_prompt_tokens
        if request.needs_no_more_steps:  # a resubmission that had got everything
            self._finish(request, EndReason.LENGTH)

    def _control(self, event: Control, client: int) -> None:
        done = True
        match event.kind:
            case "statistics":
                pass
            case "pause" | "resume":
                self.paused = event.kind == "pause"
            case "reset_prefix_cache":
                done = self.kv.reset_prefix_cache()
            case _:
                done = False
        self._replies.append((client, self.statistics(event.query, done)))

    # ---- what runs next

    @property
    def can_schedule(self) -> bool:
        """Whether ``schedule`` may be asked: something waits or runs, and the pipeline has room."""
        room = len(self.in_flight) < self.config.pipeline_depth
        return room and not self.paused and bool(self.running or self.waiting)

    def schedule(self) -> SchedulerOutput | None:
        """Decide one step: everyone that runs gets on first, then who waits, under one token budget.

        There are no phases: a request has so many positions to compute, one while decoding and more in a prefill.
        Returns the diff for the workers, or None when nothing can run now.
        """
        if not self.can_schedule:
            return None
        plan = StepPlan(self.config.max_num_batched_tokens)
        self._let_go_of_the_done()
        self._schedule_running(plan)
        if not plan.preempted:
            self._schedule_waiting(plan)
        return self._commit(plan) if plan.shares else None

    def _let_go_of_the_done(self) -> None:
        """Length limits are known a step ahead: such requests leave the workers now and end with their last result."""
        done = [r for r in self.running if r.needs_no_more_steps]
        for request in done:
            self.running.remove(request)
            self.leaving[request.handle] = request
            self._remove_from_workers(request)

    def _schedule_running(self, plan: StepPlan) -> None:
        """Decoding requests first, then partial prefills, both in order of admission."""
        threshold = self.config.long_prefill_token_threshold or self.config.max_num_batched_tokens
        for request in sorted(self.running, key=lambda r: r.num_tokens_to_compute > 1):
            num_tokens = min(request.num_tokens_to_compute, threshold, plan.budget)
            if request.status is not RequestStatus.RUNNING or num_tokens == 0:
                continue
            new_blocks = self.kv.allocate_slots(request, num_tokens)
            while new_blocks is None:
                victim = self.running[-1]  # the last admitted, so that the oldest always gets on
                self._preempt(victim, plan)
                if victim is request:
                    break
                new_blocks = self.kv.allocate_slots(request, num_tokens)
            else:
                plan.add(request, num_tokens, new_blocks)
        # Only now, for a share could be taken back until here, and what is not written must not be found.
        for share in plan.shares.values():
            self._cache_written(share.request, share.num_tokens)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        config = self.config
        while self.waiting and plan.budget > 0 and len(self.running) < config.max_num_seqs:
            request = self.waiting.peek_request()
            if request.num_in_flight:
                break  # preempted a moment ago: its token of the step in flight belongs to what is recomputed
            hits, num_hit_tokens = self.kv.get_computed_blocks(request)
            num_tokens = request.num_tokens - num_hit_tokens
            if config.long_prefill_token_threshold:
                num_tokens = min(num_tokens, config.long_prefill_token_threshold)
            if not config.enable_chunked_prefill and num_tokens > plan.budget:
                break
            num_tokens = min(num_tokens, plan.budget)
            if self.kv.allocate_slots(request, num_tokens, hits, num_hit_tokens) is None:
                break
            self.waiting.pop_request()
            self.running.append(request)
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = num_hit_tokens
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = num_hit_tokens
                self._stats.prefix_cache_queries += request.num_tokens
                self._stats.prefix_cache_hit_tokens += num_hit_tokens
            plan.add(request, num_tokens, None)
            self._cache_written(request, num_tokens)

    def _cache_written(self, request: Request, num_new_tokens: int) -> None:
        self.kv.cache_blocks(request, min(request.num_computed_tokens + num_new_tokens, request.num_tokens))

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Take the request's blocks; it waits at the front and computes everything again, hits aside."""
        plan.take_back(request)
        plan.preempted.append(request)
        self.running.remove(request)
        self.kv.free(request)
        self._remove_from_workers(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._stats.num_preemptions += 1
        self.waiting.prepend_request(request)

    def _commit(self, plan: StepPlan) -> SchedulerOutput:
        """Fix the plan: build the diff, then advance what was scheduled."""
        self._step += 1
        diff = build_diff(self._step, plan, self.running, self._removed, self.kv)
        record = InFlightStep(self._step, [], {}, self._retired)
        self._removed, self._retired = [], []
        for handle, share in plan.shares.items():
            request = share.request
            if share.num_tokens == request.num_tokens_to_compute:
                record.sampling[handle] = request
                request.num_output_placeholders += 1
            request.num_computed_tokens += share.num_tokens
            request.num_in_flight += 1
            record.requests.append(request)
        self.in_flight.append(record)
        self._stats.num_steps += 1
        return diff

    def _remove_from_workers(self, request: Request) -> None:
        if request.on_worker:
            self._removed.append(request.handle)
            request.on_worker = request.parked = False

    # ---- what came of it

    def update_from_output(self, output: ModelRunnerOutput) -> None:
        """Apply the result of the oldest step in flight: append tokens, end what ends, reply.

        Raises:
            WorkerFault: it answers another step, or its tokens or handles cannot be right; nothing was changed.
        """
        tokens = [] if output.tokens is None else output.tokens.tolist()
        handles = self.sampled_handles if output.handles is None else output.handles.tolist()
        record = self._check_result(output.step, handles, tokens)
        fault = fault_of_extras(output, handles, self.config.model.vocab_size)
        if fault:
            raise WorkerFault(f"result of step {output.step}: {fault}")
        self.sampled_handles = handles
        self._acknowledge(record)
        self._outputs.begin_result(output)
        bad = set(output.bad)
        for source, (handle, token) in enumerate(zip(handles, tokens, strict=True)):
            request = record.sampling[handle]
            request.num_output_placeholders -= 1
            if request.status.is_finished:
                self._stats.dropped_tokens += 1
            elif handle in bad:
                self._finish_bad(request, "numerical_error: the model's logits are not finite")
            else:
                self._append(request, token, source)
                self._end_if_complete(request, token)

    def _check_result(self, step: int, handles: list[int], tokens: list[int]) -> InFlightStep:
        if not self.in_flight or self.in_flight[0].step != step:
            expected = self.in_flight[0].step if self.in_flight else "none"
            raise WorkerFault(f"result of step {step} came, expected {expected}")
        record = self.in_flight[0]
        if (
            len(handles) != len(tokens)
            or set(handles) != record.sampling.keys()
            or len(handles) != len(record.sampling)
        ):
            raise WorkerFault(f"result of step {step}: tokens of other requests than those that sample")
        if tokens and not (min(tokens) >= 0 and max(tokens) < self.config.model.vocab_size):
            raise WorkerFault(f"result of step {step}: a token id outside the vocabulary")
        return record

    def _acknowledge(self, record: InFlightStep) -> None:
        self.in_flight.popleft()
        for request in record.requests:
            request.num_in_flight -= 1
        for handle in record.retired:
            self._handles.give_back(handle)

    def _append(self, request: Request, token: int, source: int) -> None:
        request.tokens.append(token)
        self._stats.generation_tokens += 1
        self._outputs.token(request, token, source)

    def _end_if_complete(self, request: Request, token: int) -> None:
        if token in request.stop_tokens:
            own = token in request.sampling.stop_token_ids
            self._finish(request, EndReason.STOPPED, stop_reason=token if own else None)
        elif request.num_tokens >= request.max_total_tokens:
            self._finish(request, EndReason.LENGTH)

    def _update_from_opaque(self, event: OpaqueResult) -> None:
        """A recorded result without tokens: the same endings and block contents as the real one had."""
        handles = event.handles.tolist()
        record = self._check_result(event.step, handles, [0] * len(handles))
        self._acknowledge(record)
        self._outputs.begin_result(None)
        ended = {ending.handle: ending for ending in event.ended}
        hashes: dict[int, list[bytes]] = {}
        for handle, block_hash in event.block_hashes:
            hashes.setdefault(handle, []).append(block_hash)
        for source, handle in enumerate(handles):
            request = record.sampling[handle]
            request.num_output_placeholders -= 1
            if request.status.is_finished:
                self._stats.dropped_tokens += 1
                continue
            ending = ended.get(handle)
            if ending is not None and ending.reason == EndReason.ERROR:
                self._finish_bad(request, ending.detail)
                continue
            self._append(request, 0, source)
            request.block_hashes.extend(hashes.get(handle, ()))
            if ending is not None:
                self._finish(request, EndReason(ending.reason), stop_reason=ending.stop_reason, detail=ending.detail)

    def _finish_bad(self, request: Request, detail: str) -> None:
        """What it wrote may be rotten. After a preemption it is not known any more which blocks were not its own."""
        self.kv.forget_content(request, 0 if request.num_preemptions else max(request.num_cached_tokens, 0))
        self._finish(request, EndReason.ERROR, detail=detail)

    def _stop_at(self, request: Request, num_output_tokens: int) -> None:
        """The front end found a stop string; what came after it does not count."""
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
        if request.status is RequestStatus.RUNNING:
            if reason is not EndReason.ERROR:
                self._cache_written(request, 0)
            if request.handle in self.leaving:
                del self.leaving[request.handle]
            else:
                self.running.remove(request)
            self.kv.free(request)
        else:
            self.waiting.remove_request(request)
        self._remove_from_workers(request)
        request.status = STATUS_OF_END[reason]
        self._retired.append(request.handle)
        del self.requests[request.client, request.request_id]
        counted = request.num_output_tokens if num_output_tokens is None else num_output_tokens
        self._outputs.ended(request, reason, counted, stop_reason, detail)

    # ---- looking in

    def statistics(self, query: int = 0, done: bool = True) -> Statistics:
        pool = self.kv.pool
        return Statistics(
            query=query,
            done=done,
            num_running=len(self.running) + len(self.leaving),
            num_waiting=len(self.waiting),
            num_usable_blocks=pool.num_usable_blocks,
            num_free_blocks=pool.num_free_blocks,
            **self._stats.as_dict(),
        )

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold. O(blocks + requests): for tests, and for idle moments."""
        self.kv.check()
        for request in self.requests.values():
            places = (request in self.running, request in self.waiting, request.handle in self.leaving)
            assert sum(places) == 1, f"{request!r} is in {sum(places)} places"
            assert request.num_output_placeholders <= request.num_in_flight <= self.config.pipeline_depth
            holds = bool(self.kv.coordinator.managers[0].req_to_blocks.get(request.handle))
            assert holds == (request.status is RequestStatus.RUNNING), f"{request!r}: blocks and status disagree"
        assert len(self.running) <= self.config.max_num_seqs
        assert len(self.requests) == len(self.running) + len(self.waiting) + len(self.leaving)
        in_flight_retired = sum(len(step.retired) for step in self.in_flight)
        assert self._handles.num_taken == len(self.requests) + len(self._retired) + in_flight_retired
        for manager in self.kv.coordinator.managers:
            live = {r.handle for r in self.requests.values()}
            assert manager.req_to_blocks.keys() <= live, "blocks are held for requests that are gone"
