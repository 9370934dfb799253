"""The experts to which the tokens of one answer were routed, as clients receive them."""

from typing import Any

import numpy as np
import numpy.typing as npt

from quire.protocol.model.model_config import MoeConfig


class RoutedParts:
    """The rows of one answer, as they arrive with its updates."""

    def __init__(self) -> None:
        self._parts: list[npt.NDArray[np.uint16]] = []

    def add(self, rows: npt.NDArray[np.int32]) -> None:
        """Add the rows after those so far. They are kept in half of their size: no model has 65,536 experts."""
        self._parts.append(rows.astype(np.uint16))

    def first(self, num_rows: int) -> npt.NDArray[np.uint16]:
        """Return the first rows; a step may report tokens after a stop string."""
        rows = np.concatenate(self._parts) if self._parts else np.zeros((0, 0), np.uint16)
        return rows[:num_rows]


def by_layer(rows: npt.NDArray[np.uint16], moe: MoeConfig) -> npt.NDArray[Any]:
    """Return rows ``[tokens, layers * top_k]`` as ``[tokens, layers, top_k]``: uint8, or uint16 above 256 experts."""
    dtype = np.uint8 if moe.num_experts <= 256 else np.uint16
    return rows.astype(dtype).reshape(len(rows), len(moe.layers), moe.num_experts_per_token)
