"""Turns what a Scheduler does, step by step, into a RunRecord; the clock is the caller's."""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quire.launch.replay.run.run_record import Moment, RequestRun, RunRecord
from quire.launch.replay.run.step_shape import StepShape
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.front_end_messages import Ended, EndReason, Rejected, SchedulerToFrontEnd, StepOutputs
from quire.scheduler_proc.core.scheduler import Scheduler
from quire.scheduler_proc.requests.reasons import Decision
from quire.scheduler_proc.trace.decision_log import DecisionLog


class _Begun(NamedTuple):
    """What was true when a step was decided."""

    num_tokens: int
    num_decodes: int
    num_running: int
    num_waiting: int
    num_held: int
    num_evictable: int


class RunCollector:
    """Looks at a Scheduler after each event and each step, at a cost that follows what changed.

    Owns the RunRecord while it grows. The Scheduler's tap, messages and decisions are taken, and so gone, by it.
    """

    def __init__(self, record: RunRecord, scheduler: Scheduler, tap: DecisionLog) -> None:
        """``tap``: the hooks of ``scheduler``."""
        self.record = record
        self._scheduler = scheduler
        self._tap = tap
        self._by_id: dict[tuple[int, str], RequestRun] = {}
        self._by_name: dict[str, RequestRun] = {}
        """Of any client, the latest: a decision does not say whose request it is about."""
        self._by_handle: dict[int, RequestRun] = {}
        """Those that have not ended."""
        self._in_flight: dict[int, _Begun] = {}
        self._sampling: set[int] = set()
        """Of these, who got a token from the last result."""
        self._last_tokens: dict[int, float] = {}
        """When those that once did, and do not now, got their last one."""
        self._last_result = 0.0
        self._gaps: dict[int, int] = {}
        """Microseconds between two tokens of a request, and how often that was."""

    def arrived(
        self, run: RequestRun, client: int = 0, ended_as: int | None = None, known_as: str | None = None
    ) -> list[RequestRun]:
        """The Scheduler has consumed the arrival that ``run`` is the record of. Returns it if it was refused.

        Args:
            ended_as: its handle, where it has ended at once.
            known_as: the Scheduler's id of it; None: the record's.
        """
        self.record.requests.append(run)
        name = run.request_id if known_as is None else known_as
        request = self._scheduler.table.requests.get((client, name))
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
        """The call was never handed to the Scheduler."""
        run.finish, run.finish_detail, run.end = "rejected", reason, run.arrival
        self.record.requests.append(run)

    def decided(self, now: float, step: int, shape: StepShape) -> None:
        """The Scheduler has given a step."""
        if self._tap.hits:
            for hit in self._tap.hits:
                self._let_in(now, self._by_handle[hit.handle], hit.num_hit_tokens)
            self._tap.hits.clear()
        self._note_decisions(now)
        self._in_flight[step] = self._begun(shape.num_tokens, shape.num_decodes)

    def answered(
        self, now: float, step: int, begin: float, end: float, handles: Int32 | None, num_accepted: int = 0
    ) -> list[RequestRun]:
        """The Scheduler has consumed a step's result at ``now``. Returns whose requests have ended.

        Args:
            begin, end: when the step was computed.
            handles: who samples since this step, where others than in the one before.
            num_accepted: drafts that became tokens: they come at once with another token of their request.
        """
        begun = self._in_flight.pop(step, None)
        if begun is not None:
            self._add_steps((begin,), (end,), begun)
        if step <= self._scheduler.results.stale_until:  # the workers began again since: nobody gets a token
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
        """The Scheduler decided ``steps``, of ``num_decodes`` tokens each, at once, and was answered as often.

        ``begins``, ``ends``: of the steps that were answered: those in flight before, then the first of ``steps``.
        """
        begun = self._begun(num_decodes, num_decodes)
        before = list(self._in_flight)[: len(ends)]
        for at, step in enumerate(before):
            self._add_steps(begins[at : at + 1], ends[at : at + 1], self._in_flight.pop(step))
        first = len(before)
        if first < len(ends):
            self._add_steps(begins[first:], ends[first:], begun)
        for step in steps[len(ends) - first :]:
            self._in_flight[step] = begun
        last, steady = self._last_result, len(self._sampling)
        for end in ends:
            self._count_gaps(end - last, steady)
            last = end
        self._last_result = last

    def changed(self, now: float) -> list[RequestRun]:
        """Something else than a result was consumed: an abort, a stop. Returns whose requests have ended."""
        ended: list[RequestRun] = []
        for client, message in self._scheduler.take_messages():
            self._take_message(now, client, message, ended)
        self._note_decisions(now)
        return ended

    def finish(self, virtual_s: float) -> RunRecord:
        """Nothing comes any more."""
        record, scheduler = self.record, self._scheduler
        record.virtual_s = virtual_s
        record.itl = [(microseconds / 1e3, count) for microseconds, count in sorted(self._gaps.items())]
        record.num_evicted_blocks = scheduler.kv.pool.num_evicted_blocks
        record.preemptions_by_reason = {str(k): v for k, v in scheduler.decisions.preemptions.items() if v}
        return record

    def note(self, now: float, decisions: Iterable[Decision]) -> None:
        """Of the Scheduler's, where somebody else has taken them."""
        for decision in decisions:
            run = None if decision.kind == "evict" else self._by_name.get(decision.request_id)
            if run is None:
                continue
            other = self._by_name.get(decision.beneficiary)
            whose = decision.beneficiary if other is None else other.request_id
            run.moments.append(Moment(now, decision.kind, decision.reason, whose))
            run.num_preemptions += decision.kind == "preempt"

    def _note_decisions(self, now: float) -> None:
        self.note(now, self._scheduler.decisions.take())

    def _let_in(self, now: float, run: RequestRun, num_hit_tokens: int) -> None:
        if run.scheduled < 0:
            run.scheduled, run.num_cached_tokens = now, num_hit_tokens
        else:
            run.moments.append(Moment(now, "resume", ""))

    def _begun(self, num_tokens: int, num_decodes: int) -> _Begun:
        pool, table = self._scheduler.kv.pool, self._scheduler.table
        held = pool.num_usable_blocks - pool.num_free_blocks
        running = len(table.running) + len(table.leaving)
        return _Begun(num_tokens, num_decodes, running, table.num_waiting, held, pool.num_evictable_blocks)

    def _add_steps(self, begins: Sequence[float], ends: Sequence[float], begun: _Begun) -> None:
        """Steps that were all of one kind."""
        steps, count = self.record.steps, len(ends)
        steps.begin.extend(begins)
        steps.end.extend(ends)
        free = self._scheduler.kv.pool.num_usable_blocks - begun.num_held - begun.num_evictable
        num_prefill = begun.num_tokens - begun.num_decodes
        if count == 1:
            steps.prefill_tokens.append(num_prefill)
            steps.decode_tokens.append(begun.num_decodes)
            steps.running.append(begun.num_running)
            steps.waiting.append(begun.num_waiting)
            steps.held.append(begun.num_held)
            steps.cached.append(begun.num_evictable)
            steps.free.append(free)
            return
        columns = (
            (steps.prefill_tokens, num_prefill),
            (steps.decode_tokens, begun.num_decodes),
            (steps.running, begun.num_running),
            (steps.waiting, begun.num_waiting),
            (steps.held, begun.num_held),
            (steps.cached, begun.num_evictable),
            (steps.free, free),
        )
        for column, value in columns:
            column.extend(array("q", (value,)) * count)

    def _count_gaps(self, seconds: float, count: int) -> None:
        if count:
            microseconds = int(seconds * 1e6 + 0.5)
            self._gaps[microseconds] = self._gaps.get(microseconds, 0) + count

    def _change_samplers(self, now: float, sampling: set[int]) -> int:
        """Others get a token than last time; returns how many of them got one last time, too.

        Who comes back after a pause has a longer gap behind it than from the last result.
        """
        live = sampling & self._by_handle.keys()
        for handle in self._sampling - live:
            self._last_tokens[handle] = self._last_result
        joined = live - self._sampling
        for handle in joined:
            run = self._by_handle[handle]
            if run.first_token < 0:
                run.first_token = now
            else:
                self._count_gaps(now - self._last_tokens.pop(handle, self._last_result), 1)
        self._sampling = live
        return len(live) - len(joined)

    def _take_message(self, now: float, client: int, message: SchedulerToFrontEnd, ended: list[RequestRun]) -> int:
        """Returns how many seemed to get a token and did not, for their requests failed."""
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
        """It could not wait, or was held and turned out never to be able to run."""
        if run is not None and not run.finish:
            run.finish, run.finish_detail, run.end = "rejected", message.message or message.code, now

    def _end(self, now: float, ending: Ended) -> RequestRun:
        run = self._by_handle.pop(ending.handle)
        run.end, run.num_output_tokens = now, ending.num_output_tokens
        run.finish, run.finish_detail = EndReason(ending.reason).finish_reason, ending.detail
        self._sampling.discard(ending.handle)
        self._last_tokens.pop(ending.handle, None)
        if not run.num_output_tokens:  # what it seemed to get was none
            run.first_token = -1.0
        return run
