"""Memory of launches: what a launcher derives from its tensors' layouts is derived and checked once per layout.

A step launches the same kernels in each layer with tensors of equal layouts. Checking their shapes again and computing
grids and compile-time constants costs more host time than the launch.
"""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Launch = TypeVar("Launch")

MAX_LAYOUTS = 4096
"""Layouts to remember; the number of tokens is part of a layout. All are forgotten when there are more."""


def layout_of(tensor: torch.Tensor | None) -> Hashable:
    """Return what a kernel's launch depends on besides the tensor's address and numbers."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def once_per_layout(prepare: Callable[Arguments, Launch]) -> Callable[Concatenate[Hashable, Arguments], Launch]:
    """Decorate a function that checks tensors and returns their launch: its result is kept per layout.

    The layouts are the first argument of the decorated function. An error is not kept.
    """
    known: dict[Hashable, Launch] = {}

    @wraps(prepare)
    def prepared(layouts: Hashable, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Launch:
        found = known.get(layouts)
        if found is None:
            if len(known) >= MAX_LAYOUTS:
                known.clear()
            found = known[layouts] = prepare(*args, **kwargs)
        return found

    return prepared
