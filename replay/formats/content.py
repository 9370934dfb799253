"""Content ids: hashes of tokens, and the contents of answers that the next turn repeats."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise

from quire.replay.workload.workload import Call, ContentIds


def chain_ids(tokens: Sequence[int], unit: int) -> array[int]:
    """Return one id per full ``unit`` of tokens: a 64-bit BLAKE2 hash of these and all earlier tokens."""
    data = memoryview(array("I", tokens)).cast("B")
    step = unit * array("I").itemsize
    name = b""
    ids = array("Q")
    for end in range(step, len(data) + 1, step):
        name = blake2b(data[end - step : end], digest_size=8, key=name).digest()
        ids.frombytes(name)
    return ids


def extends(longer: ContentIds, shorter: ContentIds) -> bool:
    """Whether the ids of ``longer`` start with those of ``shorter`` and are more."""
    count = len(shorter.ids)
    same = (longer.unit, longer.space) == (shorter.unit, shorter.space)
    return same and len(longer.ids) > count and longer.ids[:count] == shorter.ids


def set_answers(turns: Sequence[Call]) -> None:
    """Set ``answer`` of each turn to the content of the next turn, if that begins with this turn's prompt.

    Prompts are compared by tokens if known, otherwise by ids; a prompt shorter than one unit has no id to compare.
    """
    for call, following in pairwise(turns):
        if call.content is None or following.content is None or not extends(following.content, call.content):
            continue
        if call.tokens is not None and following.tokens is not None:
            is_same = following.tokens[: len(call.tokens)] == call.tokens
        else:
            is_same = len(call.content.ids) > 0
        if is_same:
            call.answer = following.content
