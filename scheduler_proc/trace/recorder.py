"""Makes the lines of a trace from a Scheduler's events and decisions. Takes no decision and writes no file."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from quire.protocol.wire.codec import Codec
from quire.protocol.wire.front_end_messages import Abort, AddRequest, Control, EndReason
from quire.protocol.wire.worker_messages import ModelRunnerOutput, SchedulerOutput
from quire.scheduler_proc.requests.events import Consumed
from quire.scheduler_proc.requests.reasons import Decision
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.decision_log import DecisionLog
from quire.scheduler_proc.trace.event_log import Record, RecordKind, TraceHeader
from quire.scheduler_proc.trace.lines import ClientDropped, Line, WorkerEpoch
from quire.scheduler_proc.trace.snapshot import decode_snapshot
from quire.scheduler_proc.trace.snapshot_reader import continue_from
from quire.scheduler_proc.trace.translate import (
    NO_COUNTS,
    arrival_line,
    counts_of,
    event_line,
    hit_line,
    keyframe_line,
    lengths_of,
    result_line,
    snapshot_line,
    step_line,
    tick_line,
)

PendingLine: TypeAlias = Callable[[], Line]
"""Makes a line. A loop that has no time for it now makes many at once later."""


def make_immediately(sink: Callable[[Line], None]) -> Callable[[PendingLine], None]:
    """Return a ``put`` that makes each line immediately and passes it to ``sink``."""
    return lambda line: sink(line())


class TraceRecorder:
    """Turns each event and each decision into lines, right after the Scheduler took it.

    Looks only at requests that changed: a steady decode step costs O(length of its diff). The arguments of a line never
    change later, so that lines can be made and encoded when there is time.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        decision_log: DecisionLog,
        put: Callable[[PendingLine], None],
        *,
        prompts: bool = False,
    ) -> None:
        """
        Args:
            scheduler: an unused scheduler, or one restored from a keyframe, with ``decision_log`` as its hooks.
            prompts: whether arrivals have their token ids.
        """
        self._scheduler = scheduler
        self._table = scheduler.table
        self._put = put
        self._prompts = prompts
        self._log = decision_log
        self._reasons: list[Decision] = []
        self._last_number = scheduler.table.last_number
        self._snapshot = self._last_snapshot = NO_COUNTS

    # ---- events

    def consumed(self, now: float, client: int, event: Consumed) -> None:
        """Record an event that was consumed without an exception."""
        match event:
            case ModelRunnerOutput():
                ended, choices = self._log.ended_requests.copy(), self._log.choices.copy()
                self._put(partial(result_line, now, event, ended, choices, self._log.take_hashes()))
                self._log.choices.clear()
            case AddRequest():
                self._arrival(now, client, event)
            case Control(kind="statistics" | "requests"):
                pass  # changes no state
            case _:
                self._put(partial(event_line, now, client, event, self._log.take_hashes()))
        self._log.ended_requests.clear()

    def client_dropped(self, now: float, client: int) -> None:
        self._put(partial(ClientDropped, now=now, client=client, hashes=self._log.take_hashes()))
        self._log.clear()

    def worker_epoch_began(
        self, now: float, *, budget_halved: bool = False, new_workers: bool = False, reason: str = ""
    ) -> None:
        """Record that running requests restarted, after the Scheduler did so."""
        what = partial(WorkerEpoch, budget_halved=budget_halved, new_workers=new_workers, reason=reason)
        self._put(partial(what, now=now, hashes=self._log.take_hashes()))
        self._log.clear()

    def _arrival(self, now: float, client: int, event: AddRequest) -> None:
        """Record an accepted request. Refused requests and duplicate ids leave no line.

        A refused fork may have filled blocks of its parent; the next line has their hashes.
        """
        request = self._scheduler.table.requests.get((client, event.request_id))
        hashes: list[bytes] = []
        num_tokens = lengths_of(event)
        if request is not None and request.number > self._last_number:
            self._last_number = request.number
            hashes = request.block_hashes.copy()
            num_tokens = request.num_prompt_tokens, request.num_output_tokens
        elif not self._log.ended_requests:  # otherwise it ended immediately
            return
        self._put(partial(arrival_line, now, client, event, num_tokens, hashes, self._prompts, self._log.take_hashes()))
        ended = self._log.ended_requests
        if ended and ended[0].reason == EndReason.REPETITION:  # not implied by the token counts in the trace
            self._put(partial(event_line, now, client, Abort([event.request_id]), []))

    # ---- decisions

    def note(self, decisions: list[Decision]) -> None:
        """Record decisions with their reasons; the next decision line contains them."""
        self._reasons += decisions

    def before_step(self) -> None:
        """Call before ``schedule()``."""
        self._snapshot = counts_of(self._scheduler)

    def decided(self, now: float, diff: SchedulerOutput | None) -> None:
        """Record the result of ``schedule()``: a diff, or None. Call ``note`` with its reasons first."""
        decision_log, put = self._log, self._put
        # Copies: the lines are made later, when the lists have what follows.
        reasons = self._reasons.copy()
        step = self._scheduler.last_step + 1 if diff is None else diff.step
        if diff is not None and self._snapshot != self._last_snapshot:
            self._last_snapshot = self._snapshot
            put(partial(snapshot_line, now, step, self._snapshot))
        for hit in decision_log.hits:
            put(partial(hit_line, step, hit))
        if diff is None:
            put(partial(tick_line, now, reasons, decision_log.hashes.copy()))
        else:
            new = diff.new_requests
            priorities = [self._table.running[row.handle].priority for row in new] if new else []
            put(partial(step_line, now, diff, priorities, reasons, decision_log.hashes.copy()))
        self._reasons.clear()
        decision_log.hits.clear()
        decision_log.hashes.clear()


def begins_at_keyframe(records: Sequence[Record]) -> bool:
    return bool(records) and records[0].kind == RecordKind.KEYFRAME


def lines_of_log(header: TraceHeader, records: Iterable[Record], *, prompts: bool = False) -> Iterator[Line]:
    """Yield the lines that a recorder would have made of the run, without the header.

    Replays the log with a new Scheduler, because hashes and endings are not in the log. Only a keyframe at the start of
    the log becomes a line.
    """
    lines: list[Line] = []
    decision_log = DecisionLog()
    scheduler = header.make_scheduler(hooks=decision_log)
    recorder = TraceRecorder(scheduler, decision_log, make_immediately(lines.append), prompts=prompts)
    codec: Codec[Any] = Codec(Consumed)
    budget_halved = False
    for index, record in enumerate(records):
        match RecordKind(record.kind):
            case RecordKind.KEYFRAME if index == 0:
                continue_from(scheduler, decode_snapshot(record.frames[0]), record.live)
                recorder = TraceRecorder(scheduler, decision_log, make_immediately(lines.append), prompts=prompts)
                lines.append(keyframe_line(record.now, scheduler, header))
            case RecordKind.CONSUMED:
                event = codec.decode(record.frames).message
                scheduler.consume(event, record.client)
                recorder.consumed(record.now, record.client, event)
            case RecordKind.CLIENT_DROPPED:
                scheduler.drop_client(record.client)
                recorder.client_dropped(record.now, record.client)
            case RecordKind.BUDGET_HALVED:
                budget_halved = scheduler.halve_token_budget()
            case RecordKind.WORKER_EPOCH | RecordKind.NEW_WORKERS as kind:
                new_workers = kind is RecordKind.NEW_WORKERS
                scheduler.begin_worker_epoch(new_workers=new_workers)
                recorder.worker_epoch_began(record.now, budget_halved=budget_halved, new_workers=new_workers)
                budget_halved = False
            case RecordKind.PRODUCED | RecordKind.TICK:
                recorder.before_step()
                diff = scheduler.schedule(record.now)
                recorder.note(scheduler.decisions.take())
                recorder.decided(record.now, diff)
        scheduler.take_messages()
        yield from lines
        lines.clear()
