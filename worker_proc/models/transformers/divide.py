"""Divides a class of transformers among ranks, by the plan for tensor parallelism that the class brings (``tp_plan``).

A plan names modules and weights and gives each a style: which part of a weight a rank holds, and what the ranks
exchange. ``ranks.py`` tries whether a class computes the same with it.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from quire.worker_proc.models.transformers.build import Unservable, base_name
from quire.worker_proc.models.transformers.forwards import Forward, compute_by
from quire.worker_proc.models.transformers.watch import pattern_of
from quire.worker_proc.models.weight_slot import WeightSlot
from quire.worker_proc.parallel.group import TensorParallel

Exchange = Callable[..., torch.Tensor]
"""Calls its first argument, the forward pass of a module, with the others, and exchanges inputs or outputs."""

_BY_OUTPUTS = ("colwise", "colwise_gather_output", "colwise_rep")
_BY_INPUTS = ("rowwise", "rowwise_split_input", "rowwise_rep")
_PACKED = {"packed_colwise": -2, "packed_rowwise": -1}
_DIMS = dict.fromkeys(_BY_OUTPUTS, -2) | dict.fromkeys(_BY_INPUTS, -1) | _PACKED
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params", "embedding_rowwise")
"""Styles whose weights all ranks hold: norms, gradients that Quire does not have, and tables but the head's."""


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of a weight: ranges of one dimension, of which a packed weight has two.

    Attributes:
        shape: of the whole weight.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[slice, ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        found = [whole.narrow(self.dim, each.start, each.stop - each.start) for each in self.ranges]
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)

    def slot(self, target: torch.Tensor) -> WeightSlot:
        if len(self.ranges) == 1:
            before = tuple(slice(0, length) for length in self.shape[: self.dim])
            return WeightSlot(target, self.shape, (*before, self.ranges[0]))

        def put(values: torch.Tensor) -> str | None:
            target.copy_(self.of(values))
            return None if target.isfinite().all() else "has non-finite values"

        return WeightSlot(target, self.shape, put=put)


@dataclass(slots=True)
class Division:
    """What a rank holds and exchanges; of a model on one rank it is empty.

    Attributes:
        parts: by the paths of weights. Others are whole.
        exchanges: by the paths of modules.
        rank: of this process.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    exchanges: dict[str, Exchange] = field(default_factory=dict)
    rank: int = 0

    def exchanging(self, path: str, forward: Forward) -> Forward:
        """Return the forward pass of a module with what it exchanges."""
        exchange = self.exchanges.get(path)
        return forward if exchange is None else partial(exchange, forward)

    def install(self, model: Any, without: Collection[torch.nn.Module] = ()) -> None:
        """Let modules exchange, but those in ``without``."""
        modules = dict(model.named_modules())  # get_submodule would find functions that already compute modules
        left = {path: modules[path] for path in self.exchanges if modules[path] not in without}
        compute_by(model, {module: self.exchanging(path, self._own(path, module)) for path, module in left.items()})

    def _own(self, path: str, module: Any) -> Forward:
        """Return the forward pass of a module. Where ranks sum the outputs of a layer, only rank 0 adds its bias."""
        part = self.parts.get(f"{path}.weight")
        if part is not None and part.dim == 1 and self.rank > 0:
            return partial(_without_bias, module)
        own: Forward = module.forward
        return own


def divide(model: Any, parallel: TensorParallel) -> Division:
    """Divide the weights of a model on ``meta``. The embedding of tokens and the head stay whole.

    Raises:
        Unservable: there is no plan, or it cannot be served, or a weight has no equal parts for all ranks.
    """
    plan = getattr(model, "tp_plan", None) or {}
    if not plan:
        raise Unservable(f"has no plan for tensor parallelism in transformers (tp_plan of {type(model).__name__})")
    division = Division(rank=parallel.rank)
    for path, module in _modules(model):
        style = plan.get(pattern_of(path), "replicate")
        linear = style in _DIMS
        if linear and type(module) is not torch.nn.Linear:
            raise Unservable(f"divides {path} {style}, which is a {type(module).__name__} and no plain linear layer")
        exchange = _exchange(path, style, parallel)
        if exchange is not None:
            division.exchanges[path] = exchange
        for name, weight in list(module._parameters.items()):
            of_weight = plan.get(pattern_of(f"{path}.{name}"), style if linear else "replicate")
            if weight is None or of_weight in _WHOLE or (of_weight in _BY_INPUTS and weight.dim() == 1):
                continue
            part = _part(f"{path}.{name}", of_weight, weight.shape, parallel)
            division.parts[f"{path}.{name}"] = part
            module._parameters[name] = torch.nn.Parameter(part.of(weight), requires_grad=False)
        if linear:
            module.out_features, module.in_features = module.weight.shape
    if not division.parts:
        raise Unservable(f"has a plan for tensor parallelism (tp_plan of {type(model).__name__}) that divides no layer")
    return division


def _modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules below the base model with their paths; tables of tokens have no place in a plan of Quire's."""
    base, tables = base_name(model), (model.get_input_embeddings(), model.get_output_embeddings())
    for path, module in list(model.named_modules()):
        if path.startswith(f"{base}.") and module not in tables:
            yield path, module


def _part(path: str, style: str, shape: torch.Size, parallel: TensorParallel) -> Part:
    if style not in _DIMS:
        raise Unservable(_unknown(path, style))
    dim = max(len(shape) + _DIMS[style], 0)
    pieces = 2 if style in _PACKED else 1
    width, rest = divmod(shape[dim], pieces * parallel.size)
    if rest:
        raise Unservable(f"has no {parallel.size} equal parts of {path}, whose shape is {list(shape)}")
    starts = [(piece * parallel.size + parallel.rank) * width for piece in range(pieces)]
    return Part(tuple(shape), dim, tuple(slice(start, start + width) for start in starts))


def _exchange(path: str, style: str, parallel: TensorParallel) -> Exchange | None:
    if style in _BY_OUTPUTS:
        return None if style == "colwise" else partial(_gathered, parallel)
    if style in _BY_INPUTS:
        return partial(_summed if style == "rowwise" else _split_and_summed, parallel)
    if style in ("moe_tp_experts", "all_reduce"):
        return partial(_summed, parallel)
    if style == "moe_identity_expert":
        return partial(_shared, parallel)
    if style in _WHOLE or style in _PACKED:
        return None
    raise Unservable(_unknown(path, style))


def _unknown(path: str, style: str) -> str:
    return f"divides {path} {style} in its plan for tensor parallelism (tp_plan), a style that Quire does not serve"


def _summed(parallel: TensorParallel, forward: Forward, *given: Any, **more: Any) -> torch.Tensor:
    return parallel.all_reduce(forward(*given, **more))


def _split_and_summed(parallel: TensorParallel, forward: Forward, input: torch.Tensor) -> torch.Tensor:
    """Compute a layer that all ranks give the same input, of which each takes its part."""
    return parallel.all_reduce(forward(input.chunk(parallel.size, -1)[parallel.rank]))


def _gathered(parallel: TensorParallel, forward: Forward, input: torch.Tensor) -> torch.Tensor:
    own = forward(input)
    return parallel.all_gather(own.reshape(-1, own.shape[-1])).view(*own.shape[:-1], -1)


def _shared(parallel: TensorParallel, forward: Forward, input: torch.Tensor) -> torch.Tensor:
    """Compute what each rank computes alike in a module whose outputs are summed."""
    return forward(input / parallel.size)


def _without_bias(module: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return F.linear(input, module.weight)
