"""The experts that a forward pass chooses: collected from its layers, for models whose choices are kept."""

from collections.abc import Callable
from typing import Any

import torch

from quire.protocol.model.model_config import MoeConfig

Route = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""``Ops.route``."""


class Routes:
    """Collects the expert ids of one forward pass, of all layers with experts.

    A layer gets its routing function from ``recording`` when it is built. Models whose choices are not kept have no
    ``Routes``, and their layers call ``Ops.route`` itself.

    Attributes:
        width: number of ids per token: layers with experts times experts per token.
        dtype: of kept ids: the smallest one that has every id.
    """

    def __init__(self, moe: MoeConfig) -> None:
        self.width = len(moe.layers) * moe.num_experts_per_token
        self.dtype = torch.uint8 if moe.num_experts <= 256 else torch.int16
        self._ids: list[torch.Tensor | None] = []

    def recording(self, route: Route) -> Route:
        """Return ``route`` for the next layer, whose chosen expert ids are collected here."""
        ids, place = self._ids, len(self._ids)
        ids.append(None)

        def recorded(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
            chosen = route(*args, **options)
            ids[place] = chosen[0]
            return chosen

        return recorded

    def take(self) -> torch.Tensor:
        """Return the ids of the pass that has ended, ``[num_tokens, width]`` by layer, and release the layers' own."""
        ids = [own for own in self._ids if own is not None]
        self._ids[:] = [None] * len(self._ids)
        return torch.cat(ids, 1).to(self.dtype)
