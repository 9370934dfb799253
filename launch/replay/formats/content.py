"""Contents named by ids: of tokens, by a chain of hashes; and what answers became in the next turn."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise

from quire.launch.replay.workload.workload import Call, Content


def chain_ids(tokens: Sequence[int], unit: int) -> array[int]:
    """One id per full ``unit`` of tokens, of them and of all before: 64 bits of a BLAKE2 chain."""
    data = memoryview(array("I", tokens)).cast("B")
    step = unit * array("I").itemsize
    name = b""
    ids = array("Q")
    for end in range(step, len(data) + 1, step):
        name = blake2b(data[end - step : end], digest_size=8, key=name).digest()
        ids.frombytes(name)
    return ids


def extends(longer: Content, shorter: Content) -> bool:
    """Whether all units that ``shorter`` names begin ``longer``, which names more."""
    count = len(shorter.ids)
    same = (longer.unit, longer.space) == (shorter.unit, shorter.space)
    return same and len(longer.ids) > count and longer.ids[:count] == shorter.ids


def tell_answers(turns: Sequence[Call]) -> None:
    """Where a turn's prompt extends the one before, that one's answer is known by it.

    By tokens where there are any, else by ids; a prompt that is shorter than one id tells nothing.
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
