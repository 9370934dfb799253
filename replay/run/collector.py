"""Turns the decisions and messages of a Scheduler into a RunRecord. The caller provides the time."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.front_end_messages import Ended, EndReason, Rejected, SchedulerToFrontEnd, StepOutputs
from quire.replay.run.run_record import Moment, RequestRun, RunRecord
from quire.replay.run.step_shape import StepShape
from quire.scheduler_proc.requests.reasons import Decision, PreemptReason
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.decision_log import DecisionLog


class _StepState(NamedTuple):
    """The state of batch, queues and pool when a step was scheduled."""

    num_tokens: int
    num_decodes: int
    num_running: int
    num_waiting: int
    num_held: int
    num_evictable: int


class RunCollector:
    """Reads a Scheduler after each event and each step, in time proportional to what changed.

    Owns the RunRecord until ``finish``. It takes the Scheduler's messages and decisions and the hits of its decision
    log, so that other readers do not see them.
    """

    def __init__(
        self,
        record: RunRecord,
        scheduler: Scheduler,
        decision_log: DecisionLog,
        on_started: Callable[[RequestRun], None] | None = None,
    ) -> None:
        """
        Args:
            decision_log: the hooks of ``scheduler``.
            on_started: called with each request that gets its first token.
        """
        self._on_started = on_started
        self.record = record
        self._scheduler = scheduler
        self._decision_log = decision_log
        self._by_id: dict[tuple[int, str], RequestRun] = {}
        self._by_name: dict[str, RequestRun] = {}
        """The latest request with this id, of any client: a decision names no client."""
        self._by_handle: dict[int, RequestRun] = {}
        """Unfinished requests."""
        self._in_flight: dict[int, _StepState] = {}
        self._sampling: set[int] = set()
        """Handles of the requests that got a token from the last result."""
        self._last_tokens: dict[int, float] = {}
        """Time of the last token of requests that sampled earlier but not in the last result."""
        self._last_result = 0.0
        self._gaps: dict[int, int] = {}
        """Number of gaps between two tokens of a request, by length in microseconds."""
        self._interrupted: dict[str, RequestRun] = {}
        """Unfinished requests of a scheduler that died, until they are resubmitted to the next one."""
        self._preemptions: Counter[str] = Counter()
        self._lost: dict[RequestRun, int] = {}
        """Positions that preempted requests had computed."""

    def restarted(self, now: float, scheduler: Scheduler, decision_log: DecisionLog) -> None:
        """Continue with the scheduler that replaced the one that died at ``now``.

        A resubmitted request is the same request. Those that were running count as preempted.
        """
        self._add_counts()
        for run in self._by_handle.values():
            self._interrupted[run.request_id] = run
            if run.scheduled >= 0:
                run.moments.append(Moment(now, "preempt", PreemptReason.NEW_EPOCH))
                run.num_preemptions += 1
                self._preemptions[PreemptReason.NEW_EPOCH] += 1
        self._scheduler, self._decision_log = scheduler, decision_log
        self._by_handle.clear()
        self._in_flight.clear()
        self._last_tokens.clear()
        self._sampling = set()

    def arrived(
        self, run: RequestRun, client: int = 0, ended_as: int | None = None, known_as: str | None = None
    ) -> list[RequestRun]:
        """Record an arrival that the Scheduler has consumed. Returns [run] if the request was rejected.

        Args:
            ended_as: the request's handle if it finished at once.
            known_as: the request's id in the Scheduler; None if it is the record's.
        """
        name = run.request_id if known_as is None else known_as
        request = self._scheduler.table.requests.get((client, name))
        if (before := self._interrupted.pop(run.request_id, None)) is not None:
            run = before
            if request is not None and run.first_token >= 0:
                self._last_tokens[request.handle] = self._last_result
        else:
            self.record.requests.append(run)
        self._by_id[client, name] = self._by_name[name] = run
        if request is not None:
            self._by_handle[request.handle] = run
        elif ended_as is not None:
            self._by_handle[ended_as] = run
        else:
            self.changed(run.arrival)
            return [run] if run.finish else []
        return []

    def rejected(self, run: RequestRun, reason: str) -> None:
        """Record a call that was rejected before it reached the Scheduler."""
        run.finish, run.finish_detail, run.end = "rejected", reason, run.arrival
        self.record.requests.append(run)

    def step_decided(self, now: float, step: int, shape: StepShape) -> None:
        """Record a step that the Scheduler has just scheduled."""
        if self._decision_log.hits:
            for hit in self._decision_log.hits:
                if (run := self._by_handle.get(hit.handle)) is not None:  # a beam has none
                    self._admit(now, run, hit.num_hit_tokens)
                    run.num_loaded_tokens += hit.num_loaded_tokens
            self._decision_log.hits.clear()
        self._note_decisions(now)
        self._in_flight[step] = self._step_state(shape.num_tokens, shape.num_decodes)

    def step_finished(
        self, now: float, step: int, begin: float, end: float, handles: Int32 | None, num_accepted: int = 0
    ) -> list[RequestRun]:
        """Record a step's result that the Scheduler has consumed at ``now``. Returns the requests that finished.

        Args:
            begin, end: when the step was computed.
            handles: the requests that sampled, if they differ from those of the previous step.
            num_accepted: accepted draft tokens, which arrive together with another token of their request.
        """
        state = self._in_flight.pop(step, None)
        if state is not None:
            self._add_steps((begin,), (end,), state)
        if step <= self._scheduler.results.stale_until:  # result of an earlier worker epoch: its tokens are ignored
            return self.changed(now)
        steady = len(self._sampling) if handles is None else self._change_samplers(now, set(handles.tolist()))
        ended: list[RequestRun] = []
        for client, message in self._scheduler.take_messages():
            steady -= self._take_message(now, client, message, ended)
        self._count_gaps(now - self._last_result, steady)
        self._count_gaps(0.0, num_accepted)
        self._last_result = now
        return ended

    def fast_forwarded(self, steps: range, num_decodes: int, begins: Sequence[float], ends: Sequence[float]) -> None:
        """Record a fast-forward: ``steps`` of ``num_decodes`` tokens each were scheduled, and as many finished.

        ``begins`` and ``ends`` are the times of the finished steps: those in flight before, then the first of
        ``steps``.
        """
        state = self._step_state(num_decodes, num_decodes)
        before = list(self._in_flight)[: len(ends)]
        for at, step in enumerate(before):
            self._add_steps(begins[at : at + 1], ends[at : at + 1], self._in_flight.pop(step))
        first = len(before)
        if first < len(ends):
            self._add_steps(begins[first:], ends[first:], state)
        for step in steps[len(ends) - first :]:
            self._in_flight[step] = state
        last, steady = self._last_result, len(self._sampling)
        for end in ends:
            self._count_gaps(end - last, steady)
            last = end
        self._last_result = last

    def changed(self, now: float) -> list[RequestRun]:
        """Record any other event that the Scheduler has consumed. Returns the requests that finished."""
        ended: list[RequestRun] = []
        for client, message in self._scheduler.take_messages():
            self._take_message(now, client, message, ended)
        self._note_decisions(now)
        return ended

    def finish(self, virtual_s: float) -> RunRecord:
        """Complete the record after the last event and return it."""
        self._add_counts()
        record = self.record
        if (pins := self._scheduler.programs.pins).is_enabled:
            record.pins = {"ended": dict(pins.ended), "seconds": pins.seconds_by_tool, "failures": pins.num_failures}
        if (limit := self._scheduler.programs.limit) is not None:
            record.program_limit = {"admitted": limit.num_admitted, "released": dict(limit.num_released)}
        record.virtual_s = virtual_s
        record.itl = [(microseconds / 1e3, count) for microseconds, count in sorted(self._gaps.items())]
        record.preemptions_by_reason = {str(k): v for k, v in self._preemptions.items() if v}
        return record

    def _add_counts(self) -> None:
        """Add the counters of the scheduler, which has ended."""
        self.record.num_evicted_blocks += self._scheduler.kv.pool.num_evicted_blocks
        self._preemptions.update(self._scheduler.decisions.preemptions)
        statistics = self._scheduler.statistics()
        for policy, count in statistics.evictions_by_policy.items():
            self.record.evictions_by_policy[policy] = self.record.evictions_by_policy.get(policy, 0) + count
        for state in self._scheduler.transfers.tiers():
            counts = msgspec.structs.asdict(state)
            tier = self.record.tiers.setdefault(counts.pop("name"), {})
            for name, value in counts.items():
                tier[name] = value + (0 if name in ("num_pages", "num_cached") else tier.get(name, 0))

    def note(self, now: float, decisions: Iterable[Decision]) -> None:
        """Record decisions that the caller has taken from the Scheduler."""
        for decision in decisions:
            run = (
                None if decision.kind in ("evict", "choose", "pin", "unpin") else self._by_name.get(decision.request_id)
            )
            if run is None:
                continue
            other = self._by_name.get(decision.beneficiary)
            beneficiary = decision.beneficiary if other is None else other.request_id
            run.moments.append(Moment(now, decision.kind, decision.reason, beneficiary))
            run.num_preemptions += decision.kind == "preempt"
            if decision.kind == "preempt":
                self._lost[run] = decision.num_tokens

    def _note_decisions(self, now: float) -> None:
        self.note(now, self._scheduler.decisions.take())

    def _admit(self, now: float, run: RequestRun, num_hit_tokens: int) -> None:
        if run.scheduled < 0:
            run.scheduled, run.num_cached_tokens = now, num_hit_tokens
        else:
            run.moments.append(Moment(now, "resume", ""))
            run.num_recomputed_tokens += max(self._lost.pop(run, 0) - num_hit_tokens, 0)

    def _step_state(self, num_tokens: int, num_decodes: int) -> _StepState:
        pool, table = self._scheduler.kv.pool, self._scheduler.table
        held = pool.num_usable_blocks - pool.num_free_blocks
        running = len(table.running) + len(table.leaving)
        return _StepState(num_tokens, num_decodes, running, table.num_waiting, held, pool.num_evictable_blocks)

    def _add_steps(self, begins: Sequence[float], ends: Sequence[float], state: _StepState) -> None:
        """Add steps with equal token counts, queues and pool."""
        steps, count = self.record.steps, len(ends)
        steps.begin.extend(begins)
        steps.end.extend(ends)
        free = self._scheduler.kv.pool.num_usable_blocks - state.num_held - state.num_evictable
        num_prefill = state.num_tokens - state.num_decodes
        if count == 1:
            steps.prefill_tokens.append(num_prefill)
            steps.decode_tokens.append(state.num_decodes)
            steps.running.append(state.num_running)
            steps.waiting.append(state.num_waiting)
            steps.held.append(state.num_held)
            steps.cached.append(state.num_evictable)
            steps.free.append(free)
            return
        columns = (
            (steps.prefill_tokens, num_prefill),
            (steps.decode_tokens, state.num_decodes),
            (steps.running, state.num_running),
            (steps.waiting, state.num_waiting),
            (steps.held, state.num_held),
            (steps.cached, state.num_evictable),
            (steps.free, free),
        )
        for column, value in columns:
            column.extend(array("q", (value,)) * count)

    def _count_gaps(self, seconds: float, count: int) -> None:
        if count:
            microseconds = int(seconds * 1e6 + 0.5)
            self._gaps[microseconds] = self._gaps.get(microseconds, 0) + count

    def _change_samplers(self, now: float, sampling: set[int]) -> int:
        """Replace the sampling requests; return how many of them also sampled in the previous step.

        The gap of a request that resumes starts at its own last token, not at the last result.
        """
        live = sampling & self._by_handle.keys()
        for handle in self._sampling - live:
            self._last_tokens[handle] = self._last_result
        joined = live - self._sampling
        for handle in joined:
            run = self._by_handle[handle]
            if run.first_token < 0:
                run.first_token = now
                if self._on_started is not None:
                    self._on_started(run)
            else:
                self._count_gaps(now - self._last_tokens.pop(handle, self._last_result), 1)
        self._sampling = live
        return len(live) - len(joined)

    def _take_message(self, now: float, client: int, message: SchedulerToFrontEnd, ended: list[RequestRun]) -> int:
        """Record a message; return how many of the sampling requests failed and got no token."""
        if isinstance(message, Rejected):
            self._refuse(now, self._by_id.get((client, message.request_id)), message)
        if not isinstance(message, StepOutputs):
            return 0
        failed = 0
        for ending in message.ended:
            failed += ending.reason == EndReason.ERROR and ending.handle in self._sampling
            ended.append(self._end(now, ending))
        return failed

    def _refuse(self, now: float, run: RequestRun | None, message: Rejected) -> None:
        """Record a rejection: the queue was full, or a held request cannot run."""
        if run is not None and not run.finish:
            run.finish, run.finish_detail, run.end = "rejected", message.message or message.code, now

    def _end(self, now: float, ending: Ended) -> RequestRun:
        run = self._by_handle.pop(ending.handle)
        run.end, run.num_output_tokens = now, ending.num_output_tokens
        run.finish, run.finish_detail = EndReason(ending.reason).finish_reason, ending.detail
        self._sampling.discard(ending.handle)
        self._last_tokens.pop(ending.handle, None)
        if not run.num_output_tokens:  # its sampled token was discarded
            run.first_token = -1.0
        return run
