"""Speculative sampling by rejection (Leviathan et al., 2023), for drafts with a known distribution."""

from functools import partial

import numpy as np
import torch

from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.batch.positions import SampledPositions
from quire.worker_proc.drafts.draft_sampling import DraftSampler
from quire.worker_proc.sampling.accept import Choose
from quire.worker_proc.sampling.noise import uniform

_ACCEPTS = np.uint64(0x5851F42D4C957F2D)
_REDRAWS = np.uint64(0x14057B7EF767814F)
"""Seeds of two more noise streams: these and the stream of drafts and samples must be independent."""


class RejectionSampler:
    """Chooses the token at each position with a draft, such that its distribution is the model's.

    A draft ``x`` is accepted with probability ``min(1, p(x) / q(x))``. Otherwise the token is drawn from
    ``max(p - q, 0)``, where ``p`` is the model's distribution and ``q`` the draft model's. A rejected ``x`` has no mass
    in the latter, so the token equals the draft if and only if the draft is accepted. That is how ``accept_drafts``
    finds the accepted drafts, as with shared noise.

    Unlike with shared noise, a request's text depends on its number of drafts, but on nothing else: noise is a function
    of seed and position here too. Greedy rows are unchanged.
    """

    def __init__(self, batch: InputBatch, drafts: DraftSampler) -> None:
        self._batch = batch
        self._drafts = drafts

    def chooser(self, positions: SampledPositions) -> Choose | None:
        """Return ``choose`` bound to ``positions``, or None if there are no drafts."""
        return partial(self.choose, positions) if positions.any_drafts else None

    def choose(self, positions: SampledPositions, tokens: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        """Return the token of each of ``positions``.

        Args:
            tokens: int64 ``[num_positions]``: sampled without regard to drafts; used at positions without a draft.
            probabilities: float32 ``[num_positions, vocab]``: the distributions of ``tokens``.
        """
        batch, rows = self._batch, positions.rows
        tokens = tokens.clone()
        verified = (positions.drafts >= 0) & (batch.temperature[rows] > 0)
        for offset in np.unique(positions.offsets[verified]).tolist():
            at = np.flatnonzero(verified & (positions.offsets == offset))
            seeds, token_positions = batch.seed[rows[at]], batch.num_known[rows[at]] + offset
            accepts, redraws = uniform(seeds ^ _ACCEPTS, token_positions), uniform(seeds ^ _REDRAWS, token_positions)
            there, drafts, *noise = self._drafts.transfer(at, positions.drafts[at], accepts, redraws)
            q = self._drafts.probabilities(rows[at], offset)
            tokens[there] = _accept_or_redraw(probabilities[there], q, drafts, *noise)
        return tokens


def _accept_or_redraw(
    p: torch.Tensor, q: torch.Tensor, drafts: torch.Tensor, accepts: torch.Tensor, redraws: torch.Tensor
) -> torch.Tensor:
    """Accept each draft, or draw another token. ``p``, ``q``: float32 ``[rows, vocab]``; the others ``[rows]``."""
    p, q = p.double(), q.double()
    own = drafts[:, None]
    taken = accepts * q.gather(-1, own)[:, 0] < p.gather(-1, own)[:, 0]
    rest = (p - q).clamp_(min=0.0)
    return torch.where(taken, drafts, _draw(rest, redraws))


def _draw(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Draw an index with probability proportional to float64 ``weights`` ``[rows, n]``, by inverse distribution."""
    running = weights.cumsum(dim=-1)
    index = torch.searchsorted(running, noise[:, None] * running[:, -1:], right=True)[:, 0]
    last = (running < running[:, -1:]).sum(dim=-1)  # rounding may put the target past the last index with mass
    return torch.minimum(index, last)
