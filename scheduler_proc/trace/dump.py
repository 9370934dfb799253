"""Writes the event log as a trace file when the engine has failed or on SIGUSR2."""

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from quire.protocol.process.log import event_logger
from quire.protocol.wire.codec import Codec
from quire.protocol.wire.front_end_messages import AddRequest, Control
from quire.protocol.wire.worker_messages import ModelRunnerOutput, SchedulerOutput
from quire.scheduler_proc.requests.events import Consumed
from quire.scheduler_proc.trace.event_log import Record, RecordKind, TraceHeader
from quire.scheduler_proc.trace.files import open_private
from quire.scheduler_proc.trace.lines import ClientDropped, End, Line, Tick, WorkerEpoch, encode_line
from quire.scheduler_proc.trace.recorder import begins_at_keyframe, lines_of_log
from quire.scheduler_proc.trace.translate import (
    arrival_line,
    decision_line,
    event_line,
    lengths_of,
    make_header,
    result_line,
)

log = event_logger("scheduler.trace")

MAX_NAMES = 100


class Dump(msgspec.Struct, frozen=True):
    """The content of a dump: the newest ``records`` of an engine. ``complete``: whether they can be replayed."""

    header: TraceHeader
    records: list[Record]
    complete: bool
    now: float
    reason: str


def write_dump(folder: Path, number: int, dump: Dump) -> Path | None:
    """Write a new file in ``folder``, which is created if needed. Returns None, after logging, when that fails.

    Never raises, because the caller is handling another failure.
    """
    path = folder / f"quire-dump-{os.getpid()}-{number}.jsonl"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = _free_name(path)
        with open_private(path, new=True) as file:
            for line in _lines(dump):
                file.write(encode_line(line) + b"\n")
    except OSError as error:
        log.error("cannot write the event dump", path=path, reason=error.strerror)
        return None
    log.error("wrote the event dump", path=path)
    return path


def _free_name(path: Path) -> Path:
    """Return a path that does not exist, not even as a link, or ``path`` after MAX_NAMES attempts.

    An earlier process may have used the same numbers, and another user may have prepared a link at a predictable name.
    """
    names = (path, *(path.with_stem(f"{path.stem}-{again}") for again in range(1, MAX_NAMES)))
    return next((name for name in names if not os.path.lexists(name)), path)


def _lines(dump: Dump) -> Iterator[Line]:
    """Yield all lines. When replaying the records fails, the trace ends there, with the error in its End line."""
    begin = dump.records[0].now if dump.records else dump.now
    complete = dump.complete and not begins_at_keyframe(dump.records)
    yield make_header(dump.header, begin, time.time() - (dump.now - begin), complete=complete)
    reason = dump.reason
    try:
        yield from lines_of_log(dump.header, dump.records) if dump.complete else lines_of_frames(dump.records)
    except Exception as error:  # possibly the bug that the dump is written for
        log.exception("event dump cannot be replayed")
        reason = f"{reason}; its replay failed with {type(error).__name__}: {error}"
    yield End(now=dump.now, reason=reason)


def lines_of_frames(records: Iterable[Record]) -> Iterator[Line]:
    """Yield lines from the records alone, without a Scheduler: no hashes, endings, cache hits or reasons."""
    consumed: Codec[Any] = Codec(Consumed)
    produced: Codec[Any] = Codec(SchedulerOutput)
    for record in records:
        match RecordKind(record.kind):
            case RecordKind.CONSUMED:
                yield from _event(record, consumed.decode(record.frames).message)
            case RecordKind.PRODUCED:
                diff = produced.decode(record.frames).message
                yield decision_line(record.now, diff, [0] * len(diff.new_requests), [], [])
            case RecordKind.TICK:
                yield Tick(now=record.now)
            case RecordKind.CLIENT_DROPPED:
                yield ClientDropped(now=record.now, client=record.client)
            case RecordKind.WORKER_EPOCH | RecordKind.NEW_WORKERS as kind:
                yield WorkerEpoch(now=record.now, new_workers=kind is RecordKind.NEW_WORKERS)
            case RecordKind.BUDGET_HALVED | RecordKind.KEYFRAME:
                pass


def _event(record: Record, event: Any) -> Iterator[Line]:
    match event:
        case AddRequest():
            yield arrival_line(record.now, record.client, event, lengths_of(event), [], False, [])
        case ModelRunnerOutput():
            yield result_line(record.now, event, [], [], [])
        case Control(kind="statistics" | "requests"):
            pass
        case _:
            yield event_line(record.now, record.client, event, [])
