"""The lines of a trace, made from what a Scheduler just did. Decides nothing, writes nothing."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from quire.protocol.codec import Codec
from quire.protocol.messages import (
    Abort,
    AddRequest,
    Consumed,
    Control,
    EndReason,
    ModelRunnerOutput,
    OpaqueRequest,
    OpaqueResult,
    SchedulerOutput,
)
from quire.scheduler_proc.reasons import Decision
from quire.scheduler_proc.request import Request
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.event_log import Record, RecordKind, TraceHeader
from quire.scheduler_proc.trace.lines import (
    HASH_BYTES,
    ClientDropped,
    Epoch,
    Event,
    Line,
    PrefixCacheEvent,
    Reason,
    StepSnapshot,
    Tick,
)
from quire.scheduler_proc.trace.tap import Tap
from quire.scheduler_proc.trace.translate import (
    Names,
    arrival_line,
    decision_line,
    make_header,
    result_line,
    without_texts,
)


class TraceRecorder:
    """Is told of each event and each decision right after the Scheduler took it, and gives the lines of it to ``sink``.

    Nothing here looks at a request that nothing happened to: a steady step costs its diff's length. Lines refer to
    nothing that changes later, so that they may be encoded at leisure.
    """

    def __init__(self, scheduler: Scheduler, sink: Callable[[Line], None], *, prompts: bool = False) -> None:
        """``scheduler``: before its first request. ``prompts``: arrivals have their tokens."""
        self._scheduler = scheduler
        self._sink = sink
        self._prompts = prompts
        self._tap = Tap()
        self._reasons: list[Reason] = []
        self._newest = 0
        self._before: tuple[int, int, int, int] | None = None
        self._told: tuple[int, int, int, int] | None = None
        scheduler.listen(self._tap)

    # ---- events

    def consumed(self, now: float, client: int, event: Consumed) -> None:
        """``event`` was taken and did not raise."""
        match event:
            case ModelRunnerOutput():
                self._sink(result_line(now, event, self._tap.ended.copy(), self._names()))
            case AddRequest():
                self._arrival(now, client, event)
            case OpaqueRequest() | OpaqueResult():
                raise TypeError("what has no tokens came from a trace, and is not recorded again")
            case Control(kind="statistics"):
                pass  # a question
            case _:
                self._sink(Event(now=now, client=client, event=without_texts(event), hashes=self._names()))
        self._tap.clear()

    def client_dropped(self, now: float, client: int) -> None:
        self._sink(ClientDropped(now=now, client=client, hashes=self._names()))
        self._tap.clear()

    def epoch_began(self, now: float, *, halved: bool = False, reason: str = "") -> None:
        """After the Scheduler began it. ``halved``: and had its steps halved before."""
        self._sink(Epoch(now=now, halved=halved, reason=reason, hashes=self._names()))
        self._tap.clear()

    def _arrival(self, now: float, client: int, event: AddRequest) -> None:
        """A request that was refused leaves no line, and neither does a second one with an id in use."""
        request = self._scheduler.table.requests.get((client, event.request_id))
        if request is not None and request.number > self._newest:
            self._newest = request.number
        elif self._tap.ended:
            request = None  # it ended at once
        else:
            return
        self._sink(arrival_line(now, client, event, self._known_names(request), prompts=self._prompts))
        if request is None and self._tap.ended[0].reason == EndReason.REPETITION:  # which lengths do not tell
            self._sink(Event(now=now, client=client, event=Abort([event.request_id])))

    def _known_names(self, request: Request | None) -> bytes:
        return b"" if request is None else b"".join([name[:HASH_BYTES] for name in request.block_hashes])

    # ---- decisions

    def note(self, decisions: Iterable[Decision]) -> None:
        """What the Scheduler decided, with its reasons: said in the next line that can."""
        self._reasons += [Reason(d.kind, d.request_id, d.reason, d.beneficiary, d.num_blocks) for d in decisions]

    def before_step(self) -> None:
        """The Scheduler is about to be asked for a step."""
        table, pool = self._scheduler.table, self._scheduler.kv.pool
        running = len(table.running) + len(table.leaving)
        self._before = (running, table.num_waiting, pool.num_free_blocks, pool.num_cached_blocks)

    def decided(self, now: float, diff: SchedulerOutput | None) -> None:
        """The Scheduler was asked for a step; None: it had none. ``note`` its reasons before."""
        reasons, self._reasons = self._reasons, []
        if diff is None:
            self._admissions(self._scheduler.cruise.sent + 1)
            self._sink(Tick(now=now, reasons=reasons, hashes=self._names()))
        else:
            self._snapshot(now, diff.step)
            self._admissions(diff.step)
            running = self._scheduler.table.running
            priorities = [running[row.handle].priority for row in diff.new_requests]
            self._sink(decision_line(now, diff, priorities, reasons, self._names()))
        self._tap.clear()

    def _snapshot(self, now: float, step: int) -> None:
        if self._before is None or self._before == self._told:
            return
        self._told = running, waiting, free, cached = self._before
        self._sink(
            StepSnapshot(
                step=step,
                now=now,
                running=running,
                waiting=waiting,
                free_blocks=free,
                total_blocks=self._scheduler.kv.pool.num_usable_blocks,
                gpu_cached_blocks=cached,
            )
        )

    def _admissions(self, step: int) -> None:
        for hit in self._tap.hits:
            self._sink(
                PrefixCacheEvent(
                    step=step,
                    req_id=hit.request_id,
                    local_hit_tokens=hit.num_hit_tokens,
                    total_prompt_tokens=hit.num_prompt_tokens,
                    num_tokens=hit.num_tokens,
                )
            )

    def _names(self) -> Names:
        return [(handle, name[:HASH_BYTES]) for handle, name in self._tap.hashes]


def record_log(header: TraceHeader, records: Iterable[Record], *, prompts: bool = False) -> list[Line]:
    """The lines of a log: what a recorder would have made of the run, header included."""
    return [make_header(header, prompts=prompts), *lines_of_log(header, records, prompts=prompts)]


def lines_of_log(header: TraceHeader, records: Iterable[Record], *, prompts: bool = False) -> Iterator[Line]:
    """The same without the header, one record after the other.

    Feeds a fresh Scheduler what the recorded one consumed, for hashes and endings are not in the log.
    """
    lines: list[Line] = []
    scheduler = header.make_scheduler()
    recorder = TraceRecorder(scheduler, lines.append, prompts=prompts)
    codec: Codec[Any] = Codec(Consumed)
    halved = False
    for record in records:
        match RecordKind(record.kind):
            case RecordKind.CONSUMED:
                event = codec.decode(record.frames).message
                scheduler.consume(event, record.client)
                recorder.consumed(record.now, record.client, event)
            case RecordKind.DROPPED:
                scheduler.drop_client(record.client)
                recorder.client_dropped(record.now, record.client)
            case RecordKind.HALVED:
                halved = scheduler.halve_steps()
            case RecordKind.EPOCH:
                scheduler.begin_epoch()
                recorder.epoch_began(record.now, halved=halved)
                halved = False
            case RecordKind.PRODUCED | RecordKind.TICK:
                recorder.before_step()
                diff = scheduler.schedule(record.now)
                recorder.note(scheduler.decisions.take())
                recorder.decided(record.now, diff)
        scheduler.take_messages()
        yield from lines
        lines.clear()
