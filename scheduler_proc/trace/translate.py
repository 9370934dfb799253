"""Messages as lines of a trace, without what users wrote; and a configuration without the places of its machine."""

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.front_end_messages import AddRequest, Ended
from quire.protocol.wire.kv_events import HASH_BYTES as KEY_BYTES
from quire.protocol.wire.worker_messages import ModelRunnerOutput, SchedulerOutput
from quire.scheduler_proc.core.events import Fail, Refuse
from quire.scheduler_proc.requests.reasons import Decision
from quire.scheduler_proc.trace.decision_log import Hit
from quire.scheduler_proc.trace.event_log import TraceHeader
from quire.scheduler_proc.trace.keyframe import IdleState, with_short_names
from quire.scheduler_proc.trace.lines import (
    FORMAT,
    HASH_BYTES,
    VERSION,
    Arrival,
    ClientDropped,
    Event,
    Header,
    Keyframe,
    NewRow,
    OtherEvent,
    PrefixCacheEvent,
    Reason,
    Result,
    StepDecision,
    StepSnapshot,
    Tick,
    WorkerEpoch,
)

SOME_GRAMMAR = StructuredOutputs(json_object=True)
"""Stands for whatever an answer must look like: that it is looked at, token by token, is all that a replay needs."""

Names = list[tuple[int, bytes]]


def make_header(
    header: TraceHeader, now: float = 0.0, wall: float = 0.0, *, prompts: bool = False, complete: bool = True
) -> Header:
    """``wall``: seconds since 1970 at ``now``."""
    return Header(
        format=FORMAT,
        version=VERSION,
        quire=header.config.version,
        config=public_config(header.config),
        kv_layout=header.kv_layout,
        num_blocks=header.num_blocks,
        now=now,
        wall=wall,
        hash_bytes=HASH_BYTES,
        prompts=prompts,
        complete=complete,
    )


def keyframe_line(now: float, state: IdleState, header: TraceHeader) -> Keyframe:
    return Keyframe(now=now, state=with_short_names(state, KEY_BYTES[header.config.prefix_caching_hash_algo]))


def public_config(config: EngineConfig) -> EngineConfig:
    """``config`` without the places of this machine."""
    speculative = config.speculative
    if speculative is not None:
        speculative = msgspec.structs.replace(speculative, model_path="")
    return msgspec.structs.replace(
        config,
        model_path="",
        speculative=speculative,
        kv_events_endpoint="",
        kv_events_replay_endpoint="",
        kv_events_curve_dir="",
        trace="",
        crash_dump_dir="",
    )


def arrival_line(now: float, client: int, event: AddRequest, names: list[bytes], prompts: bool) -> Arrival:
    """``names``: of its full blocks. ``prompts``: with its tokens."""
    delivered = event.output_token_ids
    return Arrival(
        now=now,
        client=client,
        req_id=event.request_id,
        num_prompt_tokens=len(event.prompt_token_ids),
        num_output_tokens=0 if delivered is None else len(delivered),
        priority=event.priority,
        arrival=event.arrival,
        sampling=what_schedules(event.sampling),
        seed=event.seed,
        tenant=event.tenant,
        resubmitted=event.resubmitted,
        block_hashes=b"".join([name[:HASH_BYTES] for name in names]),
        prompt_token_ids=_listed(event.prompt_token_ids) if prompts else None,
    )


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


def event_line(now: float, client: int, event: OtherEvent, hashes: Names) -> Event:
    """What a compiler of grammars says may quote the grammar, and is left out."""
    match event:
        case Refuse():
            event = Refuse(event.request_id, event.code, event.param, "")
        case Fail():
            event = Fail(event.request_id, event.detail.split(":", 1)[0])
    return Event(now=now, client=client, event=event, hashes=hashes)


def dropped_line(now: float, client: int, hashes: Names) -> ClientDropped:
    return ClientDropped(now=now, client=client, hashes=hashes)


def worker_epoch_line(now: float, budget_halved: bool, new_workers: bool, reason: str, hashes: Names) -> WorkerEpoch:
    return WorkerEpoch(now=now, budget_halved=budget_halved, new_workers=new_workers, reason=reason, hashes=hashes)


def result_line(now: float, event: ModelRunnerOutput, ended: list[Ended], hashes: Names) -> Result:
    return Result(
        step=event.step,
        now=now,
        seconds=event.seconds,
        handles=_listed(event.handles),
        counts=_listed(event.counts),
        drafts=_listed(event.drafts),
        bad=event.bad,
        failed=event.failed,
        ended=ended,
        hashes=hashes,
    )


def snapshot_line(now: float, step: int, counts: tuple[int, int, int, int], num_blocks: int) -> StepSnapshot:
    """``counts``: requests that run and that wait, blocks that are free and whose content can be found."""
    running, waiting, free, cached = counts
    return StepSnapshot(
        step=step,
        now=now,
        running=running,
        waiting=waiting,
        free_blocks=free,
        total_blocks=num_blocks,
        gpu_cached_blocks=cached,
    )


def hit_line(step: int, hit: Hit) -> PrefixCacheEvent:
    return PrefixCacheEvent(
        step=step,
        req_id=hit.request_id,
        local_hit_tokens=hit.num_hit_tokens,
        total_prompt_tokens=hit.num_prompt_tokens,
        num_tokens=hit.num_tokens,
    )


def tick_line(now: float, reasons: list[Decision], hashes: Names) -> Tick:
    return Tick(now=now, reasons=reasons_of(reasons), hashes=hashes)


def decided_line(
    now: float, diff: SchedulerOutput, priorities: list[int], reasons: list[Decision], hashes: Names
) -> StepDecision:
    """As the Scheduler says it."""
    return decision_line(now, diff, priorities, reasons_of(reasons) if reasons else [], hashes)


def decision_line(
    now: float, diff: SchedulerOutput, priorities: list[int], reasons: list[Reason], hashes: Names
) -> StepDecision:
    """``priorities``: of ``diff.new_requests``."""
    return StepDecision(
        step=diff.step,
        now=now,
        removed=diff.removed,
        parked=diff.parked,
        unparked=diff.unparked,
        new=[
            NewRow(r.handle, r.request_id, r.num_prompt_tokens, r.num_tokens, r.num_computed_tokens, r.num_blocks, p)
            for r, p in zip(diff.new_requests, priorities, strict=True)
        ],
        block_ids=_listed(diff.block_ids) or [],
        appended=appended(diff),
        counts=diff.counts,
        drafts=diff.drafts,
        awaits_sample_inputs=diff.awaits_sample_inputs,
        reasons=reasons,
        hashes=hashes,
    )


def reasons_of(decisions: list[Decision]) -> list[Reason]:
    return [Reason(d.kind, d.request_id, d.reason, d.beneficiary, d.num_blocks) for d in decisions]


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
