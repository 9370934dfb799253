"""How long a step takes: the seam between a simulated worker and the models of machines in ``costs/``."""

from typing import Protocol

from quire.launch.replay.run.step_shape import StepShape


class CostModel(Protocol):
    """Seconds of steps on a machine.

    Attributes:
        kv_bytes: what the machine has for the KV cache after weights and activations; 0 where it does not tell.
    """

    @property
    def kv_bytes(self) -> int: ...

    def seconds(self, step: StepShape) -> float:
        """From the worker's beginning of the step to its tokens being there."""
        ...

    def describe(self) -> str:
        """One line: which machine and model, and from where."""
        ...


class ConstantCost:
    """Every step takes the same."""

    def __init__(self, milliseconds: float) -> None:
        self._seconds = milliseconds / 1e3

    @property
    def kv_bytes(self) -> int:
        return 0

    def seconds(self, step: StepShape) -> float:
        return self._seconds

    def describe(self) -> str:
        return f"constant: {self._seconds * 1e3:g} ms per step"
