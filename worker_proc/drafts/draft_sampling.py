"""Draws draft tokens from a draft model's logits as the sampler draws the model's own, with the same noise."""

import numpy as np
import torch

from quire.worker_proc.input_batch import InputBatch
from quire.worker_proc.sampling.logprobs import best
from quire.worker_proc.sampling.noise import uniform
from quire.worker_proc.sampling.positions import Ints


class DraftSampler:
    """Reads the batch's sampling columns. Temperature and cuts (top-k, top-p, min-p) count, processors do not.

    Rows with cuts are drawn in order of probability and the others in order of the vocabulary, as in ``Sampler``:
    one noise gives the same token of two like distributions only where both lie in the same order.

    Owns, when it ``keeps`` them, the distributions of the newest drafts, which rejection sampling asks for.
    """

    def __init__(self, batch: InputBatch, *, keeps: bool) -> None:
        self._batch = batch
        self._keeps = keeps
        self._kept: list[tuple[Ints, torch.Tensor]] = []

    def begin(self) -> None:
        """New drafts are to be made."""
        self._kept = []

    def sample(self, logits: torch.Tensor, rows: Ints, positions: Ints) -> torch.Tensor:
        """The next draft of each of ``rows``, which stands at ``positions``: int64 ``[len(rows)]``.

        Args:
            logits: float32 ``[len(rows), vocab]``.
        """
        batch = self._batch
        random = batch.temperature[rows] > 0
        cut = (batch.top_k[rows] > 0) | (batch.top_p[rows] < 1)
        tokens = logits.argmax(dim=-1)
        probabilities = torch.zeros_like(logits) if self._keeps else None
        for which, ordered in ((np.flatnonzero(random & ~cut), False), (np.flatnonzero(random & cut), True)):
            if not len(which):
                continue
            probs, order = self._distribution(logits[self._tensor(which, logits)], rows[which], ordered)
            noise = uniform(batch.seed[rows[which]], positions[which])
            chosen = draw(probs, self._tensor(noise, logits))
            at = self._tensor(which, logits)
            tokens[at] = chosen if order is None else order.gather(-1, chosen[:, None])[:, 0]
            if probabilities is not None:
                probs = probs / probs.sum(dim=-1, keepdim=True)
                probabilities[at] = probs if order is None else torch.zeros_like(logits[at]).scatter(-1, order, probs)
        if probabilities is not None:
            self._kept.append((rows, probabilities))
        return tokens

    def probabilities(self, rows: Ints, offset: int) -> torch.Tensor:
        """What the draft behind ``offset`` others was drawn from: float32 ``[len(rows), vocab]``; zeros where greedy.

        ``rows``: ascending; all have that draft.
        """
        kept_rows, probabilities = self._kept[offset]
        return probabilities[self._tensor(np.searchsorted(kept_rows, rows), probabilities)]

    def _distribution(
        self, logits: torch.Tensor, rows: Ints, ordered: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Probabilities, not of sum 1 after cuts; and the tokens that they are of, where that is not all in order."""
        batch = self._batch
        scaled = (logits - logits.amax(dim=-1, keepdim=True)) / self._tensor(batch.temperature[rows], logits)[:, None]
        order = None
        if ordered:
            vocab = logits.shape[-1]
            top_k = np.where(batch.top_k[rows] > 0, np.minimum(batch.top_k[rows], vocab), vocab)
            scaled, order = best(scaled, int(top_k.max()))
            rank = torch.arange(scaled.shape[-1], device=logits.device)
            scaled = scaled.masked_fill(rank >= self._tensor(top_k, logits)[:, None], -torch.inf)
        probs = torch.softmax(scaled, dim=-1)
        if ordered:
            before = probs.cumsum(dim=-1) - probs
            probs = probs.masked_fill(before >= self._tensor(batch.top_p[rows], logits)[:, None], 0.0)
        floor = probs.amax(dim=-1, keepdim=True) * self._tensor(batch.min_p[rows], logits)[:, None]
        return probs.masked_fill(probs < floor, 0.0), order

    @staticmethod
    def _tensor(array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]", like: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(array).to(like.device)


def draw(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The first index at which the running sum of ``probs`` ``[rows, n]`` passes ``noise`` (float64) of its total."""
    running = probs.cumsum(dim=-1, dtype=torch.float64)
    index = torch.searchsorted(running, noise[:, None] * running[:, -1:], right=True)[:, 0]
    last = (running < running[:, -1:]).sum(dim=-1)  # rounding may put the target behind all that has mass
    return torch.minimum(index, last)
