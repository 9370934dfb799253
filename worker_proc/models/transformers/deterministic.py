"""Deterministic mode of a model of transformers: its code runs token by token (``tokenwise.py``).

What Quire computes takes all tokens of a step: its products, norms, gates and attention are batch-invariant.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from quire.protocol.errors import MAX_SHOWN, ConfigError
from quire.protocol.process.log import one_line
from quire.worker_proc.models.transformers.attention import Attend, Call, connect
from quire.worker_proc.models.transformers.forwards import Forward, compute_by, computed_by
from quire.worker_proc.models.transformers.tokenwise import DependsOnValues, TokenTensors, one_by_one


def serve_batches(model: torch.nn.Module, attention: Mapping[torch.nn.Module, Attend]) -> None:
    """Give ``TokenTensors`` to what Quire computes in a model as one batch.

    Args:
        attention: what computes the attention of each module that calls it.
    """
    compute_by(model, {module: partial(_of_batch, forward) for module, forward in computed_by(model).items()})
    for module, attend in attention.items():
        connect(module, partial(_attend_batch, attend))


def _of_batch(forward: Forward, *given: Any, **named: Any) -> Any:
    (value,) = (*given, *named.values())
    return TokenTensors.of(forward(value.batch())) if isinstance(value, TokenTensors) else forward(value)


def _attend_batch(attend: Attend, call: Call) -> torch.Tensor:
    parts = (call.query, call.key, call.value)
    query, key, value = (torch.cat(part.tokens, 2) for part in parts if isinstance(part, TokenTensors))
    out = attend(replace(call, query=query, key=key, value=value))
    return TokenTensors.of(out.transpose(0, 1).unsqueeze(1))


def settle(
    model: torch.nn.Module, of_all: Set[torch.nn.Module], run: Callable[[], torch.Tensor], *, adapted: bool
) -> torch.Tensor:
    """Find the modules that cannot run for all tokens at once by running the model, and call them for one at a time.

    These are modules that choose what they compute by the values of a token, such as a loop over its experts. All
    modules of one class are alike.

    Args:
        of_all: modules that need all tokens of a step, for attention or states.
        run: one pass over a few tokens.
        adapted: linear layers have additions, which know a row by its place in the batch.

    Returns:
        What ``run`` returns at last.

    Raises:
        ConfigError: the model has a module that cannot be called for one token at a time.
    """
    alone: set[type] = set()
    while True:
        try:
            return run()
        except Exception as error:  # any code of the library may fail in its own way when it reads values
            module = _failed_in(model, error)
            problem = str(error) if isinstance(error, DependsOnValues) else f"fails ({type(error).__name__}: {error})"
            if module is None or type(module) in alone or not of_all.isdisjoint(module.modules()):
                raise _refusal(model if module is None else module, problem) from error
            if adapted and computed_by(module):
                raise _refusal(module, f"{problem}, and has layers for adapters") from error
            alone.add(type(module))
            for each in model.modules():
                if type(each) is type(module):
                    setattr(each, "forward", one_by_one(each.forward))  # noqa: B010


def _refusal(module: torch.nn.Module, problem: str) -> ConfigError:
    text = one_line(problem)[:MAX_SHOWN]
    return ConfigError(
        f"--deterministic is not supported for {type(module).__name__} of transformers, which {text}: omit the flag"
    )


def _failed_in(model: torch.nn.Module, error: Exception) -> torch.nn.Module | None:
    """Return the innermost module whose forward pass has raised an error."""
    parts = set(model.modules())
    found = [part for part in _callers(error) if part in parts]
    return found[-1] if found else None


def _callers(error: Exception) -> Iterator[torch.nn.Module]:
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and trace.tb_frame.f_code.co_name == "forward":
            yield owner
        trace = trace.tb_next
