"""The workload that every trace is converted to: calls with lengths, times and content ids."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.wire.item_messages import InputItem

SHORT_HASH_BYTES = 16
_NAME = np.dtype([("space", "<u4"), ("offset", "<u4"), ("id", "<u8")])
_OWN_PROMPT, _OWN_ANSWER = 2**32 - 2, 2**32 - 1
"""Id spaces of contents that no other call shares; the id is the call's number."""


@dataclass(frozen=True, slots=True)
class ContentIds:
    """The content ids of a prompt, as far as the trace has them.

    ``ids[i]`` identifies tokens ``[i * unit, (i + 1) * unit)`` *and everything before them*: equal ids mean equal
    prefixes within one ``space`` (below 2**32 - 2). The last id may cover a part of a unit. Tokens after the last id
    are shared with no other call.
    """

    ids: Sequence[int]
    unit: int
    space: int = 0


@dataclass(slots=True, eq=False)
class Call:
    """One request of a workload.

    Attributes:
        number: index in the workload, from 0, in order of arrival.
        arrival: seconds from the workload's start, in an open loop.
        num_output_tokens: forced length of the answer, at least 1; 0 of a pooled request.
        after: in a closed loop, the number of the call that must finish first; None: arrives at ``arrival``.
        pause: seconds from that finish to this call's arrival (tool calls, think time).
        conversation: id that groups calls; empty if the trace has none.
        tokens, text: the prompt, if the trace has it.
        adapter: identity of its LoRA adapter, or empty.
        tool: name of the tool that the answer calls, as far as the trace knows it; empty if it calls none.
        answer: content ids of prompt and answer together, if the trace has them (in the next turn's prompt, say).
        agent: the sub-agent of the conversation that sends it, or empty.
        pooling: what its prompt is turned into instead of an answer, or None.
        items: images and given embeddings at positions of its prompt.
    """

    number: int
    request_id: str
    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    content: ContentIds | None = None
    conversation: str = ""
    after: int | None = None
    pause: float = 0.0
    priority: int = 0
    is_last_step: bool = True
    tokens: Sequence[int] | None = None
    text: str | None = None
    answer: ContentIds | None = None
    adapter: str = ""
    agent: str = ""
    tool: str = ""
    pooling: PoolingParams | None = None
    items: Sequence[InputItem] = ()


@dataclass(slots=True)
class Workload:
    """Calls in order of arrival, and the recorded settings of the engine that served them.

    Attributes:
        format: the ``--format`` name.
        source: file or folder.
        settings: recorded values by ``--set`` key; the user's settings override them.
        notes: assumptions about the trace (clipped, skipped, generated), shown with every result.
    """

    format: str
    source: str
    calls: list[Call]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def block_names(call: Call, block_size: int, *, reuse_answers: bool = False) -> bytes:
    """Return the hashes of all full blocks of ``call``'s prompt and answer, concatenated, ``SHORT_HASH_BYTES`` each.

    A block is named by the id that covers its last token and the offset of that token in the id's unit. An id covers
    everything before it, so this is exact for blocks smaller and larger than a unit. Blocks with a token of the answer
    are unique to the call, unless ``reuse_answers`` is set and the trace has ids for them (``Call.answer``).
    """
    total = call.num_prompt_tokens + call.num_output_tokens
    names = np.zeros(total // block_size, _NAME)
    last = np.arange(block_size - 1, len(names) * block_size, block_size)
    names["id"], names["offset"] = call.number, np.arange(len(names))
    names["space"] = np.where(last < call.num_prompt_tokens, _OWN_PROMPT, _OWN_ANSWER)
    contents = [(call.content, call.num_prompt_tokens)]
    if reuse_answers:
        contents.insert(0, (call.answer, total))
    for content, end in contents:  # the prompt's ids are applied last and override the answer's
        if content is not None and len(content.ids):
            index = last // content.unit
            known = (last < end) & (index < len(content.ids))
            names["id"][known] = np.asarray(content.ids, np.uint64)[index[known]]
            names["offset"][known] = last[known] % content.unit
            names["space"][known] = content.space
    return _mixed(names).tobytes()


def _mixed(names: "npt.NDArray[np.void]") -> "npt.NDArray[np.uint64]":
    """Return uint64 ``[n, 2]``: a hash of each name, because a router knows a block by its first 8 bytes, and its id.

    The hash is the finaliser of SplitMix64 (Steele et al., 2014) over the words of the name.
    """
    words = names.view(np.uint64).reshape(-1, 2)
    bits = words[:, 0] * np.uint64(0x9E3779B97F4A7C15) + words[:, 1]
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    return np.stack([bits, words[:, 1]], axis=1)
