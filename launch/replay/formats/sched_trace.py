"""Scheduler traces of three record kinds: step_snapshot, prefix_cache_event and step_decision.

They show steps, not requests: what each request was is told from what was done for it. The key that names the kind,
and that of the time, differ between writers.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from quire.launch.replay.formats.options import LoadOptions
from quire.launch.replay.formats.read import MAX_TOKENS, Faults, files_of, finish, records
from quire.launch.replay.workload.workload import Call, Content, Workload

KINDS = {
    "step_snapshot": "free_blocks",
    "prefix_cache_event": "local_hit_tokens",
    "step_decision": "num_scheduled_tokens",
}
"""Each kind with a field that only it has."""
KIND_KEYS = ("event", "kind", "type", "record", "record_type", "event_type", "name")
_TIME_KEYS = ("ts", "time", "timestamp", "now", "t", "wall_time", "monotonic")
_UNITS = {"": 1.0, "_s": 1.0, "_ms": 1e-3, "_us": 1e-6, "_ns": 1e-9}
_STEP_SECONDS = 0.02
_MIN_BLOCK, _MAX_BLOCK = 4, 1024


def kind_of(record: Mapping[str, Any]) -> str:
    """Empty where it is none of the three."""
    for key in KIND_KEYS:
        kind = record.get(key)
        if isinstance(kind, str) and kind in KINDS:
            return kind
    return next((kind for kind, mark in KINDS.items() if mark in record and "step" in record), "")


def time_of(record: Mapping[str, Any]) -> float | None:
    """Seconds. A bare number that would be a date long past or to come is read as milli-, micro- or nanoseconds."""
    for key in _TIME_KEYS:
        for unit, scale in _UNITS.items():
            value = record.get(key + unit)
            if isinstance(value, int | float) and not isinstance(value, bool):
                if not unit and value > 1e11:
                    scale = 1e-3 if value < 1e14 else 1e-6 if value < 1e17 else 1e-9
                return float(value) * scale
    return None


@dataclass
class _Seen:
    """One request, as far as it has been seen.

    Attributes:
        num_computed: tokens whose KV it has; ``num_known``: its prompt and the answer so far.
        last: when it was last in a step.
        num_hit_tokens: when it was first let in.
        looked_at: the step of its last prefix_cache_event.
    """

    arrival: float
    job_id: str = ""
    num_prompt_tokens: int = 0
    num_known: int = 0
    num_computed: int = 0
    last: float = 0.0
    num_hit_tokens: int = 0
    has_run: bool = False
    looked_at: Any = None


@dataclass
class _Reader:
    """Follows the records in order, and gathers requests by id in order of their first appearance."""

    requests: dict[str, _Seen] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    hits: list[int] = field(default_factory=list)
    last_scheduled: set[str] = field(default_factory=set)
    num_other: int = 0
    num_drafted: int = 0
    untimed: int = 0

    def take(self, record: Mapping[str, Any]) -> None:
        """Raises: ValueError: a field is missing or wrong; the text names it."""
        kind = kind_of(record)
        if not kind:
            self.num_other += 1
            return
        body = record.get("data")
        if isinstance(body, dict):
            record = {**record, **body}
        now = self._time(record)
        if kind == "step_snapshot":
            self._snapshot(record, now)
        elif kind == "prefix_cache_event":
            self._prefix_cache(record, now)
        else:
            self._decision(record, now)

    def _time(self, record: Mapping[str, Any]) -> float:
        now = time_of(record)
        if now is None:
            self.untimed += 1
            return _count(record, "step") * _STEP_SECONDS
        if not 0 <= now < 1e15:
            raise ValueError(f"its time cannot be {now}")
        return now

    def _snapshot(self, record: Mapping[str, Any], now: float) -> None:
        """Queues may be given by number, or by the ids of those in them."""
        for key, setting in (
            ("max_num_running_reqs", "max_num_seqs"),
            ("max_num_scheduled_tokens", "max_num_batched_tokens"),
        ):
            if record.get(key) is not None:
                self.settings[setting] = _count(record, key)
        if record.get("total_blocks") is not None:
            self.settings["num_usable_blocks"] = _count(record, "total_blocks") - 1  # block 0 is the null block
        for queue in ("running", "waiting"):
            listed = record.get(queue)
            for each in listed if isinstance(listed, list) else []:
                name = each.get("req_id", each.get("request_id")) if isinstance(each, dict) else each
                if isinstance(name, str):
                    self._see(name, now)

    def _prefix_cache(self, record: Mapping[str, Any], now: float) -> None:
        """Comes whenever a waiting request is looked at: when it is let in, and whenever there was no room."""
        prompt, known = _count(record, "total_prompt_tokens", 1), _count(record, "num_tokens", 1)
        hit = _count(record, "local_hit_tokens")
        computed = hit + (_count(record, "external_hit_tokens") if record.get("external_hit_tokens") else 0)
        if known < prompt or computed > known:
            raise ValueError(f"`num_tokens` {known} does not fit the prompt's {prompt} and the {computed} found")
        seen = self._see(_name(record.get("req_id"), "req_id"), now)
        job_id = record.get("job_id")
        if job_id is not None:
            seen.job_id = str(job_id)
        seen.num_prompt_tokens, seen.num_known, seen.num_computed = prompt, known, computed
        seen.looked_at = record.get("step")
        if not seen.has_run:
            seen.num_hit_tokens = computed
        if hit:
            self.hits.append(hit)

    def _decision(self, record: Mapping[str, Any], now: float) -> None:
        counts = record.get("num_scheduled_tokens")
        if not isinstance(counts, dict):
            raise ValueError("`num_scheduled_tokens` must be an object of request ids and numbers")
        numbers = {name: _count(counts, name) for name in counts}
        for name in record.get("preempted_req_ids") or ():
            seen = self._see(_name(name, "preempted_req_ids"), now)
            if seen.looked_at != record.get("step"):  # else it was let in again in this very step
                seen.num_computed = 0
        for name, count in numbers.items():
            seen = self._see(name, now)
            seen.last, seen.has_run = now, True
            self.num_drafted += count > 1 and seen.num_computed + 1 == seen.num_known
            seen.num_computed += count
            if seen.num_prompt_tokens and seen.num_computed >= seen.num_known:
                seen.num_known = seen.num_computed + 1
        if numbers:
            self.last_scheduled = set(numbers)

    def _see(self, name: str, now: float) -> _Seen:
        return self.requests.setdefault(name, _Seen(now, last=now))


def load(path: Path, options: LoadOptions) -> Workload:
    """Requests come when they first appear; answers are as long as they were seen to grow.

    Raises:
        ConfigError: a line is bad, or no request can be told from the records.
    """
    faults = Faults(options.lenient)
    reader = _Reader()
    for file in files_of(path):
        for number, record in records(file, dict[str, Any], faults):
            try:
                reader.take(record)
            except ValueError as error:
                faults.add(file, number, str(error))
    whole = {name: seen for name, seen in reader.requests.items() if seen.num_prompt_tokens and seen.has_run}
    first = min((seen.arrival for seen in whole.values()), default=0.0)
    calls = _calls(whole, first, _infer_block_size(reader))
    workload = Workload("sched-trace", str(path), calls, reader.settings, _notes(reader, whole))
    return finish(workload, options, faults)


def _infer_block_size(reader: _Reader) -> int:
    """Hits are whole blocks, so their greatest common divisor is the block size, or a multiple of it."""
    divisor = reduce(math.gcd, reader.hits, 0)
    if len(set(reader.hits)) > 1 and _MIN_BLOCK <= divisor <= _MAX_BLOCK and divisor & (divisor - 1) == 0:
        reader.settings["block_size"] = divisor
        return divisor
    return 16


def _calls(whole: dict[str, _Seen], first: float, unit: int) -> list[Call]:
    """A request shares with the one before it in its job what it had found in the cache, and nothing else."""
    calls: list[Call] = []
    before: dict[str, Call] = {}
    fresh = 0
    for number, (name, seen) in enumerate(sorted(whole.items(), key=lambda item: item[1].arrival)):
        output = max(1, seen.num_known - seen.num_prompt_tokens)
        call = Call(number, name, seen.arrival - first, seen.num_prompt_tokens, output, conversation=seen.job_id)
        previous = before.get(seen.job_id) if seen.job_id else None
        ids = array("Q")
        if previous is not None:
            call.after, previous.is_last_step = previous.number, False
            call.pause = max(0.0, seen.arrival - whole[previous.request_id].last)
            assert previous.answer is not None
            ids = array("Q", previous.answer.ids[: seen.num_hit_tokens // unit])
        missing = (seen.num_prompt_tokens + output) // unit - len(ids)
        ids.extend(range(fresh, fresh + missing))
        fresh += max(0, missing)
        call.answer = Content(ids, unit)
        call.content = Content(ids[: seen.num_prompt_tokens // unit], unit)
        if seen.job_id:
            before[seen.job_id] = call
        calls.append(call)
    return calls


def _notes(reader: _Reader, whole: dict[str, _Seen]) -> list[str]:
    hits = sum(seen.num_hit_tokens for seen in whole.values())
    prompts = sum(seen.num_prompt_tokens for seen in whole.values())
    notes = [
        "requests come when they first appear in the trace, which may be when they were first let in",
        f"{hits} of {prompts} prompt tokens were found in the cache then; prompts share as much as that with the one "
        "before in their job, and nothing with others: the trace does not tell contents",
    ]
    if "block_size" in reader.settings:
        notes.append(f"block_size {reader.settings['block_size']} is the greatest common divisor of the hits")
    if reader.untimed:
        notes.append(f"{reader.untimed} records have no time: a step is taken as {_STEP_SECONDS * 1e3:g} ms")
    partial = len(reader.requests) - len(whole)
    if partial:
        notes.append(f"{partial} requests are left out: the trace does not have their beginning, or they never ran")
    still = sum(name in whole for name in reader.last_scheduled)
    if still:
        notes.append(f"{still} requests ran in the last step: their answers may have been longer")
    if reader.num_drafted:
        notes.append(
            f"{reader.num_drafted} times a request computed drafts: all are counted as accepted, so answers may be too "
            "long"
        )
    if reader.num_other:
        notes.append(f"{reader.num_other} records are of no known kind")
    return notes


def _count(record: Mapping[str, Any], key: str, least: int = 0) -> int:
    value = record.get(key)
    if value is None:
        raise ValueError(f"`{key}` is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_TOKENS:
        raise ValueError(f"`{key}` must be a whole number from {least} to {MAX_TOKENS}, not {str(value)[:40]}")
    return value


def _name(value: Any, key: str) -> str:
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ValueError(f"`{key}` must be a request's id")
    return str(value)
