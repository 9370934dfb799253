"""Which drafts were right: those that are what would have been sampled, up to the first that is not."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.worker_proc.batch.positions import Ints, SampledPositions

Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From the tokens of some positions, int64, and the distributions that they were drawn from, float32 ``[num_positions,
vocab]`` (which say nothing where a row is greedy), to the tokens that are taken."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a step with drafts gave.

    Attributes:
        kept: int64 ``[num_tokens]``: the positions whose samples are tokens now, ascending.
        counts: int32 ``[num_rows]``: of each row so many: its accepted drafts, and the sample behind them.
        drafts: int32 ``[num_rows]``: how many it had.
    """

    kept: Ints
    counts: npt.NDArray[np.int32]
    drafts: npt.NDArray[np.int32]


def accept_drafts(tokens: npt.NDArray[np.generic], positions: SampledPositions) -> Accepted:
    """``tokens``: the sample of each position. A position counts while every draft before it was the sample there."""
    begins = np.flatnonzero(positions.offsets == 0)
    wrong = np.where(tokens != positions.drafts, np.arange(len(tokens)), len(tokens))
    first_wrong = np.minimum.reduceat(wrong, begins)  # there is one: behind the last draft stands -1
    counts = first_wrong + 1 - begins
    kept = np.flatnonzero(positions.offsets < np.repeat(counts, np.diff(np.append(begins, len(tokens)))))
    drafts = np.diff(np.append(begins, len(tokens))) - 1
    return Accepted(kept, counts.astype(np.int32), drafts.astype(np.int32))
