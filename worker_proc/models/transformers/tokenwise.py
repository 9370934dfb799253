"""Runs the code of a class for each token of a step alone, beside Quire's products and attention of all tokens.

The bits that an operator of torch computes may depend on the shape, the place in a vector register and the memory of
its tensors. Here each operator gets tensors of one token, whose shapes and layout are the same in every step. So a
token's bits depend on its own values, whatever else is in the batch, and no list of operators has to be trusted.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import repeat
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

Forward = Callable[..., Any]


class DependsOnValues(Exception):
    """What code does that cannot be done for all tokens at once: half a sentence whose subject is the code."""


class TokenTensors(torch.Tensor):
    """A tensor for each token of a step, which code sees as the tensor of one token.

    Each operator runs once per token. Views and writes are those of the tokens' own tensors.

    Attributes:
        tokens: tensors of one shape and layout.
    """

    tokens: list[torch.Tensor]
    _writes: ClassVar[int] = 0
    _batch: tuple[int, torch.Tensor] | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, tokens: Sequence[torch.Tensor]) -> "TokenTensors":
        first = tokens[0]
        made: TokenTensors = torch.Tensor._make_wrapper_subclass(
            cls, first.shape, strides=first.stride(), dtype=first.dtype, device=first.device
        )
        made.tokens, made._batch = list(tokens), None
        return made

    @classmethod
    def of(cls, batch: torch.Tensor) -> "TokenTensors":
        """Return the rows of ``[num_tokens, ...]``. Each is copied: its place in the batch would align it."""
        return cls([token.clone(memory_format=torch.contiguous_format) for token in batch.unbind(0)])

    def batch(self) -> torch.Tensor:
        """Return ``[num_tokens, ...]``: the same tensor until an operator writes to any token."""
        if self._batch is None or self._batch[0] != TokenTensors._writes:
            self._batch = TokenTensors._writes, torch.stack(self.tokens)
        return self._batch[1]

    @classmethod
    def wrote(cls) -> None:
        """Forget all batches: other code may have written to tensors of tokens."""
        cls._writes += 1

    def data_ptr(self) -> int:
        """Refuse what reads memory: there is none."""
        raise DependsOnValues("reads the memory of a tensor")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        written = _check(func, args, kwargs or {})
        columns = [_of_tokens(arg) for arg in args]
        if kwargs:
            names, count = list(kwargs), len(args)
            columns += [_of_tokens(arg) for arg in kwargs.values()]
            calls: Iterator[Any] = zip(*columns, strict=False)
            results = [func(*call[:count], **dict(zip(names, call[count:], strict=True))) for call in calls]
        else:
            results = [func(*call) for call in zip(*columns, strict=False)]
        for target in written:
            if target.tokens[0] is results[0]:
                return target
        return _joined(results)


def _of_tokens(value: Any) -> Iterable[Any]:
    """Return an argument of an operator for each token; without end where it is the same for all."""
    if isinstance(value, TokenTensors):
        return value.tokens
    if isinstance(value, list | tuple) and any(isinstance(each, TokenTensors) for each in value):
        return map(list, zip(*map(_of_tokens, value), strict=False))
    return repeat(value)


def _joined(results: Sequence[Any]) -> Any:
    """Return the results for each token as one.

    Raises:
        DependsOnValues: they are plain values, which code that follows would read as those of all tokens.
    """
    first = results[0]
    if isinstance(first, torch.Tensor):
        return TokenTensors(results)
    if isinstance(first, list | tuple):
        return type(first)(map(_joined, zip(*results, strict=True)))
    if first is not None:
        raise DependsOnValues(f"returns a plain value of each token ({type(first).__name__})")
    return None


@cache
def _traits(func: Any) -> tuple[bool, list[tuple[int, str]]]:
    """Return whether an operator's result has a shape or a plain value by its data, and the arguments it writes to."""
    by_value = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.intersection(func.tags)
    arguments = enumerate(func._schema.arguments)
    written = [(i, arg.name) for i, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write]
    return bool(by_value), written


def _check(func: Any, args: Any, kwargs: Any) -> list[TokenTensors]:
    """Return the tensors that an operator writes to.

    Raises:
        DependsOnValues: tokens cannot share the code that follows, or would share what it writes to.
    """
    by_value, places = _traits(func)
    if by_value and (func is not torch.ops.aten.index.Tensor or any(map(_is_mask, args[1]))):
        raise DependsOnValues(f"chooses what it computes by values ({func})")
    written = [args[place] if place < len(args) else kwargs.get(name) for place, name in places]
    for target in written:
        if target is None:
            continue
        tokens = target.tokens if isinstance(target, TokenTensors) else [target] * 2
        if len({token.data_ptr() for token in tokens}) < len(tokens):
            raise DependsOnValues(f"writes results of all tokens to one tensor ({func})")
    if written:
        TokenTensors.wrote()
    return [target for target in written if target is not None]


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def of_token(values: Any, token: int) -> Any:
    """Return values with the tensor of one token in place of each ``TokenTensors`` in them."""
    return tree_map_only(TokenTensors, lambda each: each.tokens[token], values)


def one_by_one(compute: Forward) -> Forward:
    """Return ``compute`` with a call for each token, of plain tensors: for code that ``TokenTensors`` cannot run.

    The calls are in the order of the step's tokens.
    """

    def computed(*args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, TokenTensors)]
        if not given:
            return compute(*args, **kwargs)
        results = []
        for token in range(len(given[0].tokens)):
            own_args, own_kwargs = of_token((args, kwargs), token)
            results.append(tree_flatten(compute(*own_args, **own_kwargs)))
        TokenTensors.wrote()
        return tree_unflatten(list(map(_joined, zip(*(found for found, _ in results), strict=True))), results[0][1])

    return computed
