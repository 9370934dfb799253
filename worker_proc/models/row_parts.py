"""A fused layer whose projections cannot share one weight: their formats, or their orders of inputs, differ."""

from collections.abc import Sequence

import torch

from quire.worker_proc.models.linear import Linear
from quire.worker_proc.models.weight_slot import WeightSlot


class RowParts(torch.nn.Module):
    """Concatenates the outputs of several linear layers, for example of quantised queries and plain values."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        super().__init__()
        self._parts = list(parts)
        self.parts = torch.nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self._parts], 1)

    __call__ = forward

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {name: slot for part in self._parts for name, slot in part.weight_slots().items()}
