"""Which tokens a step computes, from the rows and what the diff says of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.worker_proc.input_batch import InputBatch, StepRefused

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepInputs:
    """What the model is given: the rows that run and their tokens, flattened row by row.

    Attributes:
        rows: rows that run, ascending.
        query_lens: tokens of each of them.
        seq_lens: tokens of each of them once this step's are computed.
        token_rows, positions: int64 ``[num_tokens]``.
        sampling: which of ``rows`` reach their last known position, as indices into ``rows``.
    """

    rows: Ints
    query_lens: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    token_rows: Ints
    positions: Ints
    sampling: Ints

    @property
    def query_start_loc(self) -> npt.NDArray[np.int32]:
        starts = np.zeros(len(self.rows) + 1, np.int32)
        np.cumsum(self.query_lens, out=starts[1:])
        return starts

    @property
    def last_tokens(self) -> Ints:
        """Index, among the flattened tokens, of each row's last one."""
        return np.cumsum(self.query_lens, dtype=np.int64) - 1


def prepare_inputs(batch: InputBatch, counts: Sequence[tuple[int, int]]) -> StepInputs:
    """Active rows compute one token each, but for those in ``counts``, (handle, tokens).

    Raises:
        StepRefused: a count for a parked row, tokens that nobody knows, or nothing to run.
    """
    lengths = batch.active[: batch.num_rows].astype(np.int32)
    for handle, count in counts:
        row = batch.row(handle)
        if not lengths[row] or count < 1:
            raise StepRefused(f"handle {handle} is parked, or is to compute {count} tokens")
        lengths[row] = count
    rows = np.flatnonzero(lengths)
    if not len(rows):
        raise StepRefused("nothing runs in this step")
    query_lens = lengths[rows]
    computed, known = batch.num_computed[rows], batch.num_known[rows]
    seq_lens = computed + query_lens
    if (seq_lens > known).any():
        raise StepRefused("a request is to compute tokens that nobody knows")
    starts = np.cumsum(query_lens) - query_lens
    token_rows = np.repeat(rows, query_lens)
    offsets = np.arange(len(token_rows)) - np.repeat(starts, query_lens)
    positions = np.repeat(computed, query_lens).astype(np.int64) + offsets
    return StepInputs(rows, query_lens, seq_lens, token_rows, positions, np.flatnonzero(seq_lens == known))
