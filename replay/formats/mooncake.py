"""Mooncake's request traces: times, lengths, and chained ids of 512-token blocks, including the last partial one."""

from __future__ import annotations

from array import array
from pathlib import Path

import msgspec

from quire.replay.formats.options import LoadOptions
from quire.replay.formats.read import AnswerLength, Faults, PromptLength, Seconds, files_of, finish, records
from quire.replay.workload.workload import Call, ContentIds, Workload

UNIT = 512


class _Line(msgspec.Struct):
    """A request; ``timestamp`` is milliseconds, and an id identifies a block and all blocks before it."""

    timestamp: Seconds
    input_length: PromptLength
    output_length: AnswerLength
    hash_ids: list[int]


def load(path: Path, options: LoadOptions) -> Workload:
    """Load a trace. Several files of a folder run concurrently, each with its own id space.

    Raises:
        ConfigError: a bad line, or decreasing times within a file (lenient: they are sorted).
    """
    faults = Faults(options.lenient)
    workload = Workload("mooncake", str(path), [])
    for space, file in enumerate(files_of(path)):
        last = 0.0
        for number, line in records(file, _Line, faults):
            ids = _ids(line, file, number, faults)
            if ids is None:
                continue
            if line.timestamp < last:
                what = f"timestamp {line.timestamp:g} is less than {last:g} in the line before"
                faults.add_earlier(file, number, what)
            last = max(last, line.timestamp)
            workload.calls.append(
                Call(
                    len(workload.calls),
                    f"{space}-{number}",
                    line.timestamp / 1e3,
                    line.input_length,
                    faults.at_least_one_token(line.output_length),
                    ContentIds(ids, UNIT, space),
                )
            )
    return finish(workload, options, faults)


def _ids(line: _Line, file: Path, number: int, faults: Faults) -> array[int] | None:
    expected = -(-line.input_length // UNIT)
    if len(line.hash_ids) != expected:
        what = f"`hash_ids` has {len(line.hash_ids)} entries; {line.input_length} tokens need {expected}"
        faults.add(file, number, what)
        return None
    try:
        return array("Q", line.hash_ids)
    except OverflowError:
        faults.add(file, number, "`hash_ids` must be between 0 and 2**64 - 1")
        return None
