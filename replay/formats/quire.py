"""Quire traces as workloads: recorded arrivals, output lengths and block hashes."""

from __future__ import annotations

from array import array
from collections import Counter
from pathlib import Path

import numpy as np

from quire.protocol.errors import ConfigError
from quire.replay.formats.options import LoadOptions
from quire.replay.formats.read import Faults, finish
from quire.replay.recorded.reader import TraceLine, TraceReader
from quire.replay.recorded.recorded_settings import recorded_settings
from quire.replay.recorded.request_outcomes import RequestOutcome, RequestOutcomes
from quire.replay.workload.workload import Call, ContentIds, Workload
from quire.scheduler_proc.trace.lines import Header, Keyframe, Lost

_ID_BYTES = 8


def load(path: Path, options: LoadOptions) -> Workload:
    """Load the first file of a trace, with the other parts beside it, or a folder with one trace.

    Requests that were aborted, failed or unfinished have the output length that they reached.

    Raises:
        ConfigError: an unreadable trace, or missing lines (lenient: they are ignored).
    """
    reader = TraceReader(path, lenient=options.lenient)
    header = reader.header
    outcomes = RequestOutcomes()
    lost = 0
    has_keyframe = False
    for entry in reader:
        if isinstance(entry.line, Lost):
            if not options.lenient:
                raise ConfigError(f"{entry.file}:{entry.number}: {entry.line.lines} lines are missing here")
            lost += entry.line.lines
        if isinstance(entry.line, Keyframe):
            _check_place(entry, header)
            has_keyframe = True
        outcomes.take(entry.line)
    outcomes.close()
    workload = Workload("quire", str(path), [], {**recorded_settings(header), "model": header.config.model})
    workload.notes += [*reader.notes, *_notes(header, outcomes, lost, has_keyframe)]
    faults = Faults(options.lenient)
    last = 0.0
    for number, outcome in enumerate(each for each in outcomes.all if each.ending != "rejected"):
        last = max(last, outcome.arrival.now - header.now)
        workload.calls.append(_call(number, last, outcome, header, faults))
    return finish(workload, options, faults)


def _check_place(entry: TraceLine, header: Header) -> None:
    """Raise ConfigError if a keyframe is not at the beginning of a trace."""
    if header.complete or entry.number != 2:
        raise ConfigError(f"{entry.file}:{entry.number}: unexpected keyframe after the beginning of the trace")


def _call(number: int, arrival: float, outcome: RequestOutcome, header: Header, faults: Faults) -> Call:
    """Make the call of a request; output tokens from before its arrival (a resubmission) are part of the prompt."""
    line, request = outcome.arrival, outcome.arrival.request
    num_prompt_tokens = line.num_prompt_tokens + line.num_output_tokens
    unit = header.kv_layout.block_size
    total = line.num_prompt_tokens + outcome.num_tokens
    ids = _ids(outcome.names, header.hash_bytes)[: total // unit]  # a stop string removes tokens
    return Call(
        number,
        line.req_id,
        arrival,
        num_prompt_tokens,
        0 if request.pooling else faults.at_least_one_token(max(outcome.num_tokens - line.num_output_tokens, 0)),
        ContentIds(ids[: num_prompt_tokens // unit], unit),
        priority=request.priority,
        tokens=request.prompt_token_ids.tolist() if header.prompts and not line.num_output_tokens else None,
        answer=ContentIds(ids, unit) if ids else None,
        adapter="" if request.adapter is None else f"{request.adapter.name} {request.adapter.digest[:8].hex()}",
        pooling=request.pooling,
        items=request.items,
    )


def _ids(names: bytes | bytearray, size: int) -> array[int]:
    """Return hashes of ``size`` bytes as integers; longer hashes are truncated."""
    table = np.frombuffer(names, np.uint8, len(names) // size * size).reshape(-1, size)
    cut = np.zeros((len(table), _ID_BYTES), np.uint8)
    cut[:, : min(size, _ID_BYTES)] = table[:, :_ID_BYTES]
    return array("Q", cut.tobytes())


def _notes(header: Header, outcomes: RequestOutcomes, lost: int, has_keyframe: bool) -> list[str]:
    notes = []
    endings = Counter(outcome.ending for outcome in outcomes.all)
    if early := [f"{count} {ending}" for ending, count in sorted(endings.items()) if ending not in ("", "rejected")]:
        notes.append(f"requests that ended early keep the output length that they reached: {', '.join(early)}")
    if endings["rejected"]:
        notes.append(f"{endings['rejected']} requests that were rejected after their arrival are skipped")
    if resubmitted := sum(outcome.arrival.num_output_tokens > 0 for outcome in outcomes.all):
        notes.append(f"{resubmitted} requests arrived with earlier output: it counts as a part of their prompts")
    if header.config.num_speculative_tokens:
        notes.append(f"recorded with {header.config.num_speculative_tokens} draft tokens per step; simulated without")
    if has_keyframe:
        notes.append("the trace begins in the middle of a run: without the requests of then, and with an empty cache")
    elif not header.complete:
        notes.append("the trace begins in the middle of a run: requests that were running then have too short outputs")
    if lost:
        notes.append(f"{lost} lines are missing: some lengths may be wrong")
    return notes
