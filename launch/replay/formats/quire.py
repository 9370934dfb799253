"""Traces of this engine as workloads: the recorded arrivals, as long answers as they got, contents by their names."""

from __future__ import annotations

from array import array
from collections import Counter
from pathlib import Path

import numpy as np

from quire.launch.replay.formats.options import LoadOptions
from quire.launch.replay.formats.read import Faults, finish
from quire.launch.replay.recorded.reader import TraceLine, TraceReader
from quire.launch.replay.recorded.recorded_settings import recorded_settings
from quire.launch.replay.recorded.request_outcomes import Answer, Answers
from quire.launch.replay.workload.workload import Call, Content, Workload
from quire.protocol.errors import ConfigError
from quire.scheduler_proc.trace.lines import Header, Keyframe, Lost

_ID_BYTES = 8


def load(path: Path, options: LoadOptions) -> Workload:
    """A file, whose further parts are found beside it, or a folder of one trace.

    Answers that were aborted, failed, or had not ended are as long as they got.

    Raises:
        ConfigError: the trace cannot be read, or lines are missing (lenient: it is read as if they had never been).
    """
    reader = TraceReader(path, lenient=options.lenient)
    header = reader.header
    answers = Answers()
    lost = 0
    has_keyframe = False
    for told in reader:
        if isinstance(told.line, Lost):
            if not options.lenient:
                raise ConfigError(f"{told.file}:{told.number}: {told.line.lines} lines are missing here")
            lost += told.line.lines
        if isinstance(told.line, Keyframe):
            _check_place(told, header)
            has_keyframe = True
        answers.take(told.line)
    answers.close()
    workload = Workload("quire", str(path), [], {**recorded_settings(header), "model": header.config.model})
    workload.notes += [*reader.notes, *_notes(header, answers, lost, has_keyframe)]
    faults = Faults(options.lenient)
    last = 0.0
    for number, answer in enumerate(each for each in answers.all if each.ending != "rejected"):
        last = max(last, answer.arrival.now - header.now)
        workload.calls.append(_call(number, last, answer, header, faults))
    return finish(workload, options, faults)


def _check_place(told: TraceLine, header: Header) -> None:
    """Of a keyframe. Raises ConfigError where it does not begin a trace."""
    if header.complete or told.number != 2:
        raise ConfigError(f"{told.file}:{told.number}: a keyframe stands here, which only begins a trace")


def _call(number: int, arrival: float, answer: Answer, header: Header, faults: Faults) -> Call:
    """What its client had got before it arrived, it brings with its prompt."""
    line = answer.arrival
    num_prompt_tokens = line.num_prompt_tokens + line.num_output_tokens
    unit = min(group.block_size for group in header.kv_layout.groups)
    total = line.num_prompt_tokens + answer.num_tokens
    ids = _ids(answer.names, header.hash_bytes)[: total // unit]  # a stop string takes tokens back
    return Call(
        number,
        line.req_id,
        arrival,
        num_prompt_tokens,
        faults.at_least_one_token(max(answer.num_tokens - line.num_output_tokens, 0)),
        Content(ids[: num_prompt_tokens // unit], unit),
        priority=line.priority,
        tokens=line.prompt_token_ids if not line.num_output_tokens else None,
        answer=Content(ids, unit) if ids else None,
    )


def _ids(names: bytes | bytearray, size: int) -> array[int]:
    """Names as numbers; what is longer is cut."""
    table = np.frombuffer(names, np.uint8, len(names) // size * size).reshape(-1, size)
    cut = np.zeros((len(table), _ID_BYTES), np.uint8)
    cut[:, : min(size, _ID_BYTES)] = table[:, :_ID_BYTES]
    return array("Q", cut.tobytes())


def _notes(header: Header, answers: Answers, lost: int, has_keyframe: bool) -> list[str]:
    notes = []
    endings = Counter(answer.ending for answer in answers.all)
    if early := [f"{count} {ending}" for ending, count in sorted(endings.items()) if ending not in ("", "rejected")]:
        notes.append(f"answers that were cut short are as long as they got: {', '.join(early)}")
    if endings["rejected"]:
        notes.append(f"{endings['rejected']} requests that were refused after they had come are left out")
    if resubmitted := sum(answer.arrival.num_output_tokens > 0 for answer in answers.all):
        notes.append(f"{resubmitted} requests came with a part of their answer: it is a part of their prompt here")
    if header.config.num_speculative_tokens:
        notes.append(f"recorded with {header.config.num_speculative_tokens} drafts per step; simulated without")
    if has_keyframe:
        notes.append("the trace begins at an idle moment of a longer run: what was cached then is not there here")
    elif not header.complete:
        notes.append("the trace begins in the middle of a run: lengths of answers that had begun are too short")
    if lost:
        notes.append(f"{lost} lines are missing: some lengths may be wrong")
    return notes
