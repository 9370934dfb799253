"""Which positions a step samples: one per row, and one more for each draft that is verified."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledPositions:
    """What each row of the sampled logits stands for. A batch row's positions follow each other.

    Attributes:
        rows: int64 ``[num_positions]``, ascending: the batch row of each.
        offsets: int64 ``[num_positions]``: drafts of the same row that come before it in this step.
        drafts: int64 ``[num_positions]``: the draft that the sample here is compared with; -1 behind a row's last one.
            So the drafts that precede position ``p`` are ``drafts[p - offsets[p] : p]``.
    """

    rows: Ints
    offsets: Ints
    drafts: Ints

    @classmethod
    def one_per_row(cls, rows: Ints) -> "SampledPositions":
        """Of rows without drafts."""
        return cls(rows, np.zeros(len(rows), np.int64), np.full(len(rows), -1, np.int64))

    @classmethod
    def with_drafts(cls, rows: Ints, drafts: list[list[int]]) -> "SampledPositions":
        """Of ``rows``, each with its drafts (which may be none)."""
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
