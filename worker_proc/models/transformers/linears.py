"""The linear layers and the head of a class of transformers, computed by Quire's products.

The modules of the class stay, without their weights. The products have the names of the class's parameters, so that
formats, additions and the loader find them as they find those of a native model.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from quire.worker_proc.models.embedding import Embedding
from quire.worker_proc.models.linear import Linear
from quire.worker_proc.models.module import Module
from quire.worker_proc.models.transformers.build import stays_wide
from quire.worker_proc.models.transformers.watch import pattern_of
from quire.worker_proc.models.weight_slot import Cut, WeightSlot
from quire.worker_proc.models.weights import Build, Projection, Rows

Forward = Callable[[torch.Tensor], torch.Tensor]


def compute_by(model: torch.nn.Module, forwards: Mapping[torch.nn.Module, Forward]) -> None:
    """Let functions compute modules of a model in place of the forward pass of their class.

    A module stays where it is, as other code of its class may look at it. Its parent calls the function without the
    module's ``__call__``, which with its lookup takes as long as a small product.
    """
    for parent in model.modules():
        for name, module in parent.named_children():
            if module in forwards:
                setattr(module, "forward", forwards[module])  # noqa: B010
                parent.__dict__[name] = _Direct(forwards[module])
                parent.__dict__[name].module = module


def computed_by(model: torch.nn.Module) -> dict[torch.nn.Module, Forward]:
    """Return the modules below ``model`` that functions compute, and the functions."""
    places = (vars(parent).values() for parent in model.modules())
    return {each.module: each for place in places for each in place if isinstance(each, _Direct)}


class _Direct(partial):  # type: ignore[type-arg]
    """A function with the attributes of the module that it computes."""

    module: torch.nn.Module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


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
    """

    def __init__(self, model: Any, replaceable: Sequence[Sequence[str]], build: Build) -> None:
        self.build = build
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
            alike = len({module.bias is None for _, module in layers}) == 1
            for each in [layers] if alike else [[layer] for layer in layers]:
                self._add(parent, each)

    @property
    def weights(self) -> set[int]:
        """Ids of the weights of the class that are not needed; call it before ``install``."""
        return {id(weight) for module, _ in self._layers for weight in module.parameters()}

    def install(self) -> None:
        """Take the weights out of the modules, and let the products compute them."""
        for module, _ in self._layers:
            module._parameters.clear()
        compute_by(self._model, dict(self._layers))

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
        """Whether a module is a linear layer whose weight has the precision of all others."""
        build, weights = self.build, module.parameters(recurse=False)
        return type(module) is torch.nn.Linear and all(
            weight.dtype is build.activation_dtype and not stays_wide(self._model, f"{path}.weight", build.dtype)
            for weight in weights
        )

    def _owns_weights(self, module: torch.nn.Module, of_first: int = 1) -> bool:
        """Whether no other module has its weights. ``of_first``: modules that may have the first one."""
        first, *others = module.parameters(recurse=False)
        return self._uses[id(first)] == of_first and all(self._uses[id(other)] == 1 for other in others)

    def _add(self, parent: str, layers: Sequence[tuple[str, torch.nn.Linear]]) -> None:
        """Add one product of layers of one module, which have as many inputs."""
        widths = [module.out_features for _, module in layers]
        rows = [Rows(name, slice(0, width), width) for (name, _), width in zip(layers, widths, strict=True)]
        first = layers[0][1]
        projection = self.build.inside(parent).rows_linear("{}", rows, first.in_features, first.bias is not None)
        self.projections.append(projection)
        self._parents.append(f"{parent}." if parent else "")
        if len(layers) == 1:
            self._layers.append((first, partial(_product, projection, widths[0])))
            return
        joined = JoinedProduct(projection, [module for _, module in layers])
        self.joined.append(joined)
        self._layers += [(module, partial(joined.columns, part)) for part, module in enumerate(joined.modules)]

    def _add_head(self, path: str, head: torch.nn.Linear, places: Mapping[str, Any]) -> None:
        """Add the head, and the embedding that is tied to it, whose rows are then those of the product's weight.

        An embedding of a class of its own, which may scale its rows, keeps its weight, and with it the head.
        """
        outputs, inputs, build = head.out_features, head.in_features, self.build
        tied = [(name, module) for name, module in self._model.named_modules() if _is_table_of(module, head)]
        if any(pattern_of(name) not in places for name, _ in tied) or not self._owns_weights(head, 1 + len(tied)):
            return
        cut = Cut(path, slice(0, outputs), outputs, slice(0, inputs), inputs)
        weight, bias = build.weight(outputs, inputs), None if head.bias is None else build.weight(outputs)
        linear = Linear(weight, bias, float32_output=True, cuts=[cut], stored_bias=bias is not None)
        self.projections.append(linear)
        self._parents.append("")
        self._layers.append((head, partial(_product, linear, outputs)))
        for name, module in tied:
            rows = Embedding(build, linear, slice(0, outputs), 1.0)
            self.embeddings.append(rows)
            self._tied[f"{name}.weight"] = f"{path}.weight"
            self._layers.append((module, partial(_rows_of, rows, inputs)))


def _is_table_of(module: torch.nn.Module, head: torch.nn.Linear) -> bool:
    return type(module) is torch.nn.Embedding and module.weight is head.weight and module.max_norm is None


def _product(projection: Projection, width: int, input: torch.Tensor) -> torch.Tensor:
    """Compute ``[..., inputs]`` → ``[..., width]``."""
    return projection(input.reshape(-1, input.shape[-1])).view(*input.shape[:-1], width)


def _rows_of(table: Embedding, width: int, input: torch.Tensor) -> torch.Tensor:
    return table(input.reshape(-1)).view(*input.shape, width)
