"""The interface of cost models, which give a simulated step its duration, and the constant model."""

from typing import Protocol

from quire.replay.run.step_shape import StepShape


class CostModel(Protocol):
    """The duration of a step on a simulated machine.

    Attributes:
        kv_bytes: memory for the KV cache after weights and activations; 0 if unknown.
    """

    @property
    def kv_bytes(self) -> int: ...

    def seconds(self, step: StepShape) -> float:
        """Return the seconds from the start of the step in the worker until its tokens are ready."""
        ...

    def describe(self) -> str:
        """Return one line with the machine, the model and the source of the figures."""
        ...


class ConstantCost:
    """The same duration for every step."""

    def __init__(self, milliseconds: float) -> None:
        self._seconds = milliseconds / 1e3

    @property
    def kv_bytes(self) -> int:
        return 0

    def seconds(self, step: StepShape) -> float:
        return self._seconds

    def describe(self) -> str:
        return f"constant: {self._seconds * 1e3:g} ms per step"
