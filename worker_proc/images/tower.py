"""The vision tower of a checkpoint: transformers' own class, without its language model."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any

import torch

from quire.protocol.model.vision_config import VisionConfig


@dataclass(frozen=True)
class VisionTower:
    """The tower and its projection to the language model's width.

    Attributes:
        model: transformers' class without the language model, on ``meta`` until its weights are loaded.
        dtype: of weights and rows.
    """

    model: Any
    vision: VisionConfig
    hidden_size: int
    dtype: torch.dtype

    @cached_property
    def _parameters(self) -> tuple[str, ...]:
        known = signature(self.model.base_model.get_image_features).parameters.values()
        return tuple(each.name for each in known if each.kind is not each.VAR_KEYWORD)

    def encode(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute the rows of one image.

        Args:
            tensors: as the model's processor makes them, by its names; on any device.

        Returns:
            ``[1 + num_deepstack, num_rows, hidden_size]`` on the tower's device, in its dtype: the rows in place of
            embeddings, and those that are added behind each of the first layers.

        Raises:
            Exception: of any kind, if the tower does not take the tensors.
        """
        base = self.model.base_model
        device = next(self.model.parameters()).device
        given = {}
        for name in self._parameters:
            if (tensor := tensors.get(name)) is not None:
                given[name] = tensor.to(device, self.dtype if tensor.is_floating_point() else tensor.dtype)
        found = base.get_image_features(**given, return_dict=True)
        deep = [torch.cat(tuple(rows)) for rows in getattr(found, "deepstack_features", None) or ()]
        rows = [self._flat(found.pooler_output), *deep[: self.vision.num_deepstack]]
        return torch.stack([each.to(self.dtype) for each in rows])

    def _flat(self, rows: Any) -> torch.Tensor:
        parts = rows if isinstance(rows, list | tuple) else [rows]
        return torch.cat([part.reshape(-1, self.hidden_size) for part in parts])
