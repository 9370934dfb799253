"""How long each answer of a trace got, and the names of its blocks: found out from the lines alone."""

from dataclasses import dataclass
from typing import assert_never

from quire.protocol.wire.front_end_messages import Abort, Control, Ended, EndReason, Stop
from quire.scheduler_proc.core.events import Fail, Hold, Refuse, Release
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
class Answer:
    """One request. ``names``: of its full blocks, prompt and answer, joined.

    ``ending``: aborted, failed, unfinished (when the trace ended) or rejected; empty when it ended by itself.
    """

    arrival: Arrival
    names: bytearray
    num_tokens: int
    handle: int = -1
    ending: str = "unfinished"
    is_held: bool = False


class Answers:
    """Follows all requests through the lines, at a cost that follows what changed: no line is looked at per request.

    Attributes:
        all: in order of arrival; right after ``close``.
    """

    def __init__(self) -> None:
        self.all: list[Answer] = []
        self._live: dict[tuple[int, str], Answer] = {}
        self._by_handle: dict[int, Answer] = {}
        self._no_handle: dict[str, list[Answer]] = {}
        self._sampling: list[int] = []
        self._num_results = 0
        """That brought a token to each of ``_sampling``, and are not counted with them yet."""
        self._step = self._stale_until = 0

    def take(self, line: AnyLine) -> None:
        match line:
            case Arrival():
                self._arrive(line)
            case StepDecision():
                self._name(line.hashes)
                self._step = line.step
                for row in line.new:
                    self._identify(row)
            case Result():
                self._name(line.hashes)
                self._add_tokens(line)
            case Tick():
                self._name(line.hashes)
            case Event():
                self._name(line.hashes)
                self._happen(line.client, line.event)
            case ClientDropped():
                self._name(line.hashes)
                for key in [key for key in self._live if key[0] == line.client]:
                    self._end(key, "aborted")
            case WorkerEpoch():
                self._name(line.hashes)
                self._settle()
                self._sampling, self._stale_until = [], self._step
            case Keyframe(state=state):
                self._step, self._stale_until, self._sampling = state.step, state.stale_until, state.rows
            case Header() | StepSnapshot() | PrefixCacheEvent() | Lost() | End():
                pass
            case _:
                assert_never(line)

    def close(self) -> None:
        """Nothing comes any more."""
        self._settle()

    def _arrive(self, line: Arrival) -> None:
        answer = Answer(line, bytearray(line.block_hashes), line.num_output_tokens)
        self.all.append(answer)
        self._live[line.client, line.req_id] = answer
        self._no_handle.setdefault(line.req_id, []).append(answer)

    def _identify(self, row: NewRow) -> None:
        """The first line with its handle. Two clients may use one id: then its length tells, or who came first."""
        known = self._by_handle.get(row.handle)
        if known is not None and known.arrival.req_id == row.req_id:
            return
        waiting = self._no_handle.get(row.req_id, [])
        fitting = [each for each in waiting if each.arrival.num_prompt_tokens == row.num_prompt_tokens]
        for answer in fitting[:1]:
            answer.handle = row.handle
            self._by_handle[row.handle] = answer
            self._forget_waiting(answer)

    def _forget_waiting(self, answer: Answer) -> None:
        waiting = self._no_handle.get(answer.arrival.req_id, [])
        if answer in waiting:
            waiting.remove(answer)
        if not waiting:
            self._no_handle.pop(answer.arrival.req_id, None)

    def _name(self, hashes: list[tuple[int, bytes]]) -> None:
        for handle, name in hashes:
            if (answer := self._by_handle.get(handle)) is not None:
                answer.names += name

    def _add_tokens(self, line: Result) -> None:
        if line.step <= self._stale_until:
            return
        if line.handles is not None:
            self._settle()
            self._sampling = line.handles
        if line.counts is None:
            self._num_results += 1
        else:
            for handle, count in zip(self._sampling, line.counts, strict=False):
                if (answer := self._by_handle.get(handle)) is not None:
                    answer.num_tokens += count
        for ended in line.ended:
            self._end_told(ended)

    def _settle(self) -> None:
        """Count the results so far with each request that got a token from them."""
        if self._num_results:
            for handle in self._sampling:
                if (answer := self._by_handle.get(handle)) is not None:
                    answer.num_tokens += self._num_results
            self._num_results = 0

    def _end_told(self, ended: Ended) -> None:
        answer = self._by_handle.get(ended.handle)
        if answer is not None:
            key = (answer.arrival.client, answer.arrival.req_id)
            self._end(key, "failed" if ended.reason == EndReason.ERROR else "", ended.num_output_tokens)

    def _happen(self, client: int, event: OtherEvent) -> None:
        match event:
            case Abort():
                for request_id in event.request_ids:
                    self._end((client, request_id), "aborted")
            case Fail():
                self._end((client, event.request_id), "failed")
            case Stop():
                self._end((client, event.request_id), "", event.num_output_tokens, at_most=True)
            case Hold() | Release():
                if (answer := self._live.get((client, event.request_id))) is not None:
                    answer.is_held = isinstance(event, Hold)
            case Refuse():  # of nobody else: then it changed nothing
                answer = self._live.get((client, event.request_id))
                if answer is not None and answer.is_held:
                    self._end((client, event.request_id), "rejected")
            case Control():
                pass
            case _:
                assert_never(event)

    def _end(self, key: tuple[int, str], ending: str, num_tokens: int | None = None, *, at_most: bool = False) -> None:
        """``num_tokens``: of its answer; None: as many as it got. ``at_most``: if it got so many."""
        answer = self._live.pop(key, None)
        if answer is None:
            return
        self._settle()
        if num_tokens is not None:
            answer.num_tokens = min(max(num_tokens, 0), answer.num_tokens) if at_most else num_tokens
        answer.ending = "failed" if ending == "rejected" and answer.num_tokens else ending
        self._by_handle.pop(answer.handle, None)
        self._forget_waiting(answer)
