"""Finds the linear layers and embeddings of a class that Quire may compute, by watching the forward pass that measures.

A layer's weight is read by the layer's own code, or by any other code of the class. Only the former can be replaced,
and nothing but running the class shows which it is.
"""

import re
from collections import defaultdict
from typing import Any, ClassVar

import torch

_CALLS = "quire_calls"
_READ = "quire_read"


class _Watched(torch.nn.Module):
    """Notes the inputs of a layer, and whether other code reads its weights."""

    own: ClassVar[type[torch.nn.Module]]

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__["_parameters"]:
            self.__dict__[_READ] = True
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> Any:
        # The version tells whether the class has written to the same tensor between two calls.
        self.__dict__[_CALLS].append((x, x._version))
        read = self.__dict__[_READ]
        y = self.own.forward(self, x)
        self.__dict__[_READ] = read
        return y


class _WatchedLinear(_Watched, torch.nn.Linear):
    own = torch.nn.Linear


class _WatchedEmbedding(_Watched, torch.nn.Embedding):
    own = torch.nn.Embedding


_KINDS: dict[type[torch.nn.Module], type[_Watched]] = {
    torch.nn.Linear: _WatchedLinear,
    torch.nn.Embedding: _WatchedEmbedding,
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


def pattern_of(path: str) -> str:
    """Return a module's path with ``*`` for each number, which is the same in all layers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
