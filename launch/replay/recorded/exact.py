"""Exact replay: a fresh Scheduler is fed what a recorded one consumed, and must decide the same, field by field."""

from collections.abc import Iterable
from typing import Protocol, assert_never

import msgspec

from quire.launch.replay.core.opaque import OpaqueTokens
from quire.launch.replay.core.scheduler import ReplayScheduler
from quire.launch.replay.recorded.difference import (
    ALTERED,
    NOTHING,
    Difference,
    Differs,
    compare,
    compare_decisions,
    first_index,
    id_in,
    is_quiet,
    is_quiet_line,
    kind_of,
)
from quire.launch.replay.recorded.opaque_lines import opaque_request, opaque_result
from quire.launch.replay.recorded.reader import TraceLine
from quire.protocol.errors import ConfigError
from quire.protocol.wire.front_end_messages import Ended, EndReason, Rejected
from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.scheduler_proc.core.in_flight import WorkerFault
from quire.scheduler_proc.requests.reasons import Decision
from quire.scheduler_proc.trace.decision_log import DecisionLog
from quire.scheduler_proc.trace.keyframe import restore
from quire.scheduler_proc.trace.lines import (
    AnyLine,
    Arrival,
    ClientDropped,
    End,
    Event,
    Header,
    Keyframe,
    Lost,
    PrefixCacheEvent,
    Reason,
    Result,
    StepDecision,
    StepSnapshot,
    Tick,
    WorkerEpoch,
)
from quire.scheduler_proc.trace.translate import decision_line

MAX_BLOCKS = 2**26
_IMPOSSIBLE = (ArithmeticError, AssertionError, LookupError, MemoryError, TypeError, ValueError)
"""A line that was altered can say anything: what that breaks inside is a difference, too."""


class Observer(Protocol):
    """Is shown a replay while it goes. Takes the Scheduler's messages; the replay takes its decisions."""

    def begin(self, header: Header, scheduler: ReplayScheduler, tap: DecisionLog) -> None:
        """The Scheduler is there; ``tap`` is told of what happens in it, and belongs to the replay but for ``hits``."""
        ...

    def arrived(self, line: Arrival) -> None: ...

    def decided(self, line: StepDecision, decisions: list[Decision]) -> None: ...

    def answered(self, line: Result, decisions: list[Decision]) -> None: ...

    def changed(self, now: float, decisions: list[Decision]) -> None:
        """Anything else happened."""
        ...


def replay_lines(
    lines: Iterable[TraceLine], *, check: bool = False, observe: Observer | None = None
) -> Difference | None:
    """Replay a trace; None when every decision, snapshot and ending is the recorded one.

    Args:
        lines: the header first.
        check: call the Scheduler's ``check()`` after every line.

    Raises:
        ConfigError: there is no header, lines were lost, or the trace begins in the middle without a keyframe.
    """
    told = iter(lines)
    first = next(told, None)
    if first is None or not isinstance(first.line, Header):
        raise ConfigError("a trace must begin with its header")
    keyframe = None if first.line.complete else next(told, None)
    if not first.line.complete and (keyframe is None or not isinstance(keyframe.line, Keyframe)):
        raise ConfigError(f"{first.file}: it begins in the middle of a run, and cannot be replayed exactly")
    if not first.is_intact:
        return _altered(first, 0)
    replay = _begin(first, first.line, observe)
    if keyframe is not None and (difference := replay.begin_at(keyframe)) is not None:
        return difference
    for each in told:
        difference = replay.take(each)
        if difference is not None:
            return difference
        if observe is None:
            replay.scheduler.take_messages()
        if check:
            replay.scheduler.check()
    return None


def _begin(told: TraceLine, header: Header, observe: Observer | None) -> "_Replay":
    """Raises ConfigError where no engine can be as the header says."""
    if not 0 < header.num_blocks <= MAX_BLOCKS:
        raise ConfigError(f"{told.file}:{told.number}: num_blocks must be from 1 to {MAX_BLOCKS}: {header.num_blocks}")
    try:
        return _Replay(header, observe)
    except (*_IMPOSSIBLE, ConfigError) as error:
        raise ConfigError(f"{told.file}:{told.number}: no engine can be as the header says: {error}") from None


def _refusal(line: Lost | Keyframe) -> str:
    if isinstance(line, Keyframe):
        return "a keyframe stands here, which only a trace that begins in the middle has, as its second line"
    return (
        f"{line.lines} lines are missing here; "
        "what follows cannot be replayed exactly (--lenient replays what is before)"
    )


def _altered(told: TraceLine, step: int) -> Difference:
    line = told.line
    return Difference(told.number, step, kind_of(line), "crc", line.crc, ALTERED, id_in(line), told.file)


class _Replay:
    """A Scheduler, and what was recorded and is still to be compared with what it does."""

    def __init__(self, header: Header, observer: Observer | None) -> None:
        self._header = header
        self._tap = DecisionLog()
        self.scheduler = ReplayScheduler(header.config, header.kv_layout, header.num_blocks, hooks=self._tap)
        self._observer = observer
        if observer is not None:
            observer.begin(header, self.scheduler, self._tap)
        self._step = 0
        self._admissions: list[TraceLine] = []
        self._decisions: list[Decision] = []

    def begin_at(self, told: TraceLine) -> Difference | None:
        """At a keyframe, before anything else: what comes is compared from there on."""
        line = told.line
        assert isinstance(line, Keyframe)
        try:
            restore(self.scheduler, line.state)
        except _IMPOSSIBLE as error:
            return self._located(told, Differs("state", "an engine's", str(error)))
        self._step = line.state.step
        self._changed(line.now)
        return None if told.is_intact else _altered(told, self._step)

    def take(self, told: TraceLine) -> Difference | None:
        """Feed or compare one line. What the Scheduler tells its clients is the observer's."""
        line = told.line
        if isinstance(line, Lost | Keyframe):
            raise ConfigError(f"{told.file}:{told.number}: {_refusal(line)}")
        if isinstance(line, PrefixCacheEvent):
            self._admissions.append(told)
            return None if told.is_intact else _altered(told, line.step)
        try:
            self._take(line)
        except Differs as found:
            return self._located(told, found)
        except _IMPOSSIBLE as error:
            return self._located(told, Differs("", "a line that fits", repr(error)))
        self._tap.ended_requests.clear()
        return None if told.is_intact else _altered(told, self._step)

    def _located(self, told: TraceLine, found: Differs) -> Difference:
        if found.field == "admissions":  # a line of its own, before this one
            told = next((each for each in self._admissions if id_in(each.line) == found.req_id), told)
        line = told.line
        step = line.step if isinstance(line, StepDecision | StepSnapshot | PrefixCacheEvent | Result) else self._step
        req_id = found.req_id or id_in(line)
        return Difference(
            told.number, step, kind_of(line), found.field, found.recorded, found.decided, req_id, told.file
        )

    def _take(self, line: AnyLine) -> None:
        match line:
            case StepDecision():
                self._decide(line)
            case Result():
                self._answer(line)
            case StepSnapshot():
                self._compare_snapshot(line)
            case Arrival():
                self._arrive(line)
            case Tick():
                self._tick(line)
            case Event():
                self._add_future_hashes(line.hashes)
                self.scheduler.consume(line.event, line.client)
                self._changed(line.now)
            case ClientDropped():
                self._add_future_hashes(line.hashes)
                self.scheduler.drop_client(line.client)
                self._changed(line.now)
            case WorkerEpoch():
                self._begin_worker_epoch(line)
            case Header():
                self._compare_header(line)
            case End() | Lost() | PrefixCacheEvent() | Keyframe():
                pass
            case _:
                assert_never(line)

    # ---- events

    def _arrive(self, line: Arrival) -> None:
        key = (line.client, line.req_id)
        if key in self.scheduler.table.requests:
            raise Differs("req_id", line.req_id, "refused: it is in use")
        self.scheduler.consume(opaque_request(line, self._header.hash_bytes), line.client)
        if key not in self.scheduler.table.requests and not self._tap.ended_requests:
            refused = [m for _, m in self.scheduler.take_messages() if isinstance(m, Rejected)]
            raise Differs(refused[0].param, "accepted", f"refused: {refused[0].message}")
        if self._observer is not None:
            self._observer.arrived(line)

    def _answer(self, line: Result) -> None:
        self._add_future_hashes(line.hashes)
        for ended in line.ended:
            self._check_length(ended)
        try:
            self.scheduler.consume(opaque_result(line))
        except WorkerFault as fault:
            raise Differs(_blamed(str(fault)), "a result that fits", str(fault)) from None
        if self._tap.ended_requests != line.ended:
            at = first_index(line.ended, self._tap.ended_requests)
            ended = line.ended[at] if at < len(line.ended) else self._tap.ended_requests[at]
            compare("ended", line.ended, self._tap.ended_requests, self._name_of(ended.handle))
        decisions = self._take_decisions()
        if self._observer is not None:
            self._observer.answered(line, decisions)

    def _check_length(self, ended: Ended) -> None:
        """That it ended for its length needs no token to be seen. That it did not end is seen without looking here."""
        request = self.scheduler.find(ended.handle)
        if request is None or ended.reason != EndReason.LENGTH:
            return
        most = request.max_total_tokens - request.num_prompt_tokens
        if ended.num_output_tokens != most:
            raise Differs("ended", f"at its length after {ended.num_output_tokens} tokens", most, request.request_id)

    def _begin_worker_epoch(self, line: WorkerEpoch) -> None:
        self._add_future_hashes(line.hashes)
        if line.budget_halved and not self.scheduler.halve_steps():
            raise Differs("halved", True, False)
        self.scheduler.begin_worker_epoch(new_workers=line.new_workers)
        self._changed(line.now)

    def _changed(self, now: float) -> None:
        decisions = self._take_decisions()
        if self._observer is not None:
            self._observer.changed(now, decisions)

    def _add_future_hashes(self, hashes: list[tuple[int, bytes]]) -> None:
        for handle, name in hashes:
            request = self.scheduler.find(handle)
            if request is None:
                raise Differs("hashes", handle, "no request with this handle")
            assert isinstance(request.tokens, OpaqueTokens)
            request.tokens.add_future_hash(name)

    # ---- decisions

    def _decide(self, line: StepDecision) -> None:
        self._add_future_hashes(line.hashes)
        diff = self.scheduler.schedule(line.now)
        if diff is None:
            raise Differs("step", line.step, NOTHING)
        decisions = self._take_decisions()
        self._compare_admissions(diff.step)
        if self._decisions or not (is_quiet_line(line) and is_quiet(diff) and line.step == diff.step):
            compare_decisions(line, self._as_line(line, diff), self._name_of)
        self._step = line.step
        self._decisions.clear()
        if self._observer is not None:
            self._observer.decided(line, decisions)
        self._tap.hits.clear()

    def _tick(self, line: Tick) -> None:
        self._add_future_hashes(line.hashes)
        diff = self.scheduler.schedule(line.now)
        if diff is not None:
            raise Differs("step", NOTHING, diff.step)
        decisions = self._take_decisions()
        self._compare_admissions(self._step + 1)
        compare("reasons", line.reasons, self._reasons())
        self._decisions.clear()
        self._tap.hits.clear()
        if self._observer is not None:
            self._observer.changed(line.now, decisions)

    def _as_line(self, line: StepDecision, diff: SchedulerOutput) -> StepDecision:
        """What was decided as it would have been recorded; what is no decision is as in ``line``."""
        running = self.scheduler.table.running
        priorities = [running[row.handle].priority for row in diff.new_requests]
        decided = decision_line(line.now, diff, priorities, self._reasons(), line.hashes)
        msgspec.structs.force_setattr(decided, "crc", line.crc)  # ours alone as yet, and a copy is dear
        return decided

    def _reasons(self) -> list[Reason]:
        """All since the last decision."""
        return [Reason(d.kind, d.request_id, d.reason, d.beneficiary, d.num_blocks) for d in self._decisions]

    def _take_decisions(self) -> list[Decision]:
        """The newest; they are compared with the next line that tells any."""
        decisions = self.scheduler.decisions.take()
        self._decisions += decisions
        return decisions

    def _compare_admissions(self, step: int) -> None:
        """Of this decision, each of which has a line of its own before it."""
        if not self._admissions and not self._tap.hits:
            return
        told = [_hit(each.line) for each in self._admissions]
        done = [(h.request_id, step, h.num_hit_tokens, h.num_prompt_tokens, h.num_tokens) for h in self._tap.hits]
        if told != done:
            at = first_index(told, done)
            name = told[at][0] if at < len(told) else done[at][0]
            raise Differs(
                "admissions",
                told[at] if at < len(told) else NOTHING,
                done[at] if at < len(done) else NOTHING,
                name,
            )
        self._admissions.clear()

    def _compare_snapshot(self, line: StepSnapshot) -> None:
        table, pool = self.scheduler.table, self.scheduler.kv.pool
        now = {
            "step": self._step + 1,
            "running": len(table.running) + len(table.leaving),
            "waiting": table.num_waiting,
            "free_blocks": pool.num_free_blocks,
            "total_blocks": pool.num_usable_blocks,
            "gpu_cached_blocks": pool.num_cached_blocks,
            "num_pinned": 0,
        }
        for field, decided in now.items():
            compare(field, getattr(line, field), decided)

    def _compare_header(self, line: Header) -> None:
        """Of a further file: the same engine, but for steps that were halved on the way."""
        first = self._header
        most = first.config.max_num_batched_tokens
        compare("config", msgspec.structs.replace(line.config, max_num_batched_tokens=most), first.config)
        compare("kv_layout", line.kv_layout, first.kv_layout)
        compare("num_blocks", line.num_blocks, first.num_blocks)

    def _name_of(self, handle: int) -> str:
        request = self.scheduler.find(handle)
        return "" if request is None else request.request_id


def _hit(line: AnyLine) -> tuple[str, int, int, int, int]:
    assert isinstance(line, PrefixCacheEvent)
    local = line.local_hit_tokens + line.external_hit_tokens  # there is no other place than this engine
    return line.req_id, line.step, local, line.total_prompt_tokens, line.num_tokens


def _blamed(fault: str) -> str:
    """The field of a result that a refusal of it is about."""
    words = {"expected": "step", "other requests": "handles", "bad or failed": "bad", "drafts do": "drafts"}
    words["more drafts"] = "drafts"
    return next((field for word, field in words.items() if word in fault), "counts")
