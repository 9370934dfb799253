"""The length, the block hashes and the ending of each request of a trace, derived from its lines."""

from dataclasses import dataclass
from typing import assert_never

from quire.protocol.wire.adapter_messages import AdapterLoaded, UnloadAdapter
from quire.protocol.wire.front_end_messages import Abort, CallsTool, Control, Ended, EndReason, Stop, TenantService
from quire.protocol.wire.item_messages import Encoded
from quire.protocol.wire.transfer_messages import BlocksMoved, DiskContents
from quire.scheduler_proc.requests.events import Clock, Fail, Hold, HostMemory, LoadLate, Refuse, Release
from quire.scheduler_proc.trace.lines import (
    AnyLine,
    Arrival,
    ClientDropped,
    End,
    Event,
    Header,
    Keyframe,
    Lost,
    NewRow,
    OtherEvent,
    PrefixCacheEvent,
    Result,
    StepDecision,
    StepSnapshot,
    Tick,
    WorkerEpoch,
)


@dataclass(slots=True, eq=False)
class RequestOutcome:
    """The outcome of one request.

    Attributes:
        names: hashes of the full blocks of its prompt and output, concatenated.
        num_tokens: output tokens.
        ending: aborted, failed, rejected, or unfinished at the end of the trace; empty if it finished normally.
    """

    arrival: Arrival
    names: bytearray
    num_tokens: int
    handle: int = -1
    ending: str = "unfinished"
    is_held: bool = False


class RequestOutcomes:
    """Tracks all requests through the lines, in time proportional to what each line changes.

    Attributes:
        all: outcomes in order of arrival; complete after ``close``.
    """

    def __init__(self) -> None:
        self.all: list[RequestOutcome] = []
        self._live: dict[tuple[int, str], RequestOutcome] = {}
        self._by_handle: dict[int, RequestOutcome] = {}
        self._no_handle: dict[str, list[RequestOutcome]] = {}
        self._interrupted: dict[str, RequestOutcome] = {}
        """Unfinished requests of a scheduler that died, until they are resubmitted to the next one."""
        self._sampling: list[int] = []
        self._num_results = 0
        """Results with one token for each of ``_sampling`` that are not added to ``num_tokens`` yet."""
        self._step = self._stale_until = 0

    def take(self, line: AnyLine) -> None:
        match line:
            case Arrival():
                self._add_hashes(line.hashes)
                self._arrive(line)
            case StepDecision():
                self._add_hashes(line.hashes)
                self._step = line.step
                for row in line.new:
                    self._identify(row)
            case Result():
                self._add_hashes(line.hashes)
                self._add_tokens(line)
            case Tick():
                self._add_hashes(line.hashes)
            case Event():
                self._add_hashes(line.hashes)
                self._take_event(line.client, line.event)
            case ClientDropped():
                self._add_hashes(line.hashes)
                for key in [key for key in self._live if key[0] == line.client]:
                    self._end(key, "aborted")
            case WorkerEpoch():
                self._add_hashes(line.hashes)
                self._add_pending()
                # Results of steps that were in flight follow, and their tokens are ignored, as by the scheduler.
                self._sampling, self._stale_until = [], self._step
            case Keyframe(snapshot=snapshot):
                self._step = 0 if snapshot is None else snapshot.step
                self._stale_until, self._sampling = line.stale_until, line.handles
            case Header(restarted=True):
                self._restart()
            case Header() | StepSnapshot() | PrefixCacheEvent() | Lost() | End():
                pass
            case _:
                assert_never(line)

    def close(self) -> None:
        """Complete the outcomes after the last line."""
        self._add_pending()

    def _restart(self) -> None:
        """Continue with the scheduler that replaced a dead one. Unfinished requests are resubmitted to it."""
        self._add_pending()
        self._interrupted |= {outcome.arrival.req_id: outcome for outcome in self._live.values()}
        self._live.clear()
        self._by_handle.clear()
        self._no_handle.clear()
        self._sampling, self._step, self._stale_until = [], 0, 0

    def _arrive(self, line: Arrival) -> None:
        outcome = self._interrupted.pop(line.req_id, None)
        if outcome is None:
            outcome = RequestOutcome(line, bytearray(), 0)
            self.all.append(outcome)
        outcome.names, outcome.num_tokens = bytearray(line.block_hashes), line.num_output_tokens
        outcome.handle, outcome.is_held = -1, False
        self._live[line.client, line.req_id] = outcome
        self._no_handle.setdefault(line.req_id, []).append(outcome)

    def _identify(self, row: NewRow) -> None:
        """Assign a handle to a request from its first row.

        If two clients use the same id, the prompt length decides, then the order of arrival.
        """
        known = self._by_handle.get(row.handle)
        if known is not None and known.arrival.req_id == row.req_id:
            return
        waiting = self._no_handle.get(row.req_id, [])
        fitting = [each for each in waiting if each.arrival.num_prompt_tokens == row.num_prompt_tokens]
        for outcome in fitting[:1]:
            outcome.handle = row.handle
            self._by_handle[row.handle] = outcome
            self._remove_waiting(outcome)

    def _remove_waiting(self, outcome: RequestOutcome) -> None:
        waiting = self._no_handle.get(outcome.arrival.req_id, [])
        if outcome in waiting:
            waiting.remove(outcome)
        if not waiting:
            self._no_handle.pop(outcome.arrival.req_id, None)

    def _add_hashes(self, hashes: list[tuple[int, bytes]]) -> None:
        for handle, name in hashes:
            if (outcome := self._by_handle.get(handle)) is not None:
                outcome.names += name

    def _add_tokens(self, line: Result) -> None:
        if line.step <= self._stale_until:
            return
        if line.handles is not None:
            self._add_pending()
            self._sampling = line.handles
        if line.counts is None:
            # Only counted: adding one token to each of 256 requests in each step would dominate the loading.
            self._num_results += 1
        else:
            for handle, count in zip(self._sampling, line.counts, strict=False):
                if (outcome := self._by_handle.get(handle)) is not None:
                    outcome.num_tokens += count
        for ended in line.ended:
            self._end_recorded(ended)

    def _add_pending(self) -> None:
        """Add the pending results to ``num_tokens`` of each request that sampled in them."""
        if self._num_results:
            for handle in self._sampling:
                if (outcome := self._by_handle.get(handle)) is not None:
                    outcome.num_tokens += self._num_results
            self._num_results = 0

    def _end_recorded(self, ended: Ended) -> None:
        outcome = self._by_handle.get(ended.handle)
        if outcome is not None:
            key = (outcome.arrival.client, outcome.arrival.req_id)
            self._end(key, "failed" if ended.reason == EndReason.ERROR else "", ended.num_output_tokens)

    def _take_event(self, client: int, event: OtherEvent) -> None:
        match event:
            case Abort():
                for request_id in event.request_ids:
                    self._end((client, request_id), "aborted")
            case Fail():
                self._end((client, event.request_id), "failed")
            case Stop():
                self._end((client, event.request_id), "", event.num_output_tokens, at_most=True)
            case Hold() | Release():
                if (outcome := self._live.get((client, event.request_id))) is not None:
                    outcome.is_held = isinstance(event, Hold)
            case Refuse():  # has no effect on a request that is not held
                outcome = self._live.get((client, event.request_id))
                if outcome is not None and outcome.is_held:
                    self._end((client, event.request_id), "rejected")
            case Control(kind="abort_all"):
                for key in list(self._live):
                    self._end(key, "aborted")
            case UnloadAdapter(force=True):
                for key, outcome in list(self._live.items()):
                    adapter = outcome.arrival.request.adapter
                    if adapter is not None and (adapter.name, adapter.digest) == (event.name, event.digest):
                        self._end(key, "aborted")
            case Control() | BlocksMoved() | DiskContents() | LoadLate() | AdapterLoaded() | UnloadAdapter():
                pass  # the trace does not have which requests a failed load ends: they stay unfinished
            case CallsTool() | Clock() | HostMemory() | TenantService() | Encoded():
                pass
            case _:
                assert_never(event)

    def _end(self, key: tuple[int, str], ending: str, num_tokens: int | None = None, *, at_most: bool = False) -> None:
        """End a request with ``num_tokens``, or with as many as it got; ``at_most``: with the smaller of the two."""
        outcome = self._live.pop(key, None)
        if outcome is None:
            return
        self._add_pending()
        if num_tokens is not None:
            outcome.num_tokens = min(max(num_tokens, 0), outcome.num_tokens) if at_most else num_tokens
        outcome.ending = "failed" if ending == "rejected" and outcome.num_tokens else ending
        self._by_handle.pop(outcome.handle, None)
        self._remove_waiting(outcome)
