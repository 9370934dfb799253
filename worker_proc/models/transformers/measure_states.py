"""Finds the modules of a class that keep a recurrent state, and what they keep.

The pass that measures attention has no cache. Each module that takes one is called once more, alone, with a cache that
notes what the module keeps in it; on ``meta`` in a narrow dtype, which tells the states that follow the activations'
dtype from those that are always float32.
"""

from collections.abc import Sequence, Set
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch

from quire.protocol.model.measured_config import MeasuredState
from quire.worker_proc.models.transformers.build import Unservable
from quire.worker_proc.models.transformers.states import (
    CONV,
    RECURRENT,
    StateCache,
    StateKey,
    StateModule,
    cache_argument,
)

_TRIED_TOKENS = 9
_TRIED_CUTS = ((0, 4, 5, _TRIED_TOKENS), tuple(range(_TRIED_TOKENS + 1)))
_TOLERANCE = 1e-3

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Noted(StateCache):
    """An empty cache, which keeps what a module puts into it, and refuses what Quire's has not."""

    def __init__(self) -> None:
        super().__init__({})
        self.layers: set[int] = set()

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **settings: Any,
    ) -> torch.Tensor:
        self.layers.add(layer_idx)
        kept = conv_kernel_size or conv_states.shape[-1]
        self.states[CONV, state_idx] = conv_states.new_zeros(*conv_states.shape[:-1], kept)
        return super().update_conv_state(conv_states, layer_idx, state_idx)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **settings: Any
    ) -> torch.Tensor:
        self.layers.add(layer_idx)
        self.states[RECURRENT, state_idx] = recurrent_states.clone()
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.states)

    def __getattr__(self, name: str) -> Any:
        raise Unservable(f"reads {name} of a cache, which a cache of states alone does not have")


class Watched:
    """Notes the arguments of the modules that take a cache and have no other such module inside."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.calls: dict[str, list[Arguments]] = {}
        taking = {path for path, module in model.named_modules() if path and cache_argument(module) is not None}
        inner = [path for path in taking if not any(other.startswith(f"{path}.") for other in taking)]
        self._hooks = [
            model.get_submodule(path).register_forward_pre_hook(self._note(path), with_kwargs=True) for path in inner
        ]

    def _note(self, path: str) -> Any:
        def note(module: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.calls.setdefault(path, []).append((args, named))

        return note

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()


@torch.no_grad()
def measured_states(
    model: torch.nn.Module,
    calls: dict[str, list[Arguments]],
    attending: Set[str],
    expected: Sequence[tuple[int, str, int]],
) -> list[MeasuredState]:
    """Return the states of all modules, in the order of the forward pass.

    Args:
        calls: as ``Watched`` noted them.
        attending: paths of the modules that call attention.
        expected: number, kind and number of states of each layer for which transformers' own cache keeps a state.

    Raises:
        Unservable: a layer keeps a state in another way than Quire can call it.
    """
    found: list[MeasuredState] = []
    indices: dict[int, set[int]] = {}
    tried: set[tuple[Any, ...]] = set()
    for path, [(args, named), *more] in calls.items():
        if path in attending:
            continue
        module = model.get_submodule(path)
        called = StateModule.of(module)
        hidden, others = called.arguments(args, named)
        noted, result = _call_alone(module, hidden, others)
        if not noted.states:
            continue
        if more:
            raise Unservable(f"calls {path}, which keeps a state, twice")
        if len(args) > 1 or any(isinstance(value, torch.Tensor | tuple | list) for value in others.values()):
            raise Unservable(f"gives further tensors to {path}, which keeps a state")
        if not isinstance(result, torch.Tensor) or result.shape[:-1] != hidden.shape[:-1]:
            raise Unservable(f"has a {type(module).__name__}, which returns more than its rows")
        for layer in noted.layers:
            indices.setdefault(layer, set()).update(index for _, index in noted.states)
        shapes = {key: tuple(state.shape[1:]) for key, state in noted.states.items()}
        alike = type(module), hidden.shape[-1], *shapes.items()
        if alike not in tried:
            tried.add(alike)
            _require_continuing(module, called, hidden.shape[-1], shapes, others)
        found += [
            MeasuredState(
                module=path,
                kind=key[0],
                index=key[1],
                shape=shapes[key],
                dtype="" if state.dtype is torch.bfloat16 else str(state.dtype).removeprefix("torch."),
            )
            for key, state in noted.states.items()
        ]
    for layer, kind, count in expected:
        if indices.get(layer) != set(range(count)):
            raise Unservable(f"has layers of kind {kind}, whose state Quire cannot give to a module alone")
    return found


def _call_alone(module: torch.nn.Module, hidden: torch.Tensor, others: dict[str, Any]) -> tuple[_Noted, Any]:
    """Return what a module keeps and returns. What fails, such as a layer of experts, keeps nothing."""
    noted, alone = _Noted(), deepcopy(module).to(device="meta", dtype=torch.bfloat16)
    rows = torch.empty_like(hidden, device="meta", dtype=torch.bfloat16)
    called = StateModule.of(alone)
    try:
        return noted, called.forward(rows, **others, **{called.cache: noted})
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return _Noted(), None


def _require_continuing(
    module: torch.nn.Module, called: StateModule, width: int, shapes: dict[StateKey, tuple[int, ...]], others: Any
) -> None:
    """Check with random weights that chunks, each from the state of the one before, compute what one call does.

    Raises:
        Unservable: they do not. Some code uses a state for one token at a time only.
    """
    trial = deepcopy(module).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    for weight in trial.parameters():
        scale = 0.3 if weight.dim() < 2 else weight.shape[-1] ** -0.5
        weight.copy_(scale * torch.randn(weight.shape, generator=generator))
    for buffer in trial.buffers():
        buffer.fill_(1)
    forward = StateModule.of(trial)
    rows = torch.randn(1, _TRIED_TOKENS, width, generator=generator)
    wanted = forward.forward(rows, **others, **{called.cache: _Noted()})
    for cuts in _TRIED_CUTS:
        states = {key: torch.zeros(1, *shape) for key, shape in shapes.items()}
        parts = [forward(rows[:, start:stop], states, others) for start, stop in pairwise(cuts)]
        if not torch.allclose(
            torch.cat(parts, 1), wanted, rtol=_TOLERANCE, atol=_TOLERANCE * float(wanted.abs().max())
        ):
            raise Unservable(
                f"has layers that continue a state by one token only, so that prompts could not be cut into chunks "
                f"({type(module).__name__})"
            )
