"""Turns what a Scheduler does, step by step, into a RunRecord; the clock is the caller's."""

from collections.abc import Iterable
from typing import NamedTuple

from quire.launch.replay.cost import StepShape
from quire.launch.replay.run_record import Moment, RequestRun, RunRecord
from quire.protocol.messages import Ended, EndReason, Int32, Introduced, Rejected, SchedulerToFrontEnd, StepOutputs
from quire.scheduler_proc.reasons import Decision
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.tap import Tap


class _Begun(NamedTuple):
    """What was true when a step was decided."""

    step: int
    shape: StepShape
    num_running: int
    num_waiting: int
    num_held: int
    num_evictable: int


class RunCollector:
    """Looks at a Scheduler after each event and each step, at a cost that follows what changed.

    Owns the RunRecord while it grows. The Scheduler's tap, messages and decisions are taken, and so gone, by it.
    """

    def __init__(self, record: RunRecord, scheduler: Scheduler, tap: Tap | None = None) -> None:
        """``tap``: the one that the Scheduler has already; None: it gets one."""
        self.record = record
        self._scheduler = scheduler
        self._tap = Tap() if tap is None else tap
        scheduler.listen(self._tap)
        self._by_id: dict[tuple[int, str], RequestRun] = {}
        self._by_handle: dict[int, RequestRun] = {}
        self._in_flight: dict[int, _Begun] = {}
        self._sampling: set[int] = set()
        self._last_tokens: dict[int, float] = {}
        self._last_result = 0.0
        self._gaps: dict[float, int] = {}

    @property
    def tap(self) -> Tap:
        return self._tap

    def arrived(self, run: RequestRun, client: int = 0, ended_as: int | None = None) -> None:
        """The Scheduler has consumed the arrival that ``run`` is the record of.

        ``ended_as``: its handle, where it has ended at once.
        """
        self.record.requests.append(run)
        request = self._scheduler.table.requests.get((client, run.request_id))
        if request is not None:
            self._by_id[client, run.request_id] = self._by_handle[request.handle] = run
        elif ended_as is not None:
            self._by_handle[ended_as] = run

    def rejected(self, run: RequestRun, reason: str) -> None:
        """The call was never handed to the Scheduler."""
        run.finish, run.finish_detail, run.end = "rejected", reason, run.arrival
        self.record.requests.append(run)

    def decided(self, now: float, step: int, shape: StepShape) -> None:
        """The Scheduler has given a step."""
        pool, table = self._scheduler.kv.pool, self._scheduler.table
        if self._tap.hits:
            for hit in self._tap.hits:
                self._let_in(now, self._by_handle[hit.handle], hit.num_hit_tokens)
            self._tap.hits.clear()
        self._note_decisions(now)
        held = pool.num_usable_blocks - pool.num_free_blocks
        running, waiting = len(table.running) + len(table.leaving), table.num_waiting
        self._in_flight[step] = _Begun(step, shape, running, waiting, held, pool.num_evictable_blocks)

    def answered(self, now: float, step: int, begin: float, end: float, handles: Int32 | None) -> list[RequestRun]:
        """The Scheduler has consumed a step's result at ``now``. Returns whose requests have ended.

        Args:
            begin, end: when the step was computed.
            handles: who samples since this step, where others than in the one before.
        """
        begun = self._in_flight.pop(step, None)
        if begun is not None:
            self._add_step(begin, end, begun)
        if handles is not None:
            self._change_samplers(set(handles.tolist()))
        introduced = 0
        ended: list[RequestRun] = []
        for client, message in self._scheduler.take_messages():
            introduced += self._take_message(now, client, message, ended)
        steady = len(self._sampling) - introduced
        if steady > 0 and now > self._last_result:
            gap = round((now - self._last_result) * 1e3, 3)
            self._gaps[gap] = self._gaps.get(gap, 0) + steady
        self._last_result = now
        return ended

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
        record.itl = sorted(self._gaps.items())
        record.num_evicted_blocks = scheduler.kv.pool.num_evicted_blocks
        record.preemptions_by_reason = {str(k): v for k, v in scheduler.decisions.preemptions.items() if v}
        return record

    def _let_in(self, now: float, run: RequestRun, num_hit_tokens: int) -> None:
        if run.scheduled < 0:
            run.scheduled, run.num_cached_tokens = now, num_hit_tokens
        else:
            run.moments.append(Moment(now, "resume", ""))

    def _note_decisions(self, now: float) -> None:
        self.note(now, self._scheduler.decisions.take())

    def note(self, now: float, decisions: Iterable[Decision]) -> None:
        """Of the Scheduler's, where somebody else has taken them."""
        for decision in decisions:
            run = self._by_id.get((0, decision.request_id)) or self._find(decision.request_id)
            if run is None or decision.kind == "evict":
                continue
            run.moments.append(Moment(now, decision.kind, decision.reason, decision.beneficiary))
            run.num_preemptions += decision.kind == "preempt"

    def _find(self, request_id: str) -> RequestRun | None:
        """Of another client than the first; a decision does not say whose it is."""
        return next((run for (_, name), run in self._by_id.items() if name == request_id), None)

    def _add_step(self, begin: float, end: float, begun: _Begun) -> None:
        steps, pool = self.record.steps, self._scheduler.kv.pool
        steps.begin.append(begin)
        steps.end.append(end)
        decodes = begun.shape.num_decodes
        steps.prefill_tokens.append(begun.shape.num_tokens - decodes)
        steps.decode_tokens.append(decodes)
        steps.running.append(begun.num_running)
        steps.waiting.append(begun.num_waiting)
        steps.held.append(begun.num_held)
        steps.cached.append(begun.num_evictable)
        steps.free.append(pool.num_usable_blocks - begun.num_held - begun.num_evictable)

    def _change_samplers(self, sampling: set[int]) -> None:
        """Who joins after a pause has a longer gap behind it than from the last result."""
        for handle in self._sampling - sampling:
            self._last_tokens[handle] = self._last_result
        self._sampling = sampling

    def _take_message(self, now: float, client: int, message: SchedulerToFrontEnd, ended: list[RequestRun]) -> int:
        """Returns how many got their first token."""
        if isinstance(message, Rejected):
            self._refuse(now, self._by_id.get((client, message.request_id)), message)
            return 0
        if not isinstance(message, StepOutputs):
            return 0
        introduced = self._introduce(now, message.introduced, message)
        for ending in message.ended:
            ended.append(self._end(now, ending))
        return introduced

    def _refuse(self, now: float, run: RequestRun | None, message: Rejected) -> None:
        """Who was held turned out never to be able to run."""
        if run is not None and not run.finish:
            run.finish, run.finish_detail, run.end = "rejected", message.message or message.code, now

    def _introduce(self, now: float, introduced: Iterable[Introduced], message: StepOutputs) -> int:
        count = 0
        never_ran = {e.handle for e in message.ended if not e.num_output_tokens}
        for each in introduced:
            if each.handle not in never_ran:
                self._by_handle[each.handle].first_token = now
                count += 1
        return count

    def _end(self, now: float, ending: Ended) -> RequestRun:
        run = self._by_handle[ending.handle]
        run.end, run.num_output_tokens = now, ending.num_output_tokens
        run.finish, run.finish_detail = EndReason(ending.reason).finish_reason, ending.detail
        self._sampling.discard(ending.handle)
        return run
