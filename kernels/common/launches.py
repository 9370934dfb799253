"""Memory of launches: what a launcher derives from its tensors' layouts is derived and checked once per layout.

A step launches the same kernels in each layer with tensors of equal layouts. Checking their shapes again and computing
grids and compile-time constants costs more host time than the launch.
"""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

Launch = TypeVar("Launch")

MAX_LAYOUTS = 4096
"""Layouts to remember; the number of tokens is part of a layout. All are forgotten when there are more."""


def layout_of(tensor: torch.Tensor | None) -> Hashable:
    """Return what a kernel's launch depends on besides the tensor's address and numbers."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class Launches(Generic[Launch]):
    """Remembers the prepared launch of each layout."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Launch] = {}

    def of(self, layouts: Hashable, prepare: Callable[[], Launch]) -> Launch:
        """Return the launch of these layouts; ``prepare`` checks the tensors and makes it, once."""
        found = self._known.get(layouts)
        if found is None:
            if len(self._known) >= MAX_LAYOUTS:
                self._known.clear()
            found = self._known[layouts] = prepare()
        return found
