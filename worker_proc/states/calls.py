"""The recurrent states of a step's rows, as a model with such states reads and writes them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

Places = slice | torch.Tensor
"""A range, or int64 ``[n]`` on the device."""


@dataclass(frozen=True, slots=True)
class StateCall:
    """Tokens that a module with a state computes at once: some of one row, or one each of several rows.

    Attributes:
        tokens: their places among the step's tokens.
        source: places in the pool of the states before them, one for each row.
        target: places of the states behind them. A draft's is not its source, since the draft may be rejected.
        is_segment: all tokens are of one row.
    """

    tokens: Places
    source: Places
    target: Places
    is_segment: bool

    def covers(self, num_tokens: int) -> bool:
        """Whether these are all tokens of a step, in order."""
        return self.tokens == slice(0, num_tokens) if isinstance(self.tokens, slice) else False

    def single_tokens(self) -> Iterator[tuple[int, "StateCall"]]:
        """Yield the place of each token in the step, and a call of it alone. All places must be ranges."""
        assert isinstance(self.tokens, slice) and isinstance(self.source, slice) and isinstance(self.target, slice)
        for index, token in enumerate(range(self.tokens.start, self.tokens.stop)):
            row = 0 if self.is_segment else index
            source = target = slice(self.target.start + row, self.target.start + row + 1)
            if self.source is not self.target and not (self.is_segment and index):
                source = slice(self.source.start + row, self.source.start + row + 1)
            yield token, StateCall(slice(token, token + 1), source, target, self.is_segment)

    def read(self, pool: torch.Tensor) -> torch.Tensor:
        """Return the states before the tokens, ``[slots, *shape]`` → ``[rows, *shape]``: a view, if it may be one."""
        states = pool[self.source]
        return states if self._in_place or not isinstance(self.source, slice) else states.clone()

    def write(self, pool: torch.Tensor, states: torch.Tensor) -> None:
        """Keep the states behind the tokens, which are in the tensor that ``read`` returned."""
        if not self._in_place:
            pool[self.target] = states

    @property
    def _in_place(self) -> bool:
        return isinstance(self.source, slice) and self.source is self.target


@dataclass(frozen=True, slots=True)
class StateStep:
    """The states of a step.

    Attributes:
        calls: in this order, since a later one may begin where an earlier one of its row ends.
        tensors: ``[slots, *shape]`` each, in the order of ``KVLayout.states``.
    """

    calls: Sequence[StateCall]
    tensors: Sequence[torch.Tensor]


NO_STATES = StateStep((), ())
"""Of a model without recurrent states."""
