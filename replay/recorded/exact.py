"""Exact replay: feed the recorded events to a new Scheduler and compare every decision, field by field."""

from collections.abc import Iterable
from typing import Any, Protocol, assert_never

import numpy as np
from msgspec.structs import force_setattr
from msgspec.structs import replace as change

from quire.protocol.errors import ConfigError
from quire.protocol.wire.front_end_messages import Ended, EndReason, Rejected
from quire.protocol.wire.worker_messages import ModelRunnerOutput, SchedulerOutput
from quire.replay.core.opaque import OpaqueRequest, OpaqueResult, OpaqueTokens
from quire.replay.core.scheduler import ReplayScheduler
from quire.replay.recorded.difference import (
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
from quire.replay.recorded.keyframes import begin_at
from quire.replay.recorded.reader import TraceLine
from quire.scheduler_proc.messages.results import WorkerFault
from quire.scheduler_proc.requests.reasons import Decision
from quire.scheduler_proc.trace.decision_log import DecisionLog
from quire.scheduler_proc.trace.event_log import TraceHeader
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
from quire.scheduler_proc.trace.translate import counts_of, decision_line, hit_line, reasons_of, snapshot_line

MAX_BLOCKS = 2**26
IMPOSSIBLE = (ArithmeticError, AssertionError, LookupError, MemoryError, TypeError, ValueError)
"""Errors inside the Scheduler, or the Router, that an altered line may cause."""


class Observer(Protocol):
    """Follows a replay line by line. It must take the Scheduler's messages; the replay takes the decisions."""

    def begin(self, header: Header, scheduler: ReplayScheduler, decision_log: DecisionLog) -> None:
        """Start, or continue with the Scheduler that replaced a dead one.

        ``decision_log`` is the Scheduler's; the observer may take only its ``hits``.
        """
        ...

    def arrived(self, line: Arrival, decisions: list[Decision]) -> None: ...

    def step_decided(self, line: StepDecision, decisions: list[Decision]) -> None: ...

    def step_finished(self, line: Result, decisions: list[Decision]) -> None: ...

    def changed(self, now: float, decisions: list[Decision]) -> None:
        """Called after every other line."""
        ...


def replay_lines(
    lines: Iterable[TraceLine], *, check: bool = False, observe: Observer | None = None
) -> Difference | None:
    """Replay a trace; return the first difference, or None if every decision, snapshot and ending is equal.

    Args:
        lines: the lines of the trace, from its header on.
        check: call the Scheduler's ``check()`` after every line.

    Raises:
        ConfigError: no header, lost lines, or a trace that begins in the middle without a keyframe.
    """
    entries = iter(lines)
    first = next(entries, None)
    if first is None or not isinstance(first.line, Header):
        raise ConfigError("a trace must begin with its header")
    keyframe = None if first.line.complete else next(entries, None)
    if not first.line.complete and (keyframe is None or not isinstance(keyframe.line, Keyframe)):
        raise ConfigError(f"{first.file}: trace begins in the middle of a run without a keyframe: cannot replay it")
    if not first.is_intact:
        return _altered(first, 0)
    replay = _begin(first, first.line, observe)
    if keyframe is not None and (difference := replay.begin_at(keyframe)) is not None:
        return difference
    for each in entries:
        if isinstance(each.line, Header) and each.line.restarted:
            replay = _begin(each, each.line, observe)
            if not each.is_intact:
                return _altered(each, 0)
            continue
        difference = replay.take(each)
        if difference is not None:
            return difference
        if observe is None:
            replay.scheduler.take_messages()
        if check:
            replay.scheduler.check()
    return None


def _begin(entry: TraceLine, header: Header, observe: Observer | None) -> "_Replay":
    """Build the replay's Scheduler. Raises ConfigError if the header describes an impossible engine."""
    if not 0 < header.num_blocks <= MAX_BLOCKS:
        raise ConfigError(
            f"{entry.file}:{entry.number}: num_blocks must be between 1 and {MAX_BLOCKS} (got {header.num_blocks})"
        )
    try:
        return _Replay(header, observe)
    except (*IMPOSSIBLE, ConfigError) as error:
        raise ConfigError(f"{entry.file}:{entry.number}: the header describes an impossible engine: {error}") from None


def _refusal(line: Lost | Keyframe) -> str:
    if isinstance(line, Keyframe):
        return "unexpected keyframe: only the second line of a trace that begins in the middle may be one"
    return f"{line.lines} lines are missing: cannot replay the lines after them (--lenient replays the lines before)"


def _altered(entry: TraceLine, step: int) -> Difference:
    line = entry.line
    return Difference(entry.number, step, kind_of(line), "crc", line.crc, ALTERED, id_in(line), entry.file)


class _Replay:
    """A replay: owns the new Scheduler and the recorded lines that are not compared yet."""

    def __init__(self, header: Header, observer: Observer | None) -> None:
        self._header = header
        self._decision_log = DecisionLog()
        _, _, *sizes = TraceHeader.__struct_fields__
        engine = {name: getattr(header, name) for name in sizes}
        self.scheduler = ReplayScheduler(header.config, header.kv_layout, hooks=self._decision_log, **engine)
        if header.version < 4:
            # A request behind a full batch was not looked at again when its adapter lost its slot: it was recorded as
            # waiting for a row, and the adapter was loaded only when a row was free. Everything after depends on that.
            calls, adapters = self.scheduler.core.calls, self.scheduler.adapters
            vars(calls)["version"] = tuple(feature for feature in calls.version if feature is not adapters)
        self._observer = observer
        if observer is not None:
            observer.begin(header, self.scheduler, self._decision_log)
        self._step = 0
        self._admissions: list[TraceLine] = []
        self._decisions: list[Decision] = []

    def begin_at(self, entry: TraceLine) -> Difference | None:
        """Restore the Scheduler from a keyframe, before any other line."""
        line = entry.line
        assert isinstance(line, Keyframe)
        try:
            begin_at(self.scheduler, line, None if self._observer is None else self._observer.arrived)
        except IMPOSSIBLE as error:
            return self._located(entry, Differs("state", "a valid state", str(error)))
        self._step = self.scheduler.last_step
        self._changed(line.now)
        return None if entry.is_intact else _altered(entry, self._step)

    def take(self, entry: TraceLine) -> Difference | None:
        """Feed or compare one line. The observer takes the Scheduler's messages to clients."""
        line = entry.line
        if isinstance(line, Lost | Keyframe):
            raise ConfigError(f"{entry.file}:{entry.number}: {_refusal(line)}")
        if isinstance(line, PrefixCacheEvent):  # made by the decision, whose line follows
            self._admissions.append(entry)
            return None if entry.is_intact else _altered(entry, line.step)
        try:
            self._take(line)
        except Differs as found:
            return self._located(entry, found)
        except IMPOSSIBLE as error:
            return self._located(entry, Differs("", "a valid line", repr(error)))
        self._decision_log.ended_requests.clear()
        self.scheduler.transfers.take_loads()  # a replay sends none
        self.scheduler.transfers.take_stores()
        self.scheduler.take_side_jobs()
        return None if entry.is_intact else _altered(entry, self._step)

    def _located(self, entry: TraceLine, found: Differs) -> Difference:
        if found.field == "admissions":  # recorded in a line before this one
            entry = next((each for each in self._admissions if id_in(each.line) == found.req_id), entry)
        line = entry.line
        step = line.step if isinstance(line, StepDecision | StepSnapshot | PrefixCacheEvent | Result) else self._step
        req_id = found.req_id or id_in(line)
        return Difference(
            entry.number, step, kind_of(line), found.field, found.recorded, found.decided, req_id, entry.file
        )

    def _take(self, line: AnyLine) -> None:
        match line:
            case StepDecision():
                self._decide(line)
            case Result():
                self._take_result(line)
            case StepSnapshot():
                self._compare_snapshot(line)
            case Arrival():
                self._arrive(line)
            case Tick():
                self._take_tick(line)
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
            raise Differs("req_id", line.req_id, "rejected: the id is in use")
        self._add_future_hashes(line.hashes)
        lengths, size = (line.num_prompt_tokens, line.num_output_tokens), self._header.hash_bytes
        self.scheduler.consume(OpaqueRequest(line.request, *lengths, line.block_hashes, size), line.client)
        if key not in self.scheduler.table.requests and not self._decision_log.ended_requests:
            rejected = [m for _, m in self.scheduler.take_messages() if isinstance(m, Rejected)]
            raise Differs(rejected[0].param, "accepted", f"rejected: {rejected[0].message}")
        decisions = self._take_decisions()  # before the observer, which takes all that it finds in the Scheduler
        if self._observer is not None:
            self._observer.arrived(line, decisions)

    def _take_result(self, line: Result) -> None:
        # A search that continues forks beams while the result is applied; hashes of theirs are added afterwards.
        late = self._add_future_hashes(line.hashes, beams=bool(line.beams))
        for ended in line.ended:
            self._check_length(ended)
        try:
            self.scheduler.consume(opaque_result(line))
        except WorkerFault as fault:
            raise Differs(fault.field, "a valid result", str(fault)) from None
        self._add_future_hashes(late)
        if self._decision_log.ended_requests != line.ended:
            at = first_index(line.ended, self._decision_log.ended_requests)
            ended = line.ended[at] if at < len(line.ended) else self._decision_log.ended_requests[at]
            compare("ended", line.ended, self._decision_log.ended_requests, self._name_of(ended.handle))
        decisions = self._take_decisions()
        if self._observer is not None:
            self._observer.step_finished(line, decisions)

    def _check_length(self, ended: Ended) -> None:
        """Check the length of an ending by length. (A missing one is found by comparing the endings.)"""
        request = self.scheduler.find(ended.handle)
        if request is None or request.part_of is not None or ended.reason != EndReason.LENGTH:
            return
        most = request.max_total_tokens - request.num_prompt_tokens
        if ended.num_output_tokens != most:
            raise Differs("ended", f"by length after {ended.num_output_tokens} tokens", most, request.request_id)

    def _begin_worker_epoch(self, line: WorkerEpoch) -> None:
        self._add_future_hashes(line.hashes)
        if line.budget_halved and not self.scheduler.halve_token_budget():
            raise Differs("budget_halved", True, False)
        self.scheduler.begin_worker_epoch(new_workers=line.new_workers)
        self._changed(line.now)

    def _changed(self, now: float) -> None:
        decisions = self._take_decisions()
        if self._observer is not None:
            self._observer.changed(now, decisions)

    def _add_future_hashes(self, hashes: list[tuple[int, bytes]], *, beams: bool = False) -> list[tuple[int, bytes]]:
        """Add the hashes of blocks that will be full. With ``beams``: return those of requests that do not exist."""
        late: list[tuple[int, bytes]] = []
        for handle, name in hashes:
            request = self.scheduler.find(handle)
            if request is None and beams:
                late.append((handle, name))
                continue
            if request is None:
                raise Differs("hashes", handle, "no request with this handle")
            assert isinstance(request.tokens, OpaqueTokens)
            request.tokens.add_future_hash(name)
        return late

    # ---- decisions

    def _decide(self, line: StepDecision) -> None:
        # Before the decision: a block that it fills gets its hash from the trace, because there are no tokens, and a
        # request that is admitted in the same step may find it.
        self._add_future_hashes(line.hashes)
        diff = self.scheduler.schedule(line.now)
        if diff is None:
            raise Differs("step", line.step, NOTHING)
        decisions = self._take_decisions()
        self._compare_admissions(diff.step)
        # Most steps are steady decode: making a line of each diff would take most of the replay's time.
        if self._decisions or not (is_quiet_line(line) and is_quiet(diff) and line.step == diff.step):
            compare_decisions(line, self._as_line(line, diff), self._name_of)
        self._step = line.step
        self._decisions.clear()
        if self._observer is not None:
            self._observer.step_decided(line, decisions)
        self._decision_log.hits.clear()

    def _take_tick(self, line: Tick) -> None:
        self._add_future_hashes(line.hashes)
        diff = self.scheduler.schedule(line.now)
        if diff is not None:
            raise Differs("step", NOTHING, diff.step)
        decisions = self._take_decisions()
        self._compare_admissions(self._step + 1)
        compare("reasons", line.reasons, self._reasons())
        self._decisions.clear()
        self._decision_log.hits.clear()
        if self._observer is not None:
            self._observer.changed(line.now, decisions)

    def _as_line(self, line: StepDecision, diff: SchedulerOutput) -> StepDecision:
        """Return the decision as a trace line; fields that are no decision are copied from ``line``."""
        running = self.scheduler.table.running
        priorities = [running[row.handle].priority for row in diff.new_requests]
        decided = decision_line(line.now, diff, priorities, self._reasons(), line.hashes)
        force_setattr(decided, "crc", line.crc)  # not shared yet; a copy is expensive
        return decided

    def _reasons(self) -> list[Reason]:
        """Return the reasons since the last compared line."""
        return reasons_of(self._decisions)

    def _take_decisions(self) -> list[Decision]:
        """Take the Scheduler's new decisions; they are compared with the next line that has reasons."""
        decisions = self.scheduler.decisions.take()
        self._decisions += decisions
        return decisions

    def _compare_admissions(self, step: int) -> None:
        """Compare the admissions of a step; each is recorded in a line before the decision."""
        if not self._admissions and not self._decision_log.hits:
            return
        version = self._header.version
        recorded = [_admission(each.line, version) for each in self._admissions]
        decided = [_admission(hit_line(step, hit), version) for hit in self._decision_log.hits]
        if recorded != decided:
            at = first_index(recorded, decided)
            name = recorded[at][0] if at < len(recorded) else decided[at][0]
            was, now = (side[at] if at < len(side) else NOTHING for side in (recorded, decided))
            raise Differs("admissions", was, now, name)
        self._admissions.clear()

    def _compare_snapshot(self, line: StepSnapshot) -> None:
        decided = snapshot_line(line.now, self._step + 1, counts_of(self.scheduler))
        if self._header.version < 3:  # without the parts of tiers and the blocks of pins
            decided = change(decided, tiers=line.tiers, pinned_blocks=line.pinned_blocks)
            decided = change(decided, pinned_job_ids=line.pinned_job_ids)
        compare("", change(line, crc=None), decided)

    def _compare_header(self, line: Header) -> None:
        """Compare the header of a later file: the engine is the same, but its token budget may have been halved."""
        first = self._header
        most = first.config.max_num_batched_tokens
        compare("config", change(line.config, max_num_batched_tokens=most), first.config)
        for field in ("kv_layout", "num_blocks", "num_host_pages", "num_disk_pages", "costs"):
            compare(field, getattr(line, field), getattr(first, field))

    def _name_of(self, handle: int) -> str:
        request = self.scheduler.find(handle)
        return "" if request is None else request.request_id


def opaque_result(line: Result) -> OpaqueResult:
    """Convert a result line without its hashes, which the replay adds before it applies the result."""
    arrays = [None if each is None else np.array(each, np.int32) for each in (line.handles, line.counts, line.drafts)]
    output = ModelRunnerOutput(
        line.step,
        handles=arrays[0],
        counts=arrays[1],
        drafts=arrays[2],
        bad=line.bad,
        failed=line.failed,
        seconds=line.seconds,
    )
    return OpaqueResult(output, line.ended, line.beams)


def _admission(line: AnyLine, version: int) -> tuple[Any, ...]:
    """Return what is compared of an admission, its name first; before version 3 it had no parts of tiers."""
    assert isinstance(line, PrefixCacheEvent)
    hits, known = (line.local_hit_tokens, line.external_hit_tokens), (line.total_prompt_tokens, line.num_tokens)
    if version < 3:
        return line.req_id, line.step, sum(hits), *known
    expected = line.load_choice, line.load_kv_async, line.load_seconds, line.compute_seconds
    return line.req_id, line.step, *hits, *known, line.job_id, line.connector_name, *expected
