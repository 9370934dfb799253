"""Positions that a step samples: one per row, and one more for each draft token to verify."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledPositions:
    """Batch row and draft token of each row of the sampled logits. The positions of one batch row are adjacent.

    Attributes:
        rows: int64 ``[num_positions]``, ascending: the batch row of each position.
        offsets: int64 ``[num_positions]``: number of draft tokens of the same row before the position.
        drafts: int64 ``[num_positions]``: the draft token that the position's sample is compared with; -1 after a row's
            last draft token. The draft tokens before position ``p`` are ``drafts[p - offsets[p] : p]``.
    """

    rows: Ints
    offsets: Ints
    drafts: Ints

    @classmethod
    def one_per_row(cls, rows: Ints) -> "SampledPositions":
        """Return one position for each of ``rows``, without draft tokens."""
        return cls(rows, np.zeros(len(rows), np.int64), np.full(len(rows), -1, np.int64))

    @classmethod
    def with_drafts(cls, rows: Ints, drafts: list[list[int]]) -> "SampledPositions":
        """Return the positions of ``rows`` with their draft tokens; a row's list may be empty."""
        counts = np.array([len(own) + 1 for own in drafts], np.int64)
        ends = np.cumsum(counts)
        flat = np.full(int(counts.sum()), -1, np.int64)
        is_draft = np.ones(len(flat), np.bool_)
        is_draft[ends - 1] = False
        flat[is_draft] = [draft for own in drafts for draft in own]
        offsets = np.arange(len(flat)) - np.repeat(ends - counts, counts)
        return cls(np.repeat(rows, counts), offsets, flat)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def any_drafts(self) -> bool:
        return bool(self.offsets.any())
