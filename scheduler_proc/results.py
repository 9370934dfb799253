"""What came of the steps: tokens and endings, to the requests and to their clients."""

from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

from quire.protocol.config import EngineConfig
from quire.protocol.messages import EndReason, ModelRunnerOutput, OpaqueResult
from quire.scheduler_proc.in_flight import InFlightStep, Sampled, StepsInFlight, StepTooLarge
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.outputs import OutputCollector
from quire.scheduler_proc.reasons import Decision, PreemptReason
from quire.scheduler_proc.request import STATUS_OF_END, Request, RequestStatus
from quire.scheduler_proc.request_table import RequestTable
from quire.scheduler_proc.statistics import Counters, DecisionLog


class _Ending(NamedTuple):
    reason: EndReason
    stop_reason: int | None = None
    detail: str = ""


_Verdict = Callable[[Request, int], _Ending | None]
"""Whether a request, to which a token was just added, ends with it."""


class Results:
    """Applies the workers' results in order, and ends requests: the one place that does either.

    Owns what clients are told of it (``outputs``) and from which step on results count (``stale_until``).
    """

    def __init__(
        self,
        config: EngineConfig,
        table: RequestTable,
        kv: KVCacheManager,
        in_flight: StepsInFlight,
        stats: Counters,
        decisions: DecisionLog,
    ) -> None:
        self.table = table
        self.cruise = table.cruise
        self.kv = kv
        self.in_flight = in_flight
        self.outputs = OutputCollector()
        self.stale_until = -1
        """Results of steps up to this one are not applied any more."""
        self._stats = stats
        self._decisions = decisions
        self._drafts_are_told = not config.async_scheduling
        self._num_speculative_tokens = config.num_speculative_tokens

    def update_from_output(self, output: ModelRunnerOutput) -> None:
        """Apply the result of the oldest step in flight: append tokens, end what ends, reply.

        Raises:
            WorkerFault: it answers another step, its tokens or handles cannot be right, or the step was too large
                (StepTooLarge); nothing has changed.
        """
        if self._is_stale(output.step):
            return
        if output.failure:
            raise StepTooLarge(output.failure)
        record, sampled = self.in_flight.match(output)
        hits = self.table.stops.positions(sampled.last_tokens)
        may_end = sampled.handles[hits].tolist() if hits else []
        bad = dict.fromkeys(output.bad, "numerical_error: the model's logits are not finite")
        self._apply(record, sampled, output, may_end, bad, self._verdict)

    def update_from_opaque(self, event: OpaqueResult) -> None:
        """A recorded result without tokens: the same endings and block contents as the real one had."""
        if self._is_stale(event.step):
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

        bad = {handle: ended[handle].detail if handle in ended else "" for handle in event.bad}
        self._apply(record, sampled, ModelRunnerOutput(event.step, drafts=event.drafts), list(ended), bad, verdict)

    def _is_stale(self, step: int) -> bool:
        """Whether a result belongs to a step of before the epoch began. The first one after it tells the rows anew."""
        if step > self.stale_until:
            return False
        self._stats.num_stray_messages += 1
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
        self._send_back_readers(record, bad)
        self.in_flight.records.popleft()
        latest = self.cruise.record(record.step, sampled.handles, sampled.last_tokens)
        self._acknowledge(record)
        self.outputs.begin_result()
        for request in (*record.newcomers, *record.sampling.values()):
            if not request.status.is_finished:
                self.outputs.introduce(request)
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
        self.outputs.sampled(sampled, cut, output)

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
        if request.handle in bad and request.status is RequestStatus.PREEMPTED:
            # It computes all of it again, and may not be bad then. What is in flight came after a bad token.
            request.deaf_until = self.cruise.sent
        if record.step <= request.deaf_until:
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
            if self._drafts_are_told:
                told = 0 if output.drafts is None else int(output.drafts[position])
                request.num_drafts = min(told, self._num_speculative_tokens)
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
        self.finish(request, ending.reason, stop_reason=ending.stop_reason, detail=ending.detail)

    def _send_back_readers(self, record: InFlightStep, bad: dict[int, str]) -> None:
        """Whoever found a bad request's blocks in the prefix cache computes them itself (protocol law 6).

        What the bad one wrote is forgotten first. A reader may be bad in the same result, for no fault of its own.
        """
        sampling = record.requests() if bad else {}
        for handle in bad:
            request = sampling[handle]
            if request.status.is_finished:
                continue
            own = self._first_own_block(request)
            self.kv.forget_content(request, own * self.kv.block_size)
            for reader in [*self.table.running.values(), *self.table.leaving.values()]:
                if reader is not request and self._read_from(reader, request, own, reader.handle in bad):
                    self._decisions.note(Decision(record.step, "preempt", reader.request_id, PreemptReason.BAD_PREFIX))
                    self.table.put_out(reader)
                    self.kv.free(reader)

    def _first_own_block(self, request: Request) -> int:
        """From which block on it wrote itself. After a preemption that is not known any more: all may be its own."""
        cached = 0 if request.num_preemptions else max(request.num_cached_tokens, 0)
        return cached // self.kv.block_size

    def _read_from(self, reader: Request, writer: Request, first: int, reader_is_bad: bool) -> bool:
        """Whether ``reader`` may hold blocks that ``writer`` wrote, of which ``first`` is the first."""
        if len(reader.block_hashes) <= first or len(writer.block_hashes) <= first:
            return False
        if reader.block_hashes[first] != writer.block_hashes[first]:
            return False
        if reader.num_preemptions:
            return not reader_is_bad  # two of which neither is known to have written would send back each other
        return reader.num_cached_tokens > first * self.kv.block_size

    def _finish_bad(self, request: Request, detail: str) -> None:
        """What it wrote may be rotten."""
        self.kv.forget_content(request, self._first_own_block(request) * self.kv.block_size)
        self.finish(request, EndReason.ERROR, detail=detail)

    def stop_at(self, request: Request, num_output_tokens: int) -> None:
        """The front end found a stop string; what came after it does not count."""
        self.table.unsettle(request)
        counted = max(0, min(num_output_tokens, request.num_output_tokens))
        self._stats.generation_tokens -= request.num_output_tokens - counted
        self.finish(request, EndReason.STOPPED, num_output_tokens=counted)

    def finish(
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
                self.kv.cache_blocks(request, min(request.num_computed_tokens, request.num_tokens))
            self.kv.free(request)
        self.table.end(request, STATUS_OF_END[reason])
        counted = request.num_output_tokens if num_output_tokens is None else num_output_tokens
        self.outputs.ended(request, reason, counted, stop_reason, detail)
