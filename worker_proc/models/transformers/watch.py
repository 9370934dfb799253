"""Watches the forward pass that measures: which layers Quire may compute, and which modules count tokens.

A layer's weight is read by the layer's own code, or by any other code of the class. Only the former can be replaced,
and nothing but running the class shows which it is.
"""

import re
import sys
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_CALLS = "quire_calls"
_READ = "quire_read"
_COUNTS = {"arange", "range", "linspace", "cumsum"}


class _Watched(torch.nn.Module):
    """Notes the inputs of a layer, and whether other code reads its weights."""

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__["_parameters"]:
            self.__dict__[_READ] = True
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> Any:
        # The version tells whether the class has written to the same tensor between two calls.
        self.__dict__[_CALLS].append((x, x._version))
        read = self.__dict__[_READ]
        y = super().forward(x)
        self.__dict__[_READ] = read
        return y


_KINDS: dict[type[torch.nn.Module], Any] = {
    kind: type(f"Watched{kind.__name__}", (_Watched, kind), {}) for kind in (torch.nn.Linear, torch.nn.Embedding)
}


def watch(model: torch.nn.Module) -> None:
    """Watch the layers of exactly these two classes; a class derived from one computes something else."""
    for module in model.modules():
        kind = _KINDS.get(type(module))
        if kind is not None:
            module.__dict__[_CALLS], module.__dict__[_READ] = [], False
            module.__class__ = kind


def replaceable(model: torch.nn.Module) -> list[list[str]]:
    """Return the patterns of the layers whose weights no other code has read, and which were called.

    Layers of one list are children of one module that had the same input, so that one product can compute them. A
    pattern stands for all layers: the pass need not have called each expert.
    """
    usable: dict[str, bool] = {}
    called: set[str] = set()
    groups: defaultdict[str, set[tuple[tuple[str, ...], ...]]] = defaultdict(set)
    for path, parent in model.named_modules():
        of_input: dict[tuple[int, int] | str, list[str]] = {}
        for name, child in parent.named_children():
            if not isinstance(child, _Watched):
                continue
            pattern = pattern_of(f"{path}.{name}" if path else name)
            calls = child.__dict__[_CALLS]
            usable[pattern] = usable.get(pattern, True) and not child.__dict__[_READ]
            called |= {pattern} if calls else set()
            alone = len(calls) != 1 or name.isdecimal() or isinstance(child, torch.nn.Embedding)
            of_input.setdefault(pattern if alone else (id(calls[0][0]), calls[0][1]), []).append(pattern)
        if any(isinstance(key, tuple) for key in of_input):
            groups[pattern_of(path)].add(tuple(tuple(group) for group in of_input.values()))
    found = {pattern for pattern in called if usable[pattern]}
    # Layers that some module computes from the same input, and another one of its kind does not, stay apart.
    agreed = [group for ways in groups.values() if len(ways) == 1 for group in next(iter(ways))]
    lists = [[pattern for pattern in group if pattern in found] for group in agreed]
    joined = {pattern for group in lists for pattern in group}
    return [group for group in lists if group] + [[pattern] for pattern in sorted(found - joined)]


class Functions(TorchFunctionMode):
    """Watches the functions of torch that a pass calls, and computes products with weights of one zero at no cost.

    Attributes:
        counting: modules that make positions themselves: a sequence as long as the pass, or the beginning of a table.
    """

    def __init__(self, num_tokens: int) -> None:
        """``num_tokens``: tokens of the pass, a number that no dimension of the model has."""
        super().__init__()
        self.counting: set[Any] = set()
        self._num_tokens = num_tokens

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear and len(args) > 1:
            rows, weight = args[:2]
            if not any(weight.stride()) and rows.shape[-1] == weight.shape[1]:
                return rows.new_zeros(*rows.shape[:-1], len(weight))
        made, name = function(*args, **(kwargs or {})), getattr(function, "__name__", "")
        if self._of_pass(made) and (name in _COUNTS or (name == "__getitem__" and not self._of_pass(*args))):
            frame: Any = sys._getframe(1)
            while frame is not None and not isinstance(frame.f_locals.get("self"), torch.nn.Module):
                frame = frame.f_back
            self.counting.add(frame and frame.f_locals["self"])
        return made

    def _of_pass(self, *values: Any) -> bool:
        tensors = (each for value in values for each in (value if isinstance(value, tuple) else [value]))
        return any(isinstance(each, torch.Tensor) and self._num_tokens in each.shape for each in tensors)


def pattern_of(path: str) -> str:
    """Return a module's path with ``*`` for each number, which is the same in all layers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
