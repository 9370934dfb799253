"""Sampling of draft tokens from a draft model's logits, with the same noise as the request's tokens."""

import numpy as np
import torch

from quire.kernels.sampling.sampling import sampled_logits
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.batch.positions import Ints, SampledPositions
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.sampling.draw import make_draw


class DraftSampler:
    """Samples by the batch's columns: temperature, top-k, top-p and min-p, without logits processors.

    Owns, if it ``keeps`` them, the distributions of the last drafts, which rejection sampling needs.
    """

    def __init__(self, batch: InputBatch, device: torch.device, *, keeps: bool) -> None:
        self._batch = batch
        self._draw = make_draw(batch, device)
        self.transfer = Transfer(device)
        self._keeps = keeps
        self._kept: list[tuple[Ints, torch.Tensor]] = []

    def start(self) -> None:
        """Start a new round of drafts; the batch's rows may have changed."""
        self._kept = []
        self._draw.rows_changed()

    def sample(self, logits: torch.Tensor, rows: Ints, offset: int) -> torch.Tensor:
        """Sample the next draft of each of ``rows``, which have ``offset`` drafts already: int64 ``[len(rows)]``.

        Args:
            logits: float32 ``[len(rows), vocab]``.
        """
        positions = SampledPositions(rows, np.full(len(rows), offset), np.full(len(rows), -1))
        self._draw.prepare(positions)
        tokens, _ = self._draw.draw(logits, positions)
        if self._keeps:
            batch = self._batch
            columns = (batch.temperature[rows], batch.top_k[rows], batch.top_p[rows], batch.min_p[rows])
            drawn_from = sampled_logits(logits, *self.transfer(*columns))
            self._kept.append((rows, torch.softmax(drawn_from, dim=-1)))
        return tokens

    def probabilities(self, rows: Ints, offset: int) -> torch.Tensor:
        """Return the distribution of each row's draft number ``offset``: float32 ``[len(rows), vocab]``.

        ``rows``: ascending; all have that draft, and none is greedy.
        """
        kept_rows, probabilities = self._kept[offset]
        return probabilities[self.transfer(np.searchsorted(kept_rows, rows))[0]]
