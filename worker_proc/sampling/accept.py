"""Acceptance of draft tokens: those that equal the sampled token, up to the first that does not."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.worker_proc.batch.positions import Ints, SampledPositions

Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps sampled tokens, int64 ``[num_positions]``, and their distributions, float32 ``[num_positions, vocab]``, to the
tokens to use. Distributions of greedy rows are undefined."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The tokens that a step with drafts adds.

    Attributes:
        kept: int64 ``[num_tokens]``: the positions whose samples become output tokens, ascending.
        counts: int32 ``[num_rows]``: new tokens of each row: its accepted drafts and one sample after them.
        drafts: int32 ``[num_rows]``: draft tokens of each row.
    """

    kept: Ints
    counts: npt.NDArray[np.int32]
    drafts: npt.NDArray[np.int32]


def accept_drafts(tokens: npt.NDArray[np.generic], positions: SampledPositions) -> Accepted:
    """Compare each position's sample in ``tokens`` with its draft; a row's tokens end after the first mismatch."""
    begins = np.flatnonzero(positions.offsets == 0)
    mismatch = np.where(tokens != positions.drafts, np.arange(len(tokens)), len(tokens))
    # A mismatch always exists: the position after the last draft has draft -1.
    first_mismatch = np.minimum.reduceat(mismatch, begins)
    counts = first_mismatch + 1 - begins
    kept = np.flatnonzero(positions.offsets < np.repeat(counts, np.diff(np.append(begins, len(tokens)))))
    drafts = np.diff(np.append(begins, len(tokens))) - 1
    return Accepted(kept, counts.astype(np.int32), drafts.astype(np.int32))
