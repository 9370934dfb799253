"""Which tokens a step computes, from the rows and what the diff says of them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.worker_proc.batch.input_batch import InputBatch, StepRefused
from quire.worker_proc.batch.positions import Ints, SampledPositions


@dataclass(slots=True)
class StepInputs:
    """What the model is given: the rows that run and their tokens, flattened row by row.

    Attributes:
        rows: rows that run, ascending.
        query_lens: tokens of each of them.
        seq_lens: tokens of each of them once this step's are computed.
        token_rows, positions: int64 ``[num_tokens]``.
        sampling: which of ``rows`` reach their last known position, as indices into ``rows``.
        drafts: of each of ``sampling``, its drafts, which are its last tokens; None when nobody has any.
    """

    rows: Ints
    query_lens: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    token_rows: Ints
    positions: Ints
    sampling: Ints
    drafts: list[list[int]] | None = None

    @property
    def query_start_loc(self) -> npt.NDArray[np.int32]:
        starts = np.zeros(len(self.rows) + 1, np.int32)
        np.cumsum(self.query_lens, out=starts[1:])
        return starts

    @property
    def sampled(self) -> SampledPositions:
        """What the step samples."""
        rows = self.rows[self.sampling]
        return (
            SampledPositions.one_per_row(rows)
            if self.drafts is None
            else SampledPositions.with_drafts(rows, self.drafts)
        )

    @property
    def sampled_tokens(self) -> Ints:
        """Index, among the flattened tokens, of each of these positions."""
        last = (np.cumsum(self.query_lens, dtype=np.int64) - 1)[self.sampling]
        if self.drafts is None:
            return last
        counts = np.array([len(own) + 1 for own in self.drafts])
        return np.repeat(last + 1 - counts, counts) + self.sampled.offsets


def prepare_inputs(
    batch: InputBatch, step: SchedulerOutput, proposals: Mapping[int, list[int]] | None = None
) -> StepInputs:
    """Active rows compute one token each, but for those with a count.

    Args:
        proposals: row → its drafts, at most as many as the step allows it; they are put behind its known tokens.

    Raises:
        StepRefused: nothing runs, or tokens that are not known: what a step without changes may ask, at which
            ``DiffCheck`` does not look.
    """
    lengths = batch.active[: batch.num_rows].astype(np.int32)
    for handle, count in step.counts:
        lengths[batch.row(handle)] = count
    num_drafts = np.zeros_like(lengths)
    for handle, allowed in step.drafts:
        row = batch.row(handle)
        own = (proposals or {}).get(row, [])
        assert len(own) <= allowed, "the proposer made more drafts than it was asked for"
        lengths[row] -= allowed - len(own)
        num_drafts[row] = len(own)
        known = int(batch.num_known[row])
        batch.tokens.data[row, known : known + len(own)] = own
    rows = np.flatnonzero(lengths)
    if not len(rows):
        raise StepRefused("nothing runs in this step")
    query_lens = lengths[rows]
    computed, known_or_draft = batch.num_computed[rows], batch.num_known[rows] + num_drafts[rows]
    seq_lens = computed + query_lens
    if (seq_lens > known_or_draft).any() or (num_drafts[rows].astype(bool) & (seq_lens != known_or_draft)).any():
        raise StepRefused("a request is to compute tokens that nobody knows")
    starts = np.cumsum(query_lens) - query_lens
    token_rows = np.repeat(rows, query_lens)
    offsets = np.arange(len(token_rows)) - np.repeat(starts, query_lens)
    positions = np.repeat(computed, query_lens).astype(np.int64) + offsets
    sampling = np.flatnonzero(seq_lens == known_or_draft)
    drafts = None
    if num_drafts.any():
        assert proposals is not None
        drafts = [proposals.get(row, []) if num_drafts[row] else [] for row in rows[sampling].tolist()]
    return StepInputs(rows, query_lens, seq_lens, token_rows, positions, sampling, drafts)
