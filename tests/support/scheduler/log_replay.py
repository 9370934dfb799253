"""Replays an event log, which has the tokens, through a new Scheduler: the reference for the replay of trace lines."""

from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any

import msgspec

from quire.protocol.wire.codec import Codec
from quire.protocol.wire.front_end_messages import StepOutputs
from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.scheduler_proc.requests.events import Consumed
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.event_log import Record, RecordKind, TraceHeader
from quire.scheduler_proc.trace.snapshot import decode_snapshot, take
from quire.scheduler_proc.trace.snapshot_reader import continue_from


class Difference(msgspec.Struct, frozen=True):
    """The first step whose decision differs from the recorded one."""

    record: int
    step: int
    recorded: str
    decided: str


def replay(
    header: TraceHeader, records: Iterable[Record], *, check: bool = False, beside: Scheduler | None = None
) -> Difference | None:
    """Feed a new Scheduler what the recorded one consumed; return None when every decision is the same.

    A keyframe as the first record is the starting state, all of which the Scheduler must then have.

    Args:
        check: call the Scheduler's ``check()`` after every record.
        beside: another Scheduler, which must decide the same, send clients the same and count the same.
    """
    schedulers = [header.make_scheduler(), *([] if beside is None else [beside])]
    consumed: Codec[Any] = Codec(Consumed)
    produced: Codec[Any] = Codec(SchedulerOutput)
    for index, record in enumerate(records):
        sent = []
        for scheduler in schedulers:
            difference = _replay_record(scheduler, record, index, consumed, produced)
            if difference is not None:
                return difference
            sent.append(scheduler.take_messages())
            if check:
                scheduler.check()
        if beside is not None:
            assert told_to_clients(sent[0]) == told_to_clients(sent[1]), "other messages to clients"
            assert counters_of(schedulers[0]) == counters_of(beside), "other counters"
    if beside is not None:
        assert schedulers[0].statistics() == beside.statistics(), "other statistics"
    return None


def plain_scheduler(header: TraceHeader) -> Scheduler:
    """Return a Scheduler without steady decode, which tries to admit waiting requests again in each step.

    With tenants it remembers refusals as well: what prefills get depends on which request was refused.
    """
    scheduler = header.make_scheduler(steady_decode=False)
    if header.config.num_tenants < 2:
        scheduler.planner.admission_obstacle = scheduler.planner.admit  # type: ignore[method-assign]
    return scheduler


def counters_of(scheduler: Scheduler) -> dict[tuple[int, str], tuple[object, ...]]:
    """Return the progress of each live request, and why it waits."""
    return {
        key: (
            request.num_tokens,
            request.num_computed_tokens,
            request.num_acknowledged_tokens,
            request.num_output_placeholders,
            request.num_in_flight,
            request.num_tokens_to_compute,
            request.wait_reason,
        )
        for key, request in scheduler.table.requests.items()
    }


def told_to_clients(messages: list[tuple[int, Any]]) -> str:
    """Describe messages to clients; the order of clients and of new handles has no meaning."""
    steps = sorted(((client, m) for client, m in messages if isinstance(m, StepOutputs)), key=itemgetter(0))
    ordered = [(client, msgspec.structs.replace(m, introduced=sorted(m.introduced, key=repr))) for client, m in steps]
    return repr((ordered, [each for each in messages if not isinstance(each[1], StepOutputs)]))


def _replay_record(
    scheduler: Scheduler, record: Record, index: int, consumed: Codec[Any], produced: Codec[Any]
) -> Difference | None:
    match RecordKind(record.kind):
        case RecordKind.CONSUMED:
            scheduler.consume(consumed.decode(record.frames).message, record.client)
        case RecordKind.CLIENT_DROPPED:
            scheduler.drop_client(record.client)
        case RecordKind.WORKER_EPOCH | RecordKind.NEW_WORKERS as kind:
            scheduler.begin_worker_epoch(new_workers=kind is RecordKind.NEW_WORKERS)
        case RecordKind.BUDGET_HALVED:
            scheduler.halve_token_budget()
        case RecordKind.KEYFRAME if index == 0:
            state = decode_snapshot(record.frames[0])
            continue_from(scheduler, state, record.live)
            if msgspec.msgpack.encode(take(scheduler)[0]) != record.frames[0]:
                return Difference(index, state.step, "a keyframe", "another state")
        case RecordKind.KEYFRAME:
            pass
        case RecordKind.TICK:
            decided = scheduler.schedule(record.now)
            if decided is not None:
                return Difference(index, decided.step, "nothing", describe(decided))
        case RecordKind.PRODUCED:
            recorded = produced.decode(record.frames).message
            decided = scheduler.schedule(record.now)
            told = "nothing" if decided is None else describe(decided)
            if told != describe(recorded):
                return Difference(index, recorded.step, describe(recorded), told)
    return None


def appended_blocks(diff: SchedulerOutput) -> Iterator[tuple[int, int, int]]:
    """Return (handle, group, block id) of each block that was appended to a held request."""
    if diff.appended_handles is not None and diff.appended_block_ids is not None:
        groups = diff.appended_groups
        for i, (handle, block) in enumerate(zip(diff.appended_handles, diff.appended_block_ids, strict=True)):
            yield int(handle), 0 if groups is None else int(groups[i]), int(block)


def describe(diff: SchedulerOutput) -> str:
    """Return the decision without token ids, which an opaque replay does not know."""
    blocks = None if diff.block_ids is None else diff.block_ids.tolist()
    appended = list(appended_blocks(diff))
    new = [(n.handle, n.request_id, n.num_tokens, n.num_computed_tokens, n.num_blocks) for n in diff.new_requests]
    return (
        f"step {diff.step}: removed {diff.removed}, parked {diff.parked}, new {new} with blocks {blocks}, "
        f"unparked {diff.unparked}, appended {appended}, counts {diff.counts}, drafts {diff.drafts}, "
        f"awaits {diff.awaits_sample_inputs}, copies {diff.block_copies}, forks {diff.forks}"
    )
