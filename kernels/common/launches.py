"""Prepared launches: what a launcher derives from its tensors' layouts is derived and checked once per layout.

A step launches the same kernels in each layer with tensors of equal layouts. Checking their shapes again and computing
grids and compile-time constants costs more host time than the launch.
"""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Prepared = TypeVar("Prepared")

MAX_LAYOUTS = 4096
"""Layouts to remember; the number of tokens is part of a layout. All are forgotten when there are more."""


def layout_of(tensor: torch.Tensor | None) -> Hashable:
    """Return what a kernel's launch depends on besides the tensor's address and numbers."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class Launch:
    """A kernel's launch whose grid, last arguments and compile-time constants are known.

    Call it with the other arguments: the tensors that are not the same in each layer.
    """

    __slots__ = ("_constants", "_kernel", "_last")

    def __init__(self, kernel: Any, grid: tuple[int, ...], last: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self._kernel = kernel
        self._last = last
        self._constants = {"grid": grid, "warmup": False} | constants

    def __call__(self, *first: Any) -> None:
        self._kernel.run(*first, *self._last, **self._constants)


def launch_nothing(*first: Any) -> None:
    """Take the place of a ``Launch`` if there is nothing to compute."""


def once_per_layout(prepare: Callable[Arguments, Prepared]) -> Callable[Concatenate[Hashable, Arguments], Prepared]:
    """Decorate a function that checks tensors and returns their launch: its result is kept per layout.

    The layouts are the first argument of the decorated function. An error is not kept.
    """
    known: dict[Hashable, Prepared] = {}

    @wraps(prepare)
    def prepared(layouts: Hashable, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Prepared:
        found = known.get(layouts)
        if found is None:
            if len(known) >= MAX_LAYOUTS:
                known.clear()
            found = known[layouts] = prepare(*args, **kwargs)
        return found

    return prepared
