"""Modules of a class that keep a recurrent state, called with the states of the rows of a step.

A class reads and writes such states through its cache, by the number of its layer. Here each call of a module has a
cache of its own, which holds the states of exactly the rows that the call computes. A request begins with zeros, which
continue to the same result as no state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

import torch

from quire.protocol.model.measured_config import MeasuredState
from quire.worker_proc.models.transformers.tokenwise import TokenTensors, of_token
from quire.worker_proc.states.calls import NO_STATES, StateCall, StateStep

_CACHES = ("cache", "past_key_values", "cache_params")
"""What a cache is called in the forward methods of this and earlier versions."""

CONV, RECURRENT = "conv", "recurrent"

StateKey = tuple[str, int]
"""``CONV`` or ``RECURRENT``, and the number of the state among those of its layer."""


def cache_argument(module: torch.nn.Module) -> str | None:
    """Return the name of the argument by which a module takes a cache, or None if it takes none."""
    names = signature(module.forward).parameters
    return next((name for name in _CACHES if name in names), None)


class StateCache:
    """The cache of one call of one module: states of the rows that it computes, ``[rows, *shape]``.

    It has what the classes ask for about states, and nothing about keys and values.
    """

    def __init__(self, states: dict[StateKey, torch.Tensor]) -> None:
        self.states = states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get((CONV, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get((RECURRENT, state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **settings: Any
    ) -> torch.Tensor:
        """Return the last inputs and the given ones, ``[rows, channels, kept + tokens]``; the last ones are kept."""
        state = self.states[CONV, state_idx]
        inputs = torch.cat((state, conv_states), -1)
        state.copy_(inputs[..., -state.shape[-1] :])
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **settings: Any
    ) -> torch.Tensor:
        return self.states[RECURRENT, state_idx].copy_(recurrent_states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


@dataclass(slots=True)
class StateModule:
    """How a module is called: with hidden states, a cache, and what else its caller gives it by name.

    Arguments that its forward method does not name are left out: they are the model's, not the module's.

    Attributes:
        forward: the forward method of its class.
        hidden: name of the argument with the hidden states, its first one.
    """

    forward: Callable[..., Any]
    hidden: str
    cache: str
    others: frozenset[str]

    @classmethod
    def of(cls, module: torch.nn.Module) -> "StateModule":
        cache = cache_argument(module)
        assert cache is not None
        kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        hidden, *names = [each.name for each in signature(module.forward).parameters.values() if each.kind in kinds]
        # Masks hide padding alone, and no step has any.
        return cls(module.forward, hidden, cache, frozenset(names) - {cache, "attention_mask"})

    def arguments(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the hidden states of a call, and its other arguments."""
        hidden = args[0] if args else named[self.hidden]
        return hidden, {name: value for name, value in named.items() if name in self.others}

    def __call__(self, hidden: torch.Tensor, states: dict[StateKey, torch.Tensor], others: dict[str, Any]) -> Any:
        """``[rows, tokens, width]`` → the same, after which the states are those behind the last token."""
        return self.forward(hidden, **others, **{self.cache: StateCache(states)})


@dataclass(slots=True)
class CurrentStates:
    """The states of the step that one model computes now; empty between steps, whose pool is not kept alive."""

    step: StateStep = NO_STATES


@dataclass(slots=True)
class StateLayer:
    """Stands for the forward method of a module, and calls it for the rows of the step.

    Attributes:
        keys: its states, and their places among the tensors of the pool.
    """

    module: StateModule
    current: CurrentStates = field(repr=False)
    keys: dict[StateKey, int]

    def __call__(self, *args: Any, **named: Any) -> torch.Tensor:
        """``[1, num_tokens, width]`` → the same."""
        hidden, others = self.module.arguments(args, named)
        calls = self.current.step.calls
        if isinstance(hidden, TokenTensors):
            return self._each_token(calls, hidden, others)
        if len(calls) == 1 and calls[0].covers(hidden.shape[1]):
            return self._call(calls[0], hidden, others)
        whole: torch.Tensor | None = None
        for call in calls:
            own = self._call(call, hidden[:, call.tokens], others)
            if whole is None:
                whole = own.new_empty(1, hidden.shape[1], own.shape[2])
            whole[:, call.tokens] = own
        assert whole is not None, "a module with a state outside of a step"
        return whole

    def _each_token(self, calls: Sequence[StateCall], hidden: TokenTensors, others: dict[str, Any]) -> TokenTensors:
        """Advance the states token by token, in the order of the calls: deterministic mode."""
        found: dict[int, torch.Tensor] = {}
        for call in calls:
            for token, single in call.single_tokens():
                found[token] = self._call(single, hidden.tokens[token], of_token(others, token))
        TokenTensors.wrote()
        return TokenTensors([found[token] for token in range(len(hidden.tokens))])

    def _call(self, call: StateCall, hidden: torch.Tensor, others: dict[str, Any]) -> torch.Tensor:
        """Compute ``[1, n, width]``: n tokens of one row, or one token each of n rows."""
        tensors = self.current.step.tensors
        states = {key: call.read(tensors[place]) for key, place in self.keys.items()}
        rows = hidden if call.is_segment else hidden.transpose(0, 1)
        found: torch.Tensor = self.module(rows, states, others)
        for key, place in self.keys.items():
            call.write(tensors[place], states[key])
        return found if call.is_segment else found.transpose(0, 1)


def connect_states(model: torch.nn.Module, states: Sequence[MeasuredState]) -> CurrentStates:
    """Let the rows' slots be the cache of each module with a state; all share one ``CurrentStates``."""
    current = CurrentStates()
    keys: dict[str, dict[StateKey, int]] = {}
    for place, state in enumerate(states):
        keys.setdefault(state.module, {})[state.kind, state.index] = place
    for path, own in keys.items():
        module = model.get_submodule(path)
        setattr(module, "forward", StateLayer(StateModule.of(module), current, own))  # noqa: B010
    return current
