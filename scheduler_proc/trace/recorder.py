"""The lines of a trace, made from what a Scheduler just did. Decides nothing, writes nothing."""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from quire.protocol.codec import Codec
from quire.protocol.config import EngineConfig
from quire.protocol.messages import (
    Abort,
    AddRequest,
    Consumed,
    Control,
    EndReason,
    Fail,
    Int32,
    ModelRunnerOutput,
    NewRequestData,
    OpaqueRequest,
    OpaqueResult,
    Refuse,
    SchedulerOutput,
)
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.structured_outputs import StructuredOutputs
from quire.scheduler_proc.reasons import Decision
from quire.scheduler_proc.request import Request
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.event_log import Record, RecordKind, TraceHeader
from quire.scheduler_proc.trace.lines import (
    HASH_BYTES,
    VERSION,
    Arrival,
    ClientDropped,
    Epoch,
    Event,
    Header,
    Line,
    NewRow,
    OtherEvent,
    PrefixCacheEvent,
    Reason,
    Result,
    StepDecision,
    StepSnapshot,
    Tick,
)
from quire.scheduler_proc.trace.tap import Tap
from quire.version import __version__

SOME_GRAMMAR = StructuredOutputs(json_object=True)
"""Stands for whatever an answer must look like: that it is looked at, token by token, is all that a replay needs."""

Names = list[tuple[int, bytes]]


class TraceRecorder:
    """Is told of each event and each decision right after the Scheduler took it, and gives the lines of it to ``sink``.

    Nothing here looks at a request that nothing happened to: a steady step costs its diff's length. Lines refer to
    nothing that changes later, so that they may be encoded at leisure.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        sink: Callable[[Line], None],
        *,
        prompts: bool = False,
        hash_bytes: int = HASH_BYTES,
    ) -> None:
        """``scheduler``: before its first request. ``prompts``: arrivals have their tokens."""
        self._scheduler = scheduler
        self._sink = sink
        self._prompts = prompts
        self._hash_bytes = hash_bytes
        self._tap = Tap()
        self._reasons: list[Reason] = []
        self._newest = 0
        self._before: tuple[int, ...] = ()
        self._told: tuple[int, ...] = ()
        scheduler.listen(self._tap)

    # ---- events

    def consumed(self, now: float, client: int, event: Consumed) -> None:
        """``event`` was taken and did not raise."""
        match event:
            case ModelRunnerOutput():
                self._result(now, event)
            case AddRequest():
                self._arrival(now, client, event)
            case OpaqueRequest() | OpaqueResult():
                raise TypeError("what has no tokens came from a trace, and is not recorded again")
            case Control(kind="statistics"):
                pass  # a question
            case _:
                self._sink(Event(now=now, client=client, event=_without_texts(event), hashes=self._names()))
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
        delivered = event.output_token_ids
        self._sink(
            Arrival(
                now=now,
                client=client,
                req_id=event.request_id,
                num_prompt_tokens=len(event.prompt_token_ids),
                num_output_tokens=0 if delivered is None else len(delivered),
                priority=event.priority,
                arrival=event.arrival,
                sampling=what_schedules(event.sampling),
                seed=event.seed,
                block_hashes=self._known_names(request),
                prompt_token_ids=event.prompt_token_ids.tolist() if self._prompts else None,
            )
        )
        if request is None and self._tap.ended[0].reason == EndReason.REPETITION:  # which lengths do not tell
            self._sink(Event(now=now, client=client, event=Abort([event.request_id])))

    def _known_names(self, request: Request | None) -> bytes:
        size = self._hash_bytes
        return b"" if request is None else b"".join([name[:size] for name in request.block_hashes])

    def _result(self, now: float, event: ModelRunnerOutput) -> None:
        self._sink(
            Result(
                step=event.step,
                now=now,
                seconds=event.seconds,
                handles=_listed(event.handles),
                counts=_listed(event.counts),
                drafts=_listed(event.drafts),
                bad=event.bad,
                failed=event.failed,
                ended=list(self._tap.ended),
                hashes=self._names(),
            )
        )

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
            if self._before != self._told:
                self._snapshot(now, diff.step)
            self._admissions(diff.step)
            self._decision(now, diff, reasons)
        self._tap.clear()

    def _snapshot(self, now: float, step: int) -> None:
        self._told = running, waiting, free, cached = self._before
        total = self._scheduler.kv.pool.num_usable_blocks
        self._sink(
            StepSnapshot(
                step=step,
                now=now,
                running=running,
                waiting=waiting,
                free_blocks=free,
                total_blocks=total,
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

    def _decision(self, now: float, diff: SchedulerOutput, reasons: list[Reason]) -> None:
        self._sink(
            StepDecision(
                step=diff.step,
                now=now,
                removed=diff.removed,
                parked=diff.parked,
                unparked=diff.unparked,
                new=[self._new_row(row) for row in diff.new_requests],
                block_ids=_listed(diff.block_ids) or [],
                appended=appended(diff),
                counts=diff.counts,
                drafts=diff.drafts,
                awaits_sample_inputs=diff.awaits_sample_inputs,
                reasons=reasons,
                hashes=self._names(),
            )
        )

    def _new_row(self, row: NewRequestData) -> NewRow:
        return NewRow(
            row.handle,
            row.request_id,
            row.num_prompt_tokens,
            row.num_tokens,
            row.num_computed_tokens,
            row.num_blocks,
            self._scheduler.table.running[row.handle].priority,
        )

    def _names(self) -> Names:
        size = self._hash_bytes
        return [(handle, name[:size]) for handle, name in self._tap.hashes]


def appended(diff: SchedulerOutput) -> list[int]:
    """Handle, group, block id, handle, ... of the blocks that ``diff`` gives to held requests."""
    if diff.appended_handles is None or diff.appended_block_ids is None:
        return []
    flat = [0] * (3 * len(diff.appended_handles))
    flat[0::3] = diff.appended_handles.tolist()
    flat[2::3] = diff.appended_block_ids.tolist()
    if diff.appended_groups is not None:
        flat[1::3] = diff.appended_groups.tolist()
    return flat


def _listed(array: Int32 | None) -> list[int] | None:
    if array is None:
        return None
    listed: list[int] = array.tolist()
    return listed


def what_schedules(sampling: SamplingParams) -> SamplingParams:
    """What decides how long a request runs and who looks at its tokens; nothing of what its user wrote."""
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        prompt_logprobs=None if sampling.prompt_logprobs is None else 0,
        structured_outputs=None if sampling.structured_outputs is None else SOME_GRAMMAR,
        repetition_detection=sampling.repetition_detection,
    )


def _without_texts(event: OtherEvent) -> OtherEvent:
    """What a compiler of grammars says may quote the grammar."""
    match event:
        case Refuse():
            return Refuse(event.request_id, event.code, event.param, "")
        case Fail():
            return Fail(event.request_id, event.detail.split(":", 1)[0])
        case _:
            return event


def public_config(config: EngineConfig) -> EngineConfig:
    """``config`` without the places of this machine."""
    speculative = config.speculative
    if speculative is not None:
        speculative = msgspec.structs.replace(speculative, model_path="")
    return msgspec.structs.replace(
        config, model_path="", speculative=speculative, kv_events_endpoint="", kv_events_replay_endpoint=""
    )


def make_header(
    header: TraceHeader, now: float = 0.0, wall: float = 0.0, *, prompts: bool = False, hash_bytes: int = HASH_BYTES
) -> Header:
    """``wall``: seconds since 1970 at ``now``."""
    return Header(
        version=VERSION,
        quire=__version__,
        config=public_config(header.config),
        kv_layout=header.kv_layout,
        num_blocks=header.num_blocks,
        now=now,
        wall=wall,
        hash_bytes=hash_bytes,
        prompts=prompts,
    )


def record_log(header: TraceHeader, records: Iterable[Record], *, prompts: bool = False) -> list[Line]:
    """The lines of a log: what a recorder would have made of the run, header included.

    Feeds a fresh Scheduler what the recorded one consumed, for hashes and endings are not in the log.
    """
    lines: list[Line] = [make_header(header, prompts=prompts)]
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
    return lines
