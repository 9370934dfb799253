"""Scheduler traces of three record kinds: step_snapshot, prefix_cache_event and step_decision.

The records describe steps, not requests: requests are inferred from the decisions about them. The keys for the kind and
the time differ between writers.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from quire.replay.formats.options import LoadOptions
from quire.replay.formats.read import MAX_TOKENS, Faults, files_of, finish, records
from quire.replay.workload.workload import Call, ContentIds, Workload

KINDS = {
    "step_snapshot": "free_blocks",
    "prefix_cache_event": "local_hit_tokens",
    "step_decision": "num_scheduled_tokens",
}
"""The record kinds, each with a field that no other kind has."""
KIND_KEYS = ("event", "kind", "type", "record", "record_type", "event_type", "name")
_TIME_KEYS = ("ts", "time", "timestamp", "now", "t", "wall_time", "monotonic")
_UNITS = {"": 1.0, "_s": 1.0, "_ms": 1e-3, "_us": 1e-6, "_ns": 1e-9}
_STEP_SECONDS = 0.02
_MIN_BLOCK, _MAX_BLOCK = 4, 1024


def kind_of(record: Mapping[str, Any]) -> str:
    """Return the kind of a record, or "" for none of the three."""
    for key in KIND_KEYS:
        kind = record.get(key)
        if isinstance(kind, str) and kind in KINDS:
            return kind
    return next((kind for kind, mark in KINDS.items() if mark in record and "step" in record), "")


def time_of(record: Mapping[str, Any]) -> float | None:
    """Return the time in seconds, or None. Numbers too large for seconds are milli-, micro- or nanoseconds."""
    for key in _TIME_KEYS:
        for unit, scale in _UNITS.items():
            value = record.get(key + unit)
            if isinstance(value, int | float) and not isinstance(value, bool):
                if not unit and value > 1e11:
                    scale = 1e-3 if value < 1e14 else 1e-6 if value < 1e17 else 1e-9
                return float(value) * scale
    return None


@dataclass
class _SeenRequest:
    """The state of one request, as inferred from the records so far.

    Attributes:
        num_known: prompt and output tokens so far.
        num_computed: tokens whose KV is computed.
        last: time of the last step that scheduled it.
        num_hit_tokens: hits at its first admission.
        lookup_step: the step of its last prefix_cache_event.
    """

    arrival: float
    job_id: str = ""
    num_prompt_tokens: int = 0
    num_known: int = 0
    num_computed: int = 0
    last: float = 0.0
    num_hit_tokens: int = 0
    has_run: bool = False
    lookup_step: Any = None


@dataclass
class _Reader:
    """Processes the records in order and collects requests by id, in order of their first appearance."""

    requests: dict[str, _SeenRequest] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    hits: list[int] = field(default_factory=list)
    last_scheduled: set[str] = field(default_factory=set)
    num_other: int = 0
    num_drafted: int = 0
    untimed: int = 0

    def take(self, record: Mapping[str, Any]) -> None:
        """Process one record. Raises ValueError, which names the field, if one is missing or invalid."""
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
            raise ValueError(f"the time must be between 0 and 1e15 (got {now})")
        return now

    def _snapshot(self, record: Mapping[str, Any], now: float) -> None:
        """Process a snapshot. Queues may be numbers, or lists of request ids."""
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
                    self._request(name, now)

    def _prefix_cache(self, record: Mapping[str, Any], now: float) -> None:
        """Process a prefix cache lookup. Each attempt to admit a waiting request has one, successful or not."""
        prompt, known = _count(record, "total_prompt_tokens", 1), _count(record, "num_tokens", 1)
        hit = _count(record, "local_hit_tokens")
        computed = hit + (_count(record, "external_hit_tokens") if record.get("external_hit_tokens") else 0)
        if known < prompt:
            raise ValueError(f"`num_tokens` is {known}, less than the {prompt} prompt tokens")
        if computed > known:
            raise ValueError(f"`num_tokens` is {known}, less than the {computed} tokens found in caches")
        seen = self._request(_name(record.get("req_id"), "req_id"), now)
        job_id = record.get("job_id")
        if job_id is not None:
            seen.job_id = str(job_id)
        seen.num_prompt_tokens, seen.num_known, seen.num_computed = prompt, known, computed
        seen.lookup_step = record.get("step")
        if not seen.has_run:
            seen.num_hit_tokens = computed
        if hit:
            self.hits.append(hit)

    def _decision(self, record: Mapping[str, Any], now: float) -> None:
        counts = record.get("num_scheduled_tokens")
        if not isinstance(counts, dict):
            kind = type(counts).__name__
            raise ValueError(f"`num_scheduled_tokens` must be an object of numbers by request id (got {kind})")
        numbers = {name: _count(counts, name) for name in counts}
        for name in record.get("preempted_req_ids") or ():
            seen = self._request(_name(name, "preempted_req_ids"), now)
            if seen.lookup_step != record.get("step"):  # else it was admitted again in the same step
                seen.num_computed = 0
        for name, count in numbers.items():
            seen = self._request(name, now)
            seen.last, seen.has_run = now, True
            self.num_drafted += count > 1 and seen.num_computed + 1 == seen.num_known
            seen.num_computed += count
            if seen.num_prompt_tokens and seen.num_computed >= seen.num_known:
                seen.num_known = seen.num_computed + 1
        if numbers:
            self.last_scheduled = set(numbers)

    def _request(self, name: str, now: float) -> _SeenRequest:
        return self.requests.setdefault(name, _SeenRequest(now, last=now))


def load(path: Path, options: LoadOptions) -> Workload:
    """Load a trace. Requests arrive at their first appearance; output lengths are the decodes seen.

    Raises:
        ConfigError: a bad line, or no complete request.
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
    """Infer the block size as the greatest common divisor of the hits, which are whole blocks."""
    divisor = reduce(math.gcd, reader.hits, 0)
    if len(set(reader.hits)) > 1 and _MIN_BLOCK <= divisor <= _MAX_BLOCK and divisor & (divisor - 1) == 0:
        reader.settings["block_size"] = divisor
        return divisor
    return 16


def _calls(whole: dict[str, _SeenRequest], first: float, unit: int) -> list[Call]:
    """Make the calls. A request shares only its hit tokens, and only with the previous one of its job."""
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
        call.answer = ContentIds(ids, unit)
        call.content = ContentIds(ids[: seen.num_prompt_tokens // unit], unit)
        if seen.job_id:
            before[seen.job_id] = call
        calls.append(call)
    return calls


def _notes(reader: _Reader, whole: dict[str, _SeenRequest]) -> list[str]:
    hits = sum(seen.num_hit_tokens for seen in whole.values())
    prompts = sum(seen.num_prompt_tokens for seen in whole.values())
    notes = [
        "requests arrive at their first appearance in the trace, which may be their first admission",
        f"{hits} of {prompts} prompt tokens hit the prefix cache then; prompts share that many tokens with the "
        "previous one in their job and none with others, because the trace has no contents",
    ]
    if "block_size" in reader.settings:
        notes.append(f"block_size {reader.settings['block_size']} is the greatest common divisor of the hits")
    if reader.untimed:
        notes.append(f"{reader.untimed} records have no time: a step is assumed to take {_STEP_SECONDS * 1e3:g} ms")
    partial = len(reader.requests) - len(whole)
    if partial:
        notes.append(f"{partial} requests are skipped: the trace lacks their beginning, or they never ran")
    still = sum(name in whole for name in reader.last_scheduled)
    if still:
        notes.append(f"{still} requests were running in the last step: their outputs may have been longer")
    if reader.num_drafted:
        notes.append(
            f"{reader.num_drafted} times a request computed draft tokens: all count as accepted, so outputs may be too "
            "long"
        )
    if reader.num_other:
        notes.append(f"{reader.num_other} records of unknown kinds are ignored")
    return notes


def _count(record: Mapping[str, Any], key: str, least: int = 0) -> int:
    value = record.get(key)
    if value is None:
        raise ValueError(f"`{key}` is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_TOKENS:
        raise ValueError(f"`{key}` must be a whole number from {least} to {MAX_TOKENS} (got {str(value)[:40]})")
    return value


def _name(value: Any, key: str) -> str:
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ValueError(f"`{key}` must be a request id")
    return str(value)
