"""A linear layer that LoRA adapters change."""

import torch

from quire.worker_proc.models.linear import Linear
from quire.worker_proc.models.module import Module
from quire.worker_proc.models.row_parts import RowParts
from quire.worker_proc.models.sites import Site
from quire.worker_proc.models.weight_slot import WeightSlot


class Adapted(Module):
    """A linear layer with the addends of its rows' adapters, before anything else reads its outputs."""

    def __init__(self, projection: Linear | RowParts, site: Site) -> None:
        self.projection = projection
        self._site = site

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.projection(x)
        self._site.add(x, y)
        return y

    def weight_slots(self) -> dict[str, WeightSlot]:
        return self.projection.weight_slots()
