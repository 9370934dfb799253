"""The linear layers and the head of a class of transformers, computed by Quire's products.

The modules of the class stay, without their weights. The products have the names of the class's parameters, so that
formats, additions and the loader find them as they find those of a native model.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from quire.worker_proc.models.embedding import Embedding, gather_vocabulary, vocabulary_of_rank
from quire.worker_proc.models.linear import Linear
from quire.worker_proc.models.module import Module
from quire.worker_proc.models.transformers.build import stays_wide
from quire.worker_proc.models.transformers.divide import Division
from quire.worker_proc.models.transformers.forwards import Forward, compute_by
from quire.worker_proc.models.transformers.watch import pattern_of
from quire.worker_proc.models.weight_slot import Cut, WeightSlot
from quire.worker_proc.models.weights import Build, Projection, Rows
from quire.worker_proc.parallel.group import TensorParallel


class JoinedProduct:
    """The product of layers that have the same input, of which each takes its columns once.

    The layer that is called first computes it. A layer that is called with another tensor than that one, or again, has
    the product computed for it; so the result never depends on what the measuring has seen.
    """

    def __init__(self, projection: Projection, modules: Sequence[torch.nn.Linear]) -> None:
        self.modules = list(modules)
        self._projection = projection
        self._widths = [module.out_features for module in modules]
        self._width = sum(self._widths)
        self._input: torch.Tensor | None = None
        self._left: dict[int, torch.Tensor] = {}

    def columns(self, part: int, input: torch.Tensor) -> torch.Tensor:
        """Return the outputs of one layer, ``[..., inputs]`` → ``[..., outputs]``, a view with strided rows."""
        if input is not self._input or part not in self._left:
            y = self.whole(input).view(*input.shape[:-1], self._width)
            self._input, self._left = input, dict(enumerate(y.split_with_sizes(self._widths, -1)))
        found = self._left.pop(part)
        if not self._left:
            self._input = None
        return found

    def whole(self, input: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all layers side by side: ``[..., inputs]`` → ``[rows, outputs]``."""
        return self._projection(input.reshape(-1, input.shape[-1]))

    def forget(self) -> None:
        """Release the input and what no layer took. Call it after each step: a later tensor may have its identity."""
        self._input = None
        self._left = {}


class Products(Module):
    """All products of a model, in place of the modules that ``watch.replaceable`` found.

    A layer stays as it is if the pass that measured has not called it, if other code reads its weight, if it shares a
    weight with another layer, or if the class keeps it in float32.

    Args:
        division: the weights of ``model`` that are divided among ranks. The head is divided here.
    """

    def __init__(
        self, model: Any, replaceable: Sequence[Sequence[str]], build: Build, division: Division | None = None
    ) -> None:
        self.build = build
        self._division = division or Division()
        self.projections: list[Projection] = []
        self.embeddings: list[Embedding] = []
        self._model = model
        self._parents: list[str] = []
        self._tied: dict[str, str] = {}
        self._layers: list[tuple[torch.nn.Module, Forward]] = []
        self.joined: list[JoinedProduct] = []
        self._uses = Counter(id(weight) for part in model.modules() for weight in part._parameters.values())
        places = {pattern: (i, j) for i, group in enumerate(replaceable) for j, pattern in enumerate(group)}
        paths = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
        groups: defaultdict[tuple[str, int, str], dict[int, tuple[str, torch.nn.Linear]]] = defaultdict(dict)
        for path, module in model.named_modules():
            place = places.get(pattern_of(path))
            if place is None or paths[id(module)] > 1 or not self._may_compute(path, module):
                continue
            parent, _, name = path.rpartition(".")
            if module is model.get_output_embeddings():
                self._add_head(path, module, places)
            elif self._owns_weights(module):
                # Layers of a list have numbers for names, and thus one pattern.
                groups[parent, place[0], name if name.isdecimal() else ""][place[1]] = name, module
        for (parent, *_), found in groups.items():
            layers = [found[index] for index in sorted(found)]
            exchanges = any(f"{parent}.{name}" in self._division.exchanges for name, _ in layers)
            alike = len({module.bias is None for _, module in layers}) == 1 and not exchanges
            for each in [layers] if alike else [[layer] for layer in layers]:
                self._add(parent, each)

    @property
    def weights(self) -> set[int]:
        """Ids of the weights of the class that are not needed; call it before ``install``."""
        return {id(weight) for module, _ in self._layers for weight in module.parameters()}

    def install(self) -> None:
        """Take the weights out of the modules, let the products compute them, and let other modules exchange."""
        forwards = dict(self._layers)
        for module in forwards:
            module._parameters.clear()
        self._division.install(self._model, forwards)
        compute_by(self._model, forwards)

    def end_step(self) -> None:
        for joined in self.joined:
            joined.forget()

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the names of the class's parameters."""
        slots = {
            f"{parent}{name}": slot
            for parent, projection in zip(self._parents, self.projections, strict=True)
            for name, slot in projection.weight_slots().items()
        }
        return slots | {name: slots[of] for name, of in self._tied.items()}

    def prepack(self) -> None:
        """Let the native library gather rows of tied embeddings; call it after the projections are prepacked."""
        for rows in self.embeddings:
            rows.prepack()

    def _may_compute(self, path: str, module: torch.nn.Module) -> bool:
        """Whether a module is a linear layer whose weight has the precision of all others, and one range on a rank."""
        build, weights = self.build, module.parameters(recurse=False)
        part = self._division.parts.get(f"{path}.weight")
        if type(module) is not torch.nn.Linear or (part is not None and len(part.ranges) > 1):
            return False
        return all(
            weight.dtype is build.activation_dtype and not stays_wide(self._model, f"{path}.weight", build.dtype)
            for weight in weights
        )

    def _owns_weights(self, module: torch.nn.Module, of_first: int = 1) -> bool:
        """Whether no other module has its weights. ``of_first``: modules that may have the first one."""
        first, *others = module.parameters(recurse=False)
        return self._uses[id(first)] == of_first and all(self._uses[id(other)] == 1 for other in others)

    def _add(self, parent: str, layers: Sequence[tuple[str, torch.nn.Linear]]) -> None:
        """Add one product of layers of one module, which have as many inputs."""
        build, prefix, (name, first) = self.build.inside(parent), f"{parent}." if parent else "", layers[0]
        bias, part = first.bias is not None, self._division.parts.get(f"{prefix}{name}.weight")
        if part is not None and part.dim == 1:
            projection = build.columns_linear(name, first.out_features, part.ranges[0], part.shape[1], bias)
        else:
            rows = [self._rows(prefix, name, module) for name, module in layers]
            projection = build.rows_linear("{}", rows, first.in_features, bias)
        self.projections.append(projection)
        self._parents.append(prefix)
        if len(layers) == 1:
            product = partial(_product, projection, first.out_features)
            self._layers.append((first, self._division.exchanging(f"{prefix}{name}", product)))
            return
        joined = JoinedProduct(projection, [module for _, module in layers])
        self.joined.append(joined)
        self._layers += [(module, partial(joined.columns, part)) for part, module in enumerate(joined.modules)]

    def _rows(self, prefix: str, name: str, module: torch.nn.Linear) -> Rows:
        part = self._division.parts.get(f"{prefix}{name}.weight")
        if part is None:
            return Rows(name, slice(0, module.out_features), module.out_features)
        return Rows(name, part.ranges[0], part.shape[0])

    def _add_head(self, path: str, head: torch.nn.Linear, places: Mapping[str, Any]) -> None:
        """Add the head, and the embedding that is tied to it, whose rows are then those of the product's weight.

        An embedding of a class of its own, which may scale its rows, keeps its weight, and with it the head.
        """
        outputs, inputs, build = head.out_features, head.in_features, self.build
        tied = [(name, module) for name, module in self._model.named_modules() if _is_table_of(module, head)]
        if any(pattern_of(name) not in places for name, _ in tied) or not self._owns_weights(head, 1 + len(tied)):
            return
        vocab = vocabulary_of_rank(build.parallel, outputs)
        cut = Cut(path, vocab, outputs, slice(0, inputs), inputs)
        weight = build.weight(cut.num_rows, inputs)
        bias = None if head.bias is None else build.weight(cut.num_rows)
        linear = Linear(weight, bias, float32_output=True, cuts=[cut], stored_bias=bias is not None)
        self.projections.append(linear)
        self._parents.append("")
        self._layers.append((head, partial(_scores, linear, build.parallel, outputs)))
        for name, module in tied:
            rows = Embedding(build, linear, vocab, 1.0)
            self.embeddings.append(rows)
            self._tied[f"{name}.weight"] = f"{path}.weight"
            self._layers.append((module, partial(_rows_of, rows, inputs)))


def _is_table_of(module: torch.nn.Module, head: torch.nn.Linear) -> bool:
    return type(module) is torch.nn.Embedding and module.weight is head.weight and module.max_norm is None


def _product(projection: Projection, width: int, input: torch.Tensor) -> torch.Tensor:
    """Compute ``[..., inputs]`` → ``[..., width]``."""
    return projection(input.reshape(-1, input.shape[-1])).view(*input.shape[:-1], width)


def _scores(head: Linear, parallel: TensorParallel, width: int, input: torch.Tensor) -> torch.Tensor:
    """Compute ``[..., inputs]`` → ``[..., width]`` with the rows of all ranks."""
    scores = gather_vocabulary(parallel, head(input.reshape(-1, input.shape[-1])), width)
    return scores.view(*input.shape[:-1], width)


def _rows_of(table: Embedding, width: int, input: torch.Tensor) -> torch.Tensor:
    return table(input.reshape(-1)).view(*input.shape, width)
