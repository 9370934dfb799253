"""Locates the first difference between two decisions, down to the list index."""

from collections.abc import Callable
from typing import Any

import msgspec

from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.scheduler_proc.trace.lines import AnyLine, NewRow, Reason, StepDecision

NOTHING = "nothing"
ALTERED = "a different checksum: the line was altered after it was written"


class Difference(msgspec.Struct, frozen=True):
    """The first difference between a trace and its replay.

    Attributes:
        line: line number in ``file``, from 1.
        step: the line's step, or the last step decided before it.
        field: the line's field, such as ``counts[2]``; ``crc`` if the line was altered after it was written.
        recorded, decided: the values of the field in the trace and in the replay.
        req_id: the request concerned; empty if none.
    """

    line: int
    step: int
    kind: str
    field: str
    recorded: Any
    decided: Any
    req_id: str = ""
    file: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file else f"line {self.line}"
        request = f" of {self.req_id!r}" if self.req_id else ""
        field = f", {self.field}" if self.field else ""
        return f"{where}: {self.kind} (step {self.step}){field}{request}: recorded {self.recorded}, now {self.decided}"


class Differs(Exception):
    """Raised when a field differs from the recorded one."""

    def __init__(self, field: str, recorded: Any, decided: Any, req_id: str = "") -> None:
        super().__init__(field)
        self.field = field
        self.recorded = msgspec.to_builtins(recorded)
        self.decided = msgspec.to_builtins(decided)
        self.req_id = req_id


def kind_of(line: AnyLine) -> str:
    return str(line.__struct_config__.tag)


def id_in(line: AnyLine) -> str:
    """Return the id of the request that the line is about, empty if it is about none or several."""
    fields = msgspec.structs.asdict(line)
    event = fields.get("event")
    return str(fields.get("req_id") or (msgspec.structs.asdict(event).get("request_id", "") if event else ""))


def compare(field: str, recorded: Any, decided: Any, req_id: str = "") -> None:
    """Raise Differs at the first unequal element or field, if any."""
    if recorded == decided:
        return
    if isinstance(recorded, list) and isinstance(decided, list):
        at = first_index(recorded, decided)
        compare(f"{field}[{at}]", _at(recorded, at), _at(decided, at), req_id)
    if isinstance(recorded, msgspec.Struct) and type(recorded) is type(decided):
        for name in recorded.__struct_fields__:
            compare(f"{field}.{name}" if field else name, getattr(recorded, name), getattr(decided, name), req_id)
    raise Differs(field, recorded, decided, req_id)


def compare_decisions(recorded: StepDecision, decided: StepDecision, name_of: Callable[[int], str]) -> None:
    """Raise Differs with the request's id if the decisions differ. ``name_of`` maps a handle to a request id or ""."""
    if recorded == decided:
        return
    for field in StepDecision.__struct_fields__:
        now, before = getattr(decided, field), getattr(recorded, field)
        if now != before:
            compare(field, before, now, _request_of(field, before, now, recorded, name_of) if now != before else "")


def is_quiet(diff: SchedulerOutput) -> bool:
    """Whether the diff contains nothing but its step number: it is then compared without converting it to a line."""
    # Arrays are compared with None, which is no answer: those of new rows come after the list of these rows.
    return diff.appended_handles is None and diff == SchedulerOutput(diff.step)


def is_quiet_line(line: StepDecision) -> bool:
    return line == StepDecision(step=line.step, now=line.now, hashes=line.hashes, crc=line.crc)


def first_index(recorded: list[Any], decided: list[Any]) -> int:
    """Return the index of the first element that differs or exists in only one list."""
    pairs = enumerate(zip(recorded, decided, strict=False))
    return next((at for at, (before, now) in pairs if before != now), min(len(recorded), len(decided)))


def _at(listed: list[Any], at: int) -> Any:
    return listed[at] if at < len(listed) else NOTHING


def _request_of(field: str, recorded: Any, decided: Any, decision: StepDecision, name_of: Callable[[int], str]) -> str:
    """Return the id of the request that the first difference in ``field`` is about."""
    if not isinstance(recorded, list):
        return ""
    at = first_index(recorded, decided)
    if field == "appended":
        at -= at % 3
    if field == "block_ids":
        return _owner(decision.new, at)
    element = _at(recorded, at) if at < len(recorded) else _at(decided, at)
    if isinstance(element, NewRow | Reason):
        return element.req_id
    return name_of(element[0] if isinstance(element, tuple) else element)


def _owner(rows: list[NewRow], at: int) -> str:
    """Return the id of the request that owns the block with this index."""
    for row in rows:
        at -= sum(row.num_blocks)
        if at < 0:
            return row.req_id
    return ""
