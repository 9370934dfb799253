"""Functions that compute modules of a class of transformers in place of its own code."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

Forward = Callable[..., torch.Tensor]


def compute_by(model: torch.nn.Module, forwards: Mapping[torch.nn.Module, Forward]) -> None:
    """Let functions compute modules of a model in place of the forward pass of their class.

    A module stays where it is, as other code of its class may look at it. Its parent calls the function without the
    module's ``__call__``, which with its lookup takes as long as a small product.
    """
    for parent in model.modules():
        for name, module in parent.named_children():
            if module in forwards:
                setattr(module, "forward", forwards[module])  # noqa: B010
                parent.__dict__[name] = _Direct(forwards[module])
                parent.__dict__[name].module = module


def computed_by(model: torch.nn.Module) -> dict[torch.nn.Module, Forward]:
    """Return the modules below ``model`` that functions compute, and the functions."""
    places = (vars(parent).values() for parent in model.modules())
    return {each.module: each for place in places for each in place if isinstance(each, _Direct)}


class _Direct(partial):  # type: ignore[type-arg]
    """A function with the attributes of the module that it computes."""

    module: torch.nn.Module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)
