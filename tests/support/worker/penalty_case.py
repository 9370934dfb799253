"""Arguments of ``apply_penalties`` in which every rule has an effect."""

from dataclasses import dataclass

import torch

from quire.kernels.common.penalty_rows import PenaltyRows
from quire.kernels.sampling.penalties import PROMPT_BIT
from quire.worker_proc.batch.positions import SampledPositions


@dataclass
class PenaltyCase:
    """Positions of four requests, two of which have drafts; request 2 has no counts, and slots are out of order."""

    vocab: int
    device: torch.device

    def __post_init__(self) -> None:
        rng = torch.Generator().manual_seed(self.vocab)
        drafts = [[], [3, 3, self.vocab - 1], [1], [0, 3]]
        positions = SampledPositions.with_drafts(torch.arange(4).numpy(), drafts)
        row = torch.from_numpy(positions.rows)
        held = torch.randint(0, 4, (6, self.vocab), generator=rng, dtype=torch.int32)
        held *= torch.rand(6, self.vocab, generator=rng) < 0.2  # most tokens occur in no request
        held |= PROMPT_BIT * (torch.rand(6, self.vocab, generator=rng) < 0.1)
        held[3] = 0
        wide = torch.randn(len(row), self.vocab + 5, generator=rng) * 4
        wide[0, 0], wide[1, 3] = -torch.inf, 0.0
        self.logits = wide.to(self.device)[:, : self.vocab]
        self.counts = held.to(self.device)
        per_row = torch.tensor([[1.3, 0.5, -0.7], [0.6, 0.25, 1.5], [2.0, 1.0, 1.0], [1.0, -1.25, 0.0]])
        columns = per_row.T[:, row].contiguous().to(self.device)
        self.slots = torch.tensor([5, 0, -1, 3])[row].to(self.device)
        self.repetition, self.frequency, self.presence = columns
        self.offsets = torch.from_numpy(positions.offsets).to(self.device)
        self.drafts = torch.from_numpy(positions.drafts).to(self.device)

    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, PenaltyRows]:
        factors = self.repetition, self.frequency, self.presence
        return self.logits.clone(), self.counts, PenaltyRows(self.slots, *factors, self.offsets, self.drafts)
