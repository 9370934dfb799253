"""What every trace becomes: calls with lengths, times and named contents. No scheduler in sight."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SHORT_HASH_BYTES = 16
_NAME = np.dtype([("space", "<u4"), ("offset", "<u4"), ("id", "<u8")])
_OWN_PROMPT, _OWN_ANSWER = 2**32 - 2, 2**32 - 1
"""Spaces of contents that nobody shares: ``id`` is the call's number then."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a prompt consists of, as far as the trace tells.

    ``ids[i]`` names tokens ``[i * unit, (i + 1) * unit)`` *and everything before them*; tokens behind the last id are
    nobody else's. Equal ids mean equal prefixes within one ``space`` (below 2**32 - 2). The last id may stand for a
    part of a unit.
    """

    ids: Sequence[int]
    unit: int
    space: int = 0


@dataclass(slots=True, eq=False)
class Call:
    """One request of a workload.

    Attributes:
        number: its place in the workload, from 0; also its place in order of arrival.
        arrival: seconds from the workload's start, in an open loop.
        num_output_tokens: how long its answer is, at least 1: forced.
        after: number of the call that must have ended first, in a closed loop; None: it comes at its own time.
        pause: seconds from that end to this call's arrival: a tool that ran, or a person who thought.
        conversation: groups calls; empty where the trace has none.
        tokens, text: of the prompt, where the trace has them.
        answer: content of prompt and answer together, where the trace tells it (of the next turn, say).
    """

    number: int
    request_id: str
    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    content: Content | None = None
    conversation: str = ""
    after: int | None = None
    pause: float = 0.0
    priority: int = 0
    is_last_step: bool = True
    tokens: Sequence[int] | None = None
    text: str | None = None
    answer: Content | None = None


@dataclass(slots=True)
class Workload:
    """Calls in order of arrival, and what the trace says of the engine that they were made for.

    Attributes:
        format: name of the format, as ``--format`` has it.
        source: file or folder.
        settings: keys as ``--set`` has them, to run by where the user says nothing else.
        notes: what was decided for the user: clipped, left out, invented. Shown with every result.
    """

    format: str
    source: str
    calls: list[Call]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def block_names(call: Call, block_size: int, *, reuse_answers: bool = False) -> bytes:
    """Names of all full blocks of ``call``'s prompt and answer, joined, ``SHORT_HASH_BYTES`` each.

    A block is named by the id that covers its last token, and the offset of that token in the id's unit: ids name all
    that comes before, so this is exact for smaller and for larger blocks. Blocks with a token of the answer are the
    call's own, unless ``reuse_answers`` and the trace tells what the answer became (``Call.answer``).
    """
    total = call.num_prompt_tokens + call.num_output_tokens
    names = np.zeros(total // block_size, _NAME)
    last = np.arange(block_size - 1, len(names) * block_size, block_size)
    names["id"], names["offset"] = call.number, np.arange(len(names))
    names["space"] = np.where(last < call.num_prompt_tokens, _OWN_PROMPT, _OWN_ANSWER)
    told = [(call.content, call.num_prompt_tokens)]
    if reuse_answers:
        told.insert(0, (call.answer, total))
    for content, end in told:  # the prompt's own ids last: they win
        if content is not None and len(content.ids):
            index = last // content.unit
            known = (last < end) & (index < len(content.ids))
            names["id"][known] = np.asarray(content.ids, np.uint64)[index[known]]
            names["offset"][known] = last[known] % content.unit
            names["space"][known] = content.space
    return names.tobytes()
