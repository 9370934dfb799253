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
    """Return what a kernel's launch depends on besides the tensor's numbers and the rest of its address."""
    if tensor is None:
        return None
    # Triton compiles variants of a kernel for addresses that are multiples of 16.
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & 15


class Launch:
    """A kernel's launch for tensors of known layouts; everything else is known too.

    The first call goes through Triton's dispatch, which chooses the kernel's variant in 13 µs or more, and compiles a
    new one. Later calls launch that variant, because layouts contain all that the choice depends on. So each tensor of
    a call must have the layout that it had in the first call. New memory is always at a multiple of 16.

    Args:
        kernel: a function compiled by ``triton.jit``.
        last: arguments after the tensors that each call gives.
        constants: compile-time constants, which are the kernel's last parameters, and options of the launch.
    """

    __slots__ = ("_constants", "_grid", "_kernel", "_last", "_last_of_variant", "_variant")

    def __init__(self, kernel: Any, grid: tuple[int, ...], last: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self._kernel = kernel
        self._grid = (*grid, 1, 1)[:3]
        self._last = last
        self._constants = constants
        self._last_of_variant = (*last, *(constants[name] for name in kernel.arg_names if name in constants))
        self._variant: Callable[..., None] | None = None

    def __call__(self, *first: torch.Tensor | None) -> None:
        if self._variant is None:
            self.dispatch(*first)
        else:
            self._variant(*first, *self._last_of_variant)

    def dispatch(self, *first: torch.Tensor | None) -> None:
        """Launch through Triton's dispatch, and keep the variant."""
        variant = self._kernel.run(*first, *self._last, grid=self._grid, warmup=False, **self._constants)
        if variant is not None:  # None: Triton's interpreter
            self._variant = variant[self._grid]


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
