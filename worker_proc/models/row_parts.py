"""A fused layer whose projections cannot share one weight: their formats, or their orders of inputs, differ."""

from collections.abc import Sequence

import torch

from quire.worker_proc.models.linear import Linear
from quire.worker_proc.models.module import Module
from quire.worker_proc.models.ops import Ops
from quire.worker_proc.models.weight_slot import WeightSlot


class RowParts(Module):
    """Concatenates the outputs of several linear layers, for example of quantised queries and plain values."""

    def __init__(self, parts: Sequence[Linear], ops: Ops) -> None:
        self.parts = list(parts)
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.join_columns([part(x) for part in self.parts])

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {name: slot for part in self.parts for name, slot in part.weight_slots().items()}
