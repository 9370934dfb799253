"""Inputs of the model for one step, made from the batch's rows and the diff."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.worker_proc.batch.input_batch import InputBatch, StepRefused
from quire.worker_proc.batch.positions import Ints, SampledPositions


@dataclass(slots=True)
class StepInputs:
    """The rows that run in a step and their tokens, flattened row by row.

    Attributes:
        rows: int64 ``[num_rows]``: the rows that run, ascending.
        query_lens: int32 ``[num_rows]``: number of tokens that the step computes of each row.
        seq_lens: int32 ``[num_rows]``: number of computed tokens of each row after the step.
        token_rows, positions: int64 ``[num_tokens]``: row and position of each token.
        sampling: indices into ``rows`` of the rows that reach their last known position and sample
            (``InputBatch.samples``), in the order of ``sampled_rows``; a row from which others are forked occurs once
            for each of them.
        sampled_rows: int64: the row that each of ``sampling`` samples for, ascending.
        drafts: the draft tokens of each row of ``sampling``, which are its last tokens; None if the step has none.
    """

    rows: Ints
    query_lens: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    token_rows: Ints
    positions: Ints
    sampling: Ints
    sampled_rows: Ints
    drafts: list[list[int]] | None = None

    @property
    def query_start_loc(self) -> npt.NDArray[np.int32]:
        starts = np.zeros(len(self.rows) + 1, np.int32)
        np.cumsum(self.query_lens, out=starts[1:])
        return starts

    @property
    def sampled(self) -> SampledPositions:
        """The positions that the step samples."""
        rows, drafts = self.sampled_rows, self.drafts
        return SampledPositions.one_per_row(rows) if drafts is None else SampledPositions.with_drafts(rows, drafts)

    @property
    def sampled_tokens(self) -> Ints:
        """Index of each sampled position among the flattened tokens."""
        last = (np.cumsum(self.query_lens, dtype=np.int64) - 1)[self.sampling]
        if self.drafts is None:
            return last
        counts = np.array([len(own) + 1 for own in self.drafts])
        return np.repeat(last + 1 - counts, counts) + self.sampled.offsets


def prepare_inputs(
    batch: InputBatch, step: SchedulerOutput, proposals: Mapping[int, list[int]] | None = None
) -> StepInputs:
    """Make the step's inputs: active rows compute one token each, or their count in ``step.counts``.

    Args:
        proposals: row → its draft tokens, at most as many as the step allows; they are written after its known tokens.

    Raises:
        StepRefused: no row runs, or a row would compute unknown tokens. A step without changes can cause this, because
            ``DiffCheck`` does not check such a step.
    """
    lengths = batch.active[: batch.num_rows].astype(np.int32)
    for handle, count in step.counts:
        lengths[batch.row(handle)] = count
    for handle, _ in step.forks:
        lengths[batch.row(handle)] = 0
    num_drafts = np.zeros_like(lengths)
    for handle, allowed in step.drafts:
        row = batch.row(handle)
        own = (proposals or {}).get(row, [])
        assert len(own) <= allowed, f"proposer made {len(own)} draft tokens, at most {allowed} are allowed"
        lengths[row] -= allowed - len(own)
        num_drafts[row] = len(own)
        known = int(batch.num_known[row])
        batch.tokens.data[row, known : known + len(own)] = own
    rows = np.flatnonzero(lengths)
    if not len(rows):
        raise StepRefused(f"step {step.step} without running requests")
    query_lens = lengths[rows]
    computed, known_or_draft = batch.num_computed[rows], batch.num_known[rows] + num_drafts[rows]
    seq_lens = computed + query_lens
    wrong = (seq_lens > known_or_draft) | (num_drafts[rows].astype(bool) & (seq_lens != known_or_draft))
    if wrong.any():
        at = int(wrong.argmax())
        handle, end, known = batch.handles[rows[at]], seq_lens[at], known_or_draft[at]
        raise StepRefused(f"handle {handle} would compute tokens up to {end}, but {known} are known or drafted")
    starts = np.cumsum(query_lens) - query_lens
    token_rows = np.repeat(rows, query_lens)
    offsets = np.arange(len(token_rows)) - np.repeat(starts, query_lens)
    positions = np.repeat(computed, query_lens).astype(np.int64) + offsets
    sampling = np.flatnonzero((seq_lens == known_or_draft) & batch.samples[rows])
    sampled_rows = rows[sampling]
    if step.forks:
        forked, parents = np.array([[batch.row(handle) for handle in pair] for pair in step.forks], np.int64).T
        sampling = np.concatenate((sampling, np.searchsorted(rows, parents)))
        sampled_rows = np.concatenate((sampled_rows, forked))
        order = np.argsort(sampled_rows)
        sampling, sampled_rows = sampling[order], sampled_rows[order]
    drafts = None
    if num_drafts.any():
        assert proposals is not None
        drafts = [proposals.get(row, []) if num_drafts[row] else [] for row in sampled_rows.tolist()]
    return StepInputs(rows, query_lens, seq_lens, token_rows, positions, sampling, sampled_rows, drafts)
