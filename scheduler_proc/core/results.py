"""Results: applies the workers' results to requests, ends requests, and passes tokens to clients."""

from operator import itemgetter
from typing import NamedTuple

from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.front_end_messages import EndReason
from quire.protocol.wire.side_rows import SIDE_KINDS, RowsOf, SideRows
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.endings import Ending, Endings, TokenEndings
from quire.scheduler_proc.messages.results import Sampled, StepTooLarge
from quire.scheduler_proc.messages.steps import InFlightStep
from quire.scheduler_proc.requests.reasons import PreemptReason
from quire.scheduler_proc.requests.request import STATUS_OF_END, Request, RequestStatus

MAX_REASON = 300
"""Longest error text of a worker, in characters, that is passed to a client."""


class _Faults(NamedTuple):
    """Error texts by handle.

    Attributes:
        bad: requests whose logits are not finite, so that their cached blocks cannot be trusted.
        failed: requests that failed for a reason of their own; their cached blocks are correct.
        readers: requests that were preempted because they may have read blocks of bad ones.
    """

    bad: dict[int, str]
    failed: dict[int, str]
    readers: set[int]

    @classmethod
    def of(cls, bad: dict[int, str], failed: list[tuple[int, str]]) -> "_Faults":
        if not bad and not failed:
            return NO_FAULTS
        return cls(bad, {handle: f"request_failed: {reason[:MAX_REASON]}" for handle, reason in failed}, set())


NO_FAULTS = _Faults({}, {}, set())


class _Answer(NamedTuple):
    """A valid result: the step that it answers, its tokens, what is wrong with requests, and what ends them."""

    record: InFlightStep
    sampled: Sampled
    faults: _Faults
    endings: Endings


class Results:
    """Applies the workers' results in order, and ends requests. No other code does either.

    Owns the last step whose results are ignored (``stale_until``).
    """

    def __init__(self, core: Core) -> None:
        self.core = core
        self.table = core.table
        self.steady_decode = core.table.steady_decode
        self.kv = core.kv
        self.in_flight = core.in_flight
        self.outputs = core.outputs
        self.stale_until = -1
        """Results of steps up to this one are ignored."""
        self._stats = core.stats
        self._decisions = core.decisions
        self._calls = core.calls
        self._endings = TokenEndings(core.table.stops)

    def update_from_output(self, output: ModelRunnerOutput, recorded: Endings | None = None) -> None:
        """Apply the result of the oldest step in flight: append tokens, end requests, pass tokens to clients.

        Args:
            recorded: the endings of a result from a trace, which has no tokens for clients and no rows beside them;
                None for a worker's result, whose tokens end requests.

        Raises:
            WorkerFault: the result belongs to another step or is invalid, or the step was too large (StepTooLarge);
                nothing has changed.
        """
        if self.is_stale(output.step):
            return
        if output.failure:
            raise StepTooLarge(output.failure)
        record, sampled = self.in_flight.match(output, is_recorded=recorded is not None)
        endings = self._endings if recorded is None else recorded
        bad = {handle: endings.bad_row_detail(_client_handle(record, handle)) for handle in output.bad}
        answer = _Answer(record, sampled, _Faults.of(bad, output.failed), endings)
        cut, owners = self._apply(answer, output)
        for feature in self._calls.applied:
            feature.applied()
        if recorded is None:
            self.outputs.sampled(sampled, cut, owners)

    def is_stale(self, step: int) -> bool:
        """Whether a result belongs to an earlier worker epoch; counts it if so."""
        if step > self.stale_until:
            return False
        self._stats.num_stray_messages += 1
        return True

    def _apply(self, answer: _Answer, output: ModelRunnerOutput) -> tuple[dict[int, int], list[list[int | None]]]:
        """Apply a validated result. Returns, by position, the number of tokens that count, where it is not all; and for
        each kind of rows beside the tokens the clients of its parts."""
        record, sampled, faults, _ = answer
        if faults is not NO_FAULTS:
            for handle in (*faults.bad, *faults.failed):
                if handle in self.steady_decode.batch:
                    # Must happen before the result is recorded: the token of such a row is not valid.
                    self.table.leave_steady(self.steady_decode.batch[handle])
            # Before the record is removed and tokens are stored: readers are found by the blocks and tokens that they
            # had when the step ran.
            self._preempt_readers(record, faults)
        self.in_flight.records.popleft()
        # One assignment stores the tokens of all rows in steady decode. What follows looks only at rows outside of it,
        # and at those whose token may end them.
        latest = self.steady_decode.record(record.step, sampled.handles, sampled.last_tokens)
        # Before tokens are appended, so that a request which ends here counts no step in flight that was answered.
        plain = self._enter_rows(record, faults)
        self.table.release_handles(record.retired)
        for feature in self._calls.acknowledged:
            feature.acknowledged(record, output)
        # Before the endings: a request that ends with this result still gets its rows.
        owners = [self._owners(record, rows, faults) for rows in output.side]
        if record.without_tokens:
            self._end_without_tokens(record, faults)
        cut = self._apply_tokens(answer, plain, latest)
        num_kept = len(sampled.tokens) - sum(sampled.count(at) - kept for at, kept in cut.items())
        self._stats.generation_tokens += num_kept
        return cut, owners

    def _enter_rows(self, record: InFlightStep, faults: _Faults) -> dict[int, Request]:
        """Count the step as answered by its rows, and introduce their requests to clients.

        Returns the requests outside of steady decode that have sampled, by handle.
        """
        self.outputs.begin_result()
        plain: dict[int, Request] = {}
        for handle, row in record.rows.items():
            request = row.request
            request.answered(row.num_tokens)
            if not row.samples:
                continue
            if not request.is_steady:
                plain[handle] = request
            if request.status.is_finished:
                continue
            self.outputs.introduce(request)
            is_first = request.sampling.return_timeline and len(request.tokens) == request.num_prompt_tokens
            if is_first and record.step > request.ignore_results_until and handle not in faults.bad:
                self._decisions.follow(request, "first_token")
        return plain

    def _apply_tokens(self, answer: _Answer, plain: dict[int, Request], latest: Int32) -> dict[int, int]:
        """Apply the tokens of ``plain`` requests, and end those in steady decode, in the order of the result.

        ``latest``: the last tokens by handle. Returns how many tokens count, by position, where it is not all.
        """
        batch = self.steady_decode.batch
        cut: dict[int, int] = {}
        may_end = answer.endings.candidates(answer.sampled)
        if not plain and not may_end:
            return cut
        found = plain | {handle: batch[handle] for handle in may_end if handle in batch}
        order = [(self.in_flight.position_of(handle), request) for handle, request in found.items()]
        for position, request in sorted(order, key=itemgetter(0)):
            if not request.is_steady:
                kept = self._apply_row(answer, request, position)
                if kept < answer.sampled.count(position):
                    cut[position] = kept
            elif (ending := answer.endings.ending_after(request, int(latest[request.handle]))) is not None:
                self.table.leave_steady(request)
                self._end(request, ending)
        return cut

    def _apply_row(self, answer: _Answer, request: Request, position: int) -> int:
        """Apply the part of one request in a result. Returns the number of its tokens that count."""
        record, sampled, faults, endings = answer
        tokens = sampled.row(position)
        drafts = record.rows[request.handle].num_drafts
        request.sampled(drafts)
        is_dropped = request.status.is_finished
        if is_dropped or self._is_lost(record, request, faults):
            self._stats.dropped_tokens += len(tokens) if is_dropped or not request.status.is_finished else 0
            return 0
        if drafts:
            self.apply_draft_results(request, drafts, sampled.num_verified(position), len(tokens) - 1)
        if any(feature.takes(request, sampled, position, endings) for feature in self._calls.takes):
            return 0
        for kept, token in enumerate(tokens, 1):
            request.tokens.append(token)
            ending = endings.ending_after(request, token)
            if ending is not None:
                self._end(request, ending)
                return kept
        return len(tokens)

    def _is_lost(self, record: InFlightStep, request: Request, faults: _Faults) -> bool:
        """Return whether a request has no result in this step. If it is bad or failed, it ends or is retried."""
        handle, is_reader = request.handle, request.handle in faults.readers
        if handle in faults.bad and request.status is RequestStatus.PREEMPTED and (is_reader or not request.was_bad):
            # The request recomputes everything and may be correct then, unless it was bad before without reading bad
            # blocks. Its tokens in flight follow a bad token.
            request.was_bad |= not is_reader
            request.ignore_results_until = self.steady_decode.clock.sent
        if record.step <= request.ignore_results_until:
            return True
        if handle in faults.bad:
            self._finish_bad(request, faults.bad[handle])
        elif handle in faults.failed:  # its cached blocks are correct and stay in the prefix cache
            self.finish(request, EndReason.ERROR, detail=faults.failed[handle])
        return request.status.is_finished

    def _end_without_tokens(self, record: InFlightStep, faults: _Faults) -> None:
        """End the requests that generate nothing and whose prompts end in the step, also if preempted since."""
        for row in record.without_tokens:
            request = row.request
            if row.completes:
                request.sampled(0)
            if not request.status.is_finished and not self._is_lost(record, request, faults) and row.completes:
                self.core.num_without_tokens += 1
                self.finish(request, EndReason.STOPPED)

    def _owners(self, record: InFlightStep, rows: SideRows, faults: _Faults) -> list[int | None]:
        """Return the client that gets each part; none if its request has ended, computes the step again, or is lost.

        Rows of tokens need no answer: they are cut with the tokens, and cost nothing in steady decode.
        """
        owners: list[int | None] = []
        for handle in () if SIDE_KINDS[rows.kind].rows is RowsOf.TOKENS else rows.handles:
            request = record.member(handle)
            is_gone = request is None or request.status.is_finished or record.step <= request.ignore_results_until
            if request is None or is_gone or handle in faults.bad or handle in faults.failed:
                owners.append(None)
            else:
                self.outputs.introduce(request)
                owners.append(request.client)
        return owners

    def apply_draft_results(self, request: Request, drafts: int, verified: int, accepted: int) -> None:
        """Subtract the positions of missing and rejected drafts."""
        request.subtract_drafts(drafts - accepted)
        for feature in self._calls.verified:
            feature.verified(request, verified, accepted)

    def _end(self, request: Request, ending: Ending) -> None:
        self.finish(request, ending.reason, stop_reason=ending.stop_reason, detail=ending.detail)

    def _preempt_readers(self, record: InFlightStep, faults: _Faults) -> None:
        """Preempt requests that read blocks of a bad request, so that they recompute them (protocol law 6).

        The hashes of these blocks are invalidated first. A reader may be bad in the same result as a consequence.
        """
        for handle in faults.bad:
            request = record.member(handle)
            if request is None or request.status.is_finished:
                continue
            own = self._first_own_block(request)
            self.kv.invalidate(request, own * self.kv.block_size)
            self.steady_decode.sync_tokens([*self.steady_decode.batch.values()])  # which tell what a reader has read
            for reader in [*self.table.running.values(), *self.table.leaving.values()]:
                if reader is not request and self._read_from(reader, request, own, reader.handle in faults.bad):
                    faults.readers.add(reader.handle)
                    self._decisions.preempted(record.step, reader, PreemptReason.BAD_PREFIX)
                    self.table.preempt(reader)
                    self.kv.free(reader)
                    if not reader.generates:  # the vector in flight may be of bad blocks
                        reader.ignore_results_until = self.steady_decode.clock.sent

    def _first_own_block(self, request: Request) -> int:
        """Return the index of the first block that the request wrote itself.

        After a preemption this is not known, and all blocks may be its own.
        """
        cached = 0 if request.num_preemptions else max(request.num_cached_tokens, 0)
        return cached // self.kv.block_size

    def _read_from(self, reader: Request, writer: Request, first: int, reader_is_bad: bool) -> bool:
        """Whether ``reader`` may hold blocks that ``writer`` wrote, from block index ``first`` on."""
        if len(reader.block_hashes) <= first or len(writer.block_hashes) <= first:
            return False
        if reader.block_hashes[first] != writer.block_hashes[first]:
            return False
        if reader.num_preemptions:
            return not reader_is_bad  # otherwise two bad requests with unknown writer would preempt each other
        return reader.num_cached_tokens > first * self.kv.block_size

    def _finish_bad(self, request: Request, detail: str) -> None:
        """End a bad request and invalidate the hashes of its blocks, which may hold corrupt KV."""
        self.kv.invalidate(request, self._first_own_block(request) * self.kv.block_size)
        self.finish(request, EndReason.ERROR, detail=detail)

    def drop_steps(self, last: int) -> None:
        """Return all running requests to the queue: the results of the steps up to ``last`` will not be applied."""
        self.stale_until = last
        for request in [*self.table.leaving.values(), *self.table.running.values()]:
            self._decisions.preempted(last + 1, request, PreemptReason.NEW_EPOCH)
            self.table.preempt(request)
            self.kv.free(request)
        for request in self.table.requests.values():
            request.forget_in_flight()
        for record in self.in_flight.drop_all():
            # Handles of ended requests are free only when a step that removes them is answered, and these steps will
            # not be.
            self.table.retire_later(record.retired)
        self.steady_decode.clock.acknowledged = last

    def stop_at(self, request: Request, num_output_tokens: int) -> None:
        """End a request whose front end found a stop string; later tokens do not count."""
        self.table.leave_steady(request)
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
        """End a request: free its blocks, send the ending, retire its handle. Every ending goes through this method.

        The order: what it has computed is cached before its blocks are freed; they are freed before features forget
        the request, which may give the blocks to another one; and its client hears of it last, with what the features
        added to the step's outputs before it.
        """
        if request.status.is_finished:
            return
        request = request.part_of or request
        self.table.leave_steady(request)
        if request.status is RequestStatus.RUNNING:
            # After an error the contents are not trusted.
            if reason is not EndReason.ERROR:
                self.kv.cache_blocks(request, min(request.num_computed_tokens, request.num_tokens))
            kept_as = next(filter(None, (each.keeps_as(request, reason) for each in self._calls.keeps_as)), 0)
            self.kv.free(request, kept_as)
        self.core.remove(request, STATUS_OF_END[reason])
        counted = request.num_output_tokens if num_output_tokens is None else num_output_tokens
        self._decisions.follow(request, "ended")
        ended = self.outputs.ended(request, reason, counted, stop_reason, detail)
        self.core.hooks.ended(ended)


def _client_handle(record: InFlightStep, handle: int) -> int:
    """Return the handle of the client's request for one of the step."""
    request = record.member(handle)
    return handle if request is None else (request.part_of or request).handle
