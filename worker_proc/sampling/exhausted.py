"""Positions at which a request's constraints together allow no token.

They are found on the host from the constraints alone, so that a step does not wait for its logits.
"""

import numpy as np
import numpy.typing as npt

from quire.worker_proc.batch.positions import Ints
from quire.worker_proc.sampling.builtin.allowed_token_ids import Lists, Words, bits_of
from quire.worker_proc.sampling.builtin.base import LogitPlaces
from quire.worker_proc.sampling.token_masks import TokenMasks


def exhausted(
    num_positions: int, vocab_size: int, lists: Lists, bans: LogitPlaces, masks: TokenMasks | None
) -> list[int]:
    """Find positions at which every token is banned, not in the allowed list, or cleared in the token bitmask.

    Tokens are only checked one by one at positions with several kinds of constraints, or with at least as many bans
    as allowed tokens.
    """
    room = np.full(num_positions, vocab_size)
    room[lists.at] = lists.sizes
    banned = np.bincount(bans.positions, minlength=num_positions)
    suspect = banned >= room
    words: dict[int, list[Words]] = {}
    if masks is not None:
        suspect[masks.positions] |= (banned[masks.positions] > 0) | ~masks.words.any(axis=1)
        suspect[np.intersect1d(masks.positions, lists.at)] = True
        words = {at: [own] for at, own in zip(masks.positions.tolist(), masks.words, strict=True)}
    if suspect.any():
        for at, own in zip(lists.at.tolist(), lists.words, strict=True):
            words.setdefault(at, []).append(own)
    return [
        at
        for at in np.flatnonzero(suspect).tolist()
        if not _left(vocab_size, words.get(at, []), bans.tokens[bans.positions == at]).any()
    ]


def end_tokens_left(masks: TokenMasks, position: int, eos: frozenset[int]) -> list[int]:
    """Return the tokens that the grammar allows at a position if these are only ends of the text; otherwise []."""
    own = masks.words[masks.positions == position]
    allowed = np.flatnonzero(bits_of(own)[0]).tolist() if len(own) else []
    return allowed if eos.issuperset(allowed) else []


def _left(vocab_size: int, words: list[Words], banned: Ints) -> npt.NDArray[np.uint8]:
    """Return the tokens that one position may have, as 0 or 1, ``[vocab_size]``. Missing bits of a mask forbid."""
    left = np.ones(vocab_size, np.uint8)
    for own in words:
        bits = bits_of(own)[:vocab_size]
        left[: len(bits)] &= bits
        left[len(bits) :] = 0
    left[banned] = 0
    return left
