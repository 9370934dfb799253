"""A fused layer whose projections cannot share one weight: their formats, or their orders of inputs, differ."""

from collections.abc import Sequence

import torch

from quire.worker_proc.models.linear import Linear
from quire.worker_proc.models.module import Module
from quire.worker_proc.models.weight_slot import WeightSlot


class RowParts(Module):
    """Concatenates the outputs of several linear layers, for example of quantised queries and plain values."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = list(parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], 1)

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {name: slot for part in self.parts for name, slot in part.weight_slots().items()}
