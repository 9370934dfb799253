"""Where two decisions differ, down to the number."""

from collections.abc import Callable
from typing import Any

import msgspec

from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.scheduler_proc.trace.lines import AnyLine, NewRow, Reason, StepDecision

NOTHING = "nothing"
ALTERED = "another: the line was changed after it was written"


class Difference(msgspec.Struct, frozen=True):
    """The first thing that was not as recorded.

    Attributes:
        line: its number in ``file``, from 1.
        step: that the line is of, or else the last one decided before it.
        field: of the line, such as ``counts[2]``; ``crc`` where the line is not the one that was written.
        req_id: empty where it is about nobody.
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
        whose = f" of {self.req_id!r}" if self.req_id else ""
        field = f", {self.field}" if self.field else ""
        return f"{where}: {self.kind} (step {self.step}){field}{whose}: recorded {self.recorded}, now {self.decided}"


class Differs(Exception):
    """A field is not as recorded."""

    def __init__(self, field: str, recorded: Any, decided: Any, req_id: str = "") -> None:
        super().__init__(field)
        self.field = field
        self.recorded = msgspec.to_builtins(recorded)
        self.decided = msgspec.to_builtins(decided)
        self.req_id = req_id


def kind_of(line: AnyLine) -> str:
    return str(line.__struct_config__.tag)


def id_in(line: AnyLine) -> str:
    """Whom the line is about; empty where it is about nobody, or many."""
    told = msgspec.structs.asdict(line)
    event = told.get("event")
    return str(told.get("req_id") or (msgspec.structs.asdict(event).get("request_id", "") if event else ""))


def compare(field: str, recorded: Any, decided: Any, req_id: str = "") -> None:
    """Raises Differs, at the first part of a list or struct that is not equal."""
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
    """Raises Differs, naming the request. ``name_of``: the request id of a handle, or nothing."""
    if recorded == decided:
        return
    for field in StepDecision.__struct_fields__:
        ours, theirs = getattr(decided, field), getattr(recorded, field)
        if ours != theirs:
            compare(field, theirs, ours, _whose(field, theirs, ours, recorded, name_of) if ours != theirs else "")


def is_quiet(diff: SchedulerOutput) -> bool:
    """It says only that there is a step: then it is compared without being made a line."""
    return not (
        diff.appended_handles is not None
        or diff.new_requests
        or diff.removed
        or diff.parked
        or diff.unparked
        or diff.counts
        or diff.drafts
        or diff.awaits_sample_inputs
    )


def is_quiet_line(line: StepDecision) -> bool:
    return not (
        line.appended
        or line.new
        or line.block_ids
        or line.removed
        or line.parked
        or line.unparked
        or line.counts
        or line.drafts
        or line.awaits_sample_inputs
        or line.reasons
    )


def first_index(recorded: list[Any], decided: list[Any]) -> int:
    """Of the first element that is not equal, or that only one of the two has."""
    pairs = enumerate(zip(recorded, decided, strict=False))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(recorded), len(decided)))


def _at(listed: list[Any], at: int) -> Any:
    return listed[at] if at < len(listed) else NOTHING


def _whose(field: str, recorded: Any, decided: Any, decision: StepDecision, name_of: Callable[[int], str]) -> str:
    """The request that the first difference in ``field`` is about."""
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
    """Whose block the one with this index is."""
    for row in rows:
        at -= sum(row.num_blocks)
        if at < 0:
            return row.req_id
    return ""
