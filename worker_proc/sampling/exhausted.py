"""Where rules together leave no token: found from the rules, on the host, so that no step waits for its logits."""

import numpy as np
import numpy.typing as npt

from quire.worker_proc.sampling.builtin.allowed_token_ids import Lists
from quire.worker_proc.sampling.builtin.base import Places
from quire.worker_proc.sampling.positions import Ints
from quire.worker_proc.sampling.token_masks import TokenMasks


def exhausted(num_positions: int, vocab_size: int, allowed: Lists, bans: Places, masks: TokenMasks | None) -> list[int]:
    """Positions at which every token is banned, by ``bans``, for not being ``allowed`` where there is such a list, or
    by its mask.

    Only those are looked at closely that have several kinds of rules, or as many bans as tokens.
    """
    banned = np.bincount(bans.positions, minlength=num_positions)
    listed = allowed.places
    has_list = np.zeros(num_positions, np.bool_)
    has_list[allowed.at] = True
    room = np.where(has_list, np.bincount(listed.positions, minlength=num_positions), vocab_size)
    suspect = banned >= room
    words: dict[int, npt.NDArray[np.int32]] = {}
    if masks is not None:
        at = masks.positions
        suspect[at] |= has_list[at] | (banned[at] > 0) | ~masks.words.any(axis=1)
        words = dict(zip(at.tolist(), masks.words, strict=True))
    return [
        at
        for at in np.flatnonzero(suspect).tolist()
        if not _left(
            vocab_size,
            listed.tokens[listed.positions == at] if has_list[at] else None,
            bans.tokens[bans.positions == at],
            words.get(at),
        ).any()
    ]


def _left(
    vocab_size: int, allowed: Ints | None, banned: Ints, words: npt.NDArray[np.int32] | None
) -> npt.NDArray[np.bool_]:
    """Bool ``[vocab_size]``: what one position may still have."""
    left = np.ones(vocab_size, np.bool_)
    if words is not None:
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size].view(np.bool_)
        left[: len(bits)] = bits
        left[len(bits) :] = False
    if allowed is not None:
        only = np.zeros_like(left)
        only[allowed] = left[allowed]
        left = only
    left[banned] = False
    return left
