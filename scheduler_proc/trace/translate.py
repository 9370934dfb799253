"""Converts messages to trace lines without user texts, and configurations without paths of this machine."""

from hashlib import sha256
from typing import Any, TypeAlias

import msgspec
import numpy as np

from quire.protocol.config import EngineConfig
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.protocol.wire.adapter_messages import AdapterLoaded, AdapterRef
from quire.protocol.wire.arrays import NO_TOKENS, Int32
from quire.protocol.wire.front_end_messages import AddRequest, Ended
from quire.protocol.wire.item_messages import Encoded, InputItem
from quire.protocol.wire.kv_events import HASH_BYTES as KEY_BYTES
from quire.protocol.wire.transfer_messages import BlocksMoved, DiskContents
from quire.protocol.wire.worker_messages import ModelRunnerOutput, SchedulerOutput
from quire.scheduler_proc.requests.events import Fail, Refuse
from quire.scheduler_proc.requests.reasons import Decision
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.decision_log import Hit
from quire.scheduler_proc.trace.event_log import TraceHeader
from quire.scheduler_proc.trace.lines import (
    FORMAT,
    HASH_BYTES,
    VERSION,
    Arrival,
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
)
from quire.scheduler_proc.trace.snapshot import Column, ObjectTable, PoolState, take

Counts: TypeAlias = tuple[int, int, int, int, int, list[tuple[str, int]], dict[str, tuple[int, int, int]]]
"""Running and waiting requests; free, usable and cached blocks; (job id, blocks) of each pin; and of each tier its
pages: free, all, and with content."""
NO_COUNTS: Counts = (-1, -1, -1, -1, -1, [], {})
ANY_GRAMMAR = StructuredOutputs(json_object=True)
"""Replaces every constraint: a replay only needs to know that the output is constrained."""

Hashes = list[tuple[int, bytes]]


def make_header(
    header: TraceHeader, now: float = 0.0, wall: float = 0.0, *, prompts: bool = False, complete: bool = True
) -> Header:
    """``wall``: seconds since 1970 at ``now``."""
    return Header(
        format=FORMAT,
        version=VERSION,
        quire=header.config.version,
        **msgspec.structs.asdict(msgspec.structs.replace(header, config=public_config(header.config))),
        now=now,
        wall=wall,
        hash_bytes=HASH_BYTES,
        prompts=prompts,
        complete=complete,
    )


def keyframe_line(now: float, scheduler: Scheduler, header: TraceHeader) -> Keyframe:
    hash_bytes = KEY_BYTES[header.config.prefix_caching_hash_algo]
    names = scheduler.adapters.slots.known.keys() | scheduler.items.names

    def short(key: bytes) -> bytes:
        return key if key in names else key[:HASH_BYTES] + key[hash_bytes:]

    def public(each: Any) -> Any:
        if isinstance(each, AdapterRef):
            return without_folder(each)
        if isinstance(each, InputItem):
            return with_short_path(each)
        return scheduling_params(each) if isinstance(each, SamplingParams) else each

    state, _ = take(scheduler, public)
    tables = [
        table
        if table.name == "ndarray"
        else ObjectTable(
            table.name,
            table.num_objects,
            table.fields,
            [Column(each.values, each.numbers, list(map(short, each.data))) for each in table.columns],
        )
        for table in state.tables
    ]
    pools = [
        PoolState(
            pool.holders,
            [None if key is None else short(key) for key in pool.keys],
            [(block, short(key)) for block, key in pool.duplicates],
        )
        for pool in state.pools
    ]
    return Keyframe(
        now=now,
        num_requests=len(scheduler.table.requests),
        stale_until=scheduler.results.stale_until,
        handles=scheduler.in_flight.handles.tolist(),
        removed=scheduler.table.ended_handles[0],
        snapshot=msgspec.structs.replace(state, tables=tables, pools=pools),
    )


def public_config(config: EngineConfig) -> EngineConfig:
    """Return ``config`` without paths and addresses of this machine."""
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
        kv_events_without_keys=False,
        kv_events_format="quire",
        kv_events_topic="",
        trace="",
        crash_dump_dir="",
        learned_costs_dir="",
        ssd_cache_dir="",
        ranks=[],
        head_key_file="",
    )


def lengths_of(event: AddRequest) -> tuple[int, int]:
    """Return the number of tokens of prompt and output in an arrival; a forked one has none."""
    return len(event.prompt_token_ids), 0 if event.output_token_ids is None else len(event.output_token_ids)


def arrival_line(
    now: float,
    client: int,
    event: AddRequest,
    num_tokens: tuple[int, int],
    block_hashes: list[bytes],
    prompts: bool,
    hashes: Hashes,
) -> Arrival:
    """Return the line of an accepted request.

    Args:
        num_tokens: known tokens of prompt and output.
        block_hashes: hashes of its full blocks.
        prompts: whether to include its token ids.
        hashes: those of other requests' blocks that became full.
    """
    return Arrival(
        now=now,
        client=client,
        request=without_texts(event, prompts=prompts),
        num_prompt_tokens=num_tokens[0],
        num_output_tokens=num_tokens[1],
        hashes=hashes,
        block_hashes=b"".join([block_hash[:HASH_BYTES] for block_hash in block_hashes]),
    )


def without_texts(event: AddRequest, *, prompts: bool = False) -> AddRequest:
    """Return the message without what its user wrote, and what the line has in other fields."""
    return msgspec.structs.replace(
        event,
        prompt_token_ids=event.prompt_token_ids if prompts else NO_TOKENS,
        output_token_ids=None,
        cache_salt="",
        sampling=scheduling_params(event.sampling),
        adapter=None if event.adapter is None else without_folder(event.adapter),
        items=[with_short_path(item) for item in event.items],
        hint="",
        num_forked_tokens=0,
    )


def without_folder(adapter: AdapterRef) -> AdapterRef:
    return msgspec.structs.replace(adapter, path="")


def with_short_path(item: InputItem) -> InputItem:
    """Return the item with a hash of its path, by which a replay knows the items with the same file."""
    return msgspec.structs.replace(item, path=sha256(item.path.encode()).hexdigest()[:16])


def scheduling_params(sampling: SamplingParams) -> SamplingParams:
    """Return the sampling parameters that affect scheduling, without anything that the user wrote."""
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        prompt_logprobs=None if sampling.prompt_logprobs is None else 0,
        structured_outputs=None if sampling.structured_outputs is None else ANY_GRAMMAR,
        repetition_detection=sampling.repetition_detection,
        use_beam_search=sampling.use_beam_search,
        beam_width=sampling.beam_width,
        return_routed_experts=sampling.return_routed_experts,
    )


def event_line(now: float, client: int, event: OtherEvent, hashes: Hashes) -> Event:
    """Omit texts of errors, which may quote a grammar or a path."""
    match event:
        case Refuse():
            event = Refuse(event.request_id, event.code, event.param, "")
        case Fail():
            event = Fail(event.request_id, event.detail.split(":", 1)[0])
        case AdapterLoaded(problem=problem) if problem:
            event = msgspec.structs.replace(event, problem="not loaded")
        case Encoded(problem=problem) if problem:
            event = msgspec.structs.replace(event, problem="not encoded")
        case BlocksMoved():
            event = msgspec.structs.replace(event, reason="")
        case DiskContents():
            event = msgspec.structs.replace(event, keys=_short_keys(event), reason=event.reason and "unusable")
    return Event(now=now, client=client, event=event, hashes=hashes)


def _short_keys(event: DiskContents) -> bytes:
    if not (count := len(event.page_ids)):
        return b""
    return np.frombuffer(event.keys, np.uint8).reshape(count, -1)[:, :HASH_BYTES].tobytes()


def result_line(
    now: float, event: ModelRunnerOutput, ended: list[Ended], beams: list[tuple[int, list[int]]], hashes: Hashes
) -> Result:
    return Result(
        step=event.step,
        now=now,
        seconds=event.seconds,
        handles=_to_list(event.handles),
        counts=_to_list(event.counts),
        drafts=_to_list(event.drafts),
        bad=event.bad,
        failed=event.failed,
        ended=ended,
        beams=beams,
        hashes=hashes,
    )


def counts_of(scheduler: Scheduler) -> Counts:
    table, pool, tiers = scheduler.table, scheduler.kv.pool, scheduler.kv.tiers
    return (
        len(table.running) + len(table.leaving),
        len(table.waiting) + len(table.skipped_waiting),
        pool.free_block_queue.num_free_blocks,
        pool.num_usable_blocks,
        pool.cached_block_hash_to_block.num_blocks,
        scheduler.programs.pinned(),
        {t.name: (t.pages.num_free_blocks, t.pages.num_usable_blocks, t.pages.num_cached_blocks) for t in tiers},
    )


def snapshot_line(now: float, step: int, counts: Counts) -> StepSnapshot:
    running, waiting, free, usable, cached, pinned, of_tiers = counts
    return StepSnapshot(
        step=step,
        now=now,
        running=running,
        waiting=waiting,
        free_blocks=free,
        total_blocks=usable,
        gpu_cached_blocks=cached,
        num_pinned=len(pinned),
        pinned_blocks=[num_pinned for _, num_pinned in pinned],
        pinned_job_ids=[job_id for job_id, _ in pinned],
        tiers=of_tiers,
    )


def hit_line(step: int, hit: Hit) -> PrefixCacheEvent:
    choice = hit.choice
    return PrefixCacheEvent(
        step=step,
        req_id=hit.request_id,
        job_id=hit.job_id,
        local_hit_tokens=hit.num_hit_tokens - hit.num_loaded_tokens,
        external_hit_tokens=hit.num_loaded_tokens,
        total_prompt_tokens=hit.num_prompt_tokens,
        num_tokens=hit.num_tokens,
        connector_name="+".join(choice.found.pages),
        load_choice=choice.kind,
        load_kv_async=choice.kind in ("load", "split"),
        load_seconds=float(f"{choice.load_seconds:.3g}"),
        compute_seconds=float(f"{choice.compute_seconds:.3g}"),
    )


def tick_line(now: float, reasons: list[Decision], hashes: Hashes) -> Tick:
    return Tick(now=now, reasons=reasons_of(reasons), hashes=hashes)


def step_line(
    now: float, diff: SchedulerOutput, priorities: list[int], reasons: list[Decision], hashes: Hashes
) -> StepDecision:
    """Convert a diff and decisions of the Scheduler."""
    return decision_line(now, diff, priorities, reasons_of(reasons) if reasons else [], hashes)


def decision_line(
    now: float, diff: SchedulerOutput, priorities: list[int], reasons: list[Reason], hashes: Hashes
) -> StepDecision:
    """``priorities``: those of ``diff.new_requests``."""
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
        block_ids=_to_list(diff.block_ids) or [],
        appended=appended(diff),
        counts=diff.counts,
        drafts=diff.drafts,
        copies=diff.block_copies,
        forks=diff.forks,
        chosen=[handle for handle, _ in diff.chosen],
        awaits_sample_inputs=diff.awaits_sample_inputs,
        state_slots=_to_list(diff.state_slots) or [],
        state_copies=diff.state_copies,
        reasons=reasons,
        hashes=hashes,
    )


def reasons_of(decisions: list[Decision]) -> list[Reason]:
    return [Reason(d.kind, d.request_id, d.reason, d.beneficiary, d.num_blocks) for d in decisions]


def appended(diff: SchedulerOutput) -> list[int]:
    """Return handle, group, block id, handle, ... of the blocks that ``diff`` appends to existing rows."""
    if diff.appended_handles is None or diff.appended_block_ids is None:
        return []
    flat = [0] * (3 * len(diff.appended_handles))
    flat[0::3] = diff.appended_handles.tolist()
    flat[2::3] = diff.appended_block_ids.tolist()
    if diff.appended_groups is not None:
        flat[1::3] = diff.appended_groups.tolist()
    return flat


def _to_list(array: Int32 | None) -> list[int] | None:
    if array is None:
        return None
    result: list[int] = array.tolist()
    return result
