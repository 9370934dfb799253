"""What a step's rows add to the outputs of linear layers, as an interface: LoRA adapters are one implementation."""

from collections.abc import Sequence
from typing import Protocol

import torch

from quire.worker_proc.models.weight_slot import Cut


class Addition(Protocol):
    """What is added at one layer."""

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add to ``y``, ``[tokens, outputs]``, in place. ``x``: the layer's inputs, ``[tokens, inputs]``."""
        ...


class ExpertAdditions(Protocol):
    """What is added in a layer of experts."""

    def of(self, expert: int, tokens: torch.Tensor) -> tuple[Addition, Addition] | None:
        """Return an expert's two additions, which then compute these tokens of the step; None if it has none."""
        ...

    @property
    def in_use(self) -> bool:
        """Whether a row of the running step has one."""
        ...


class Additions(Protocol):
    """Makes the addition of each layer while a model is built, and knows which of them the running step has.

    Attributes:
        active: whether a row of the running step has an addition. Recorded passes and graphs with and without them
            differ.
        changes_experts: whether such a row changes experts.
    """

    active: bool
    changes_experts: bool

    def at(self, layer: str, cuts: Sequence[Cut], *, routed: bool = False) -> Addition:
        """Return the addition of a fused layer, whose outputs are those of ``cuts``.

        Args:
            layer: full name of the layer that contains it.
            routed: its rows are the tokens of the last ``ExpertAdditions.of``, instead of those of the step.
        """
        ...

    def at_experts(self, pairs: Sequence[tuple[Addition, Addition]]) -> ExpertAdditions:
        """Return those of a layer of experts; ``pairs``: of gate and up, and of down, per expert."""
        ...

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest addition of one kind of row."""
        ...
