"""The lines of a trace, made from what a Scheduler just did. Decides nothing, writes nothing."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from quire.protocol.wire.codec import Codec
from quire.protocol.wire.front_end_messages import Abort, AddRequest, Control, EndReason
from quire.protocol.wire.worker_messages import ModelRunnerOutput, SchedulerOutput
from quire.scheduler_proc.core.events import Consumed
from quire.scheduler_proc.core.scheduler import Scheduler
from quire.scheduler_proc.requests.reasons import Decision
from quire.scheduler_proc.trace.decision_log import DecisionLog
from quire.scheduler_proc.trace.event_log import Record, RecordKind, TraceHeader
from quire.scheduler_proc.trace.keyframe import decode_state, restore
from quire.scheduler_proc.trace.lines import Line
from quire.scheduler_proc.trace.translate import (
    arrival_line,
    decided_line,
    dropped_line,
    event_line,
    hit_line,
    keyframe_line,
    result_line,
    snapshot_line,
    tick_line,
    worker_epoch_line,
)

LineToBe = tuple[Callable[..., Line], tuple[Any, ...]]
"""What makes a line, and of what."""


def at_once(sink: Callable[[Line], None]) -> Callable[[LineToBe], None]:
    """Lines made as they come."""

    def put(line: LineToBe) -> None:
        make, parts = line
        sink(make(*parts))

    return put


class TraceRecorder:
    """Is told of each event and each decision right after the Scheduler took it, and puts the lines of it.

    Nothing here looks at a request that nothing happened to: a steady step costs its diff's length. What a line is
    made of never changes afterwards, so that all of that can wait until there is time.
    """

    def __init__(
        self, scheduler: Scheduler, tap: DecisionLog, put: Callable[[LineToBe], None], *, prompts: bool = False
    ) -> None:
        """
        Args:
            scheduler: before its first request, with ``tap`` as its hooks.
            prompts: arrivals have their tokens.
        """
        self._scheduler = scheduler
        self._table, self._pool = scheduler.table, scheduler.kv.pool
        self._put = put
        self._prompts = prompts
        self._tap = tap
        self._reasons: list[Decision] = []
        self._newest = 0
        self._before = self._told = (-1, -1, -1, -1)

    # ---- events

    def consumed(self, now: float, client: int, event: Consumed) -> None:
        """``event`` was taken and did not raise."""
        tap = self._tap
        if isinstance(event, ModelRunnerOutput):
            self._put((result_line, (now, event, tap.ended_requests.copy(), tap.hashes.copy())))
        else:
            self._rarer(now, client, event)
        tap.ended_requests.clear()
        tap.hashes.clear()

    def _rarer(self, now: float, client: int, event: Consumed) -> None:
        match event:
            case AddRequest():
                self._arrival(now, client, event)
            case Control(kind="statistics"):
                pass  # a question
            case _:
                self._put((event_line, (now, client, event, self._tap.hashes.copy())))

    def client_dropped(self, now: float, client: int) -> None:
        self._put((dropped_line, (now, client, self._tap.hashes.copy())))
        self._tap.clear()

    def worker_epoch_began(
        self, now: float, *, budget_halved: bool = False, new_workers: bool = False, reason: str = ""
    ) -> None:
        """Record a worker epoch after the Scheduler began it; its token budget may have been halved before."""
        self._put((worker_epoch_line, (now, budget_halved, new_workers, reason, self._tap.hashes.copy())))
        self._tap.clear()

    def _arrival(self, now: float, client: int, event: AddRequest) -> None:
        """A request that was refused leaves no line, and neither does a second one with an id in use."""
        request = self._scheduler.table.requests.get((client, event.request_id))
        names: list[bytes] = []
        if request is not None and request.number > self._newest:
            self._newest = request.number
            names = request.block_hashes.copy()
        elif not self._tap.ended_requests:  # else it ended at once
            return
        self._put((arrival_line, (now, client, event, names, self._prompts)))
        ended = self._tap.ended_requests
        if ended and ended[0].reason == EndReason.REPETITION:  # which lengths do not tell
            self._put((event_line, (now, client, Abort([event.request_id]), [])))

    # ---- decisions

    def note(self, decisions: list[Decision]) -> None:
        """What the Scheduler decided, with its reasons: said in the next line that can."""
        self._reasons += decisions

    def before_step(self) -> None:
        """The Scheduler is about to be asked for a step."""
        table, pool = self._table, self._pool
        running, waiting = len(table.running) + len(table.leaving), len(table.waiting) + len(table.skipped_waiting)
        free, cached = pool.free_block_queue.num_free_blocks, pool.cached_block_hash_to_block.num_blocks
        self._before = (running, waiting, free, cached)

    def decided(self, now: float, diff: SchedulerOutput | None) -> None:
        """The Scheduler was asked for a step; None: it had none. ``note`` its reasons before."""
        tap, put = self._tap, self._put
        reasons = self._reasons.copy()
        step = self._scheduler.last_step + 1 if diff is None else diff.step
        if diff is not None and self._before != self._told:
            self._told = self._before
            put((snapshot_line, (now, step, self._before, self._pool.num_usable_blocks)))
        for hit in tap.hits:
            put((hit_line, (step, hit)))
        if diff is None:
            put((tick_line, (now, reasons, tap.hashes.copy())))
        else:
            new = diff.new_requests
            priorities = [self._table.running[row.handle].priority for row in new] if new else []
            put((decided_line, (now, diff, priorities, reasons, tap.hashes.copy())))
        self._reasons.clear()
        tap.hits.clear()
        tap.hashes.clear()


def begins_at_keyframe(records: Sequence[Record]) -> bool:
    return bool(records) and records[0].kind == RecordKind.KEYFRAME


def lines_of_log(header: TraceHeader, records: Iterable[Record], *, prompts: bool = False) -> Iterator[Line]:
    """Yield the lines that a recorder would have made of the run, without the header.

    A keyframe has a line where the log begins with it only.

    Feeds a fresh Scheduler what the recorded one consumed, for hashes and endings are not in the log.
    """
    lines: list[Line] = []
    tap = DecisionLog()
    scheduler = header.make_scheduler(hooks=tap)
    recorder = TraceRecorder(scheduler, tap, at_once(lines.append), prompts=prompts)
    codec: Codec[Any] = Codec(Consumed)
    budget_halved = False
    for index, record in enumerate(records):
        match RecordKind(record.kind):
            case RecordKind.KEYFRAME if index == 0:
                state = decode_state(record.frames[0])
                restore(scheduler, state)
                lines.append(keyframe_line(record.now, state, header))
            case RecordKind.CONSUMED:
                event = codec.decode(record.frames).message
                scheduler.consume(event, record.client)
                recorder.consumed(record.now, record.client, event)
            case RecordKind.DROPPED:
                scheduler.drop_client(record.client)
                recorder.client_dropped(record.now, record.client)
            case RecordKind.HALVED:
                budget_halved = scheduler.halve_steps()
            case RecordKind.EPOCH | RecordKind.RESTARTED as kind:
                new_workers = kind is RecordKind.RESTARTED
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
