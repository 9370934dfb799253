"""How long a step takes: the seam between a simulated worker and the models of machines in ``costs/``."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class StepShape:
    """What a step's duration depends on.

    Attributes:
        prefills: (new tokens, tokens of context before them) of each request that computes more than one token.
        num_decodes: requests that compute one token.
        decode_context: tokens that these attend to, added up.
        num_samples: rows that sample.
        longest_decode: what the one with the longest context attends to; 0: not known.
    """

    prefills: list[tuple[int, int]]
    num_decodes: int
    decode_context: int
    num_samples: int
    longest_decode: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(tokens for tokens, _ in self.prefills)


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
