"""Allocation of a decoder's weights, and each rank's share of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quire.protocol.errors import ConfigError
from quire.protocol.model.model_config import ModelConfig
from quire.protocol.model.weight_format import WeightFormat
from quire.worker_proc.models.additions import Addition, Additions
from quire.worker_proc.models.formats.choose import quantised_linear
from quire.worker_proc.models.linear import Linear
from quire.worker_proc.models.module import Module
from quire.worker_proc.models.ops import Ops
from quire.worker_proc.models.routes import Routes
from quire.worker_proc.models.row_parts import RowParts
from quire.worker_proc.models.weight_slot import Cut, WeightSlot
from quire.worker_proc.parallel.group import TensorParallel


class WithAddition(Module):
    """A linear layer with an addition, before anything else reads its outputs."""

    def __init__(self, projection: Linear | RowParts, addition: Addition) -> None:
        self.projection = projection
        self._addition = addition

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.projection(x)
        self._addition.add(x, y)
        return y

    def weight_slots(self) -> dict[str, WeightSlot]:
        return self.projection.weight_slots()


Projection = Linear | RowParts | WithAddition


@dataclass(frozen=True, slots=True)
class HeadShare:
    """A rank's share of the attention heads.

    With more ranks than KV heads, all ranks whose query heads read a KV head hold a copy of it (``kv_replicas``).
    """

    num_heads: int
    num_kv_heads: int
    first_head: int
    first_kv_head: int
    kv_replicas: int

    @classmethod
    def of_rank(cls, num_heads: int, kv_heads: int, rank: int, size: int) -> "HeadShare":
        if num_heads % size or (kv_heads % size and size % kv_heads):
            raise ConfigError(
                f"tensor_parallel_size {size} does not divide the model's {num_heads} heads and {kv_heads} KV heads"
            )
        own, own_kv = num_heads // size, max(kv_heads // size, 1)
        replicas = max(size // kv_heads, 1)
        return cls(own, own_kv, rank * own, rank // replicas * own_kv, replicas)


@dataclass(frozen=True, slots=True)
class Build:
    """Arguments that all parts of a decoder are built with, and the functions that allocate their weights.

    Attributes:
        dtype: dtype of the weights.
        activation_dtype: dtype of activations, norm weights and rotary tables.
        layer: full name of the layer that is built, for example ``model.layers.0``.
        additions: what rows add to linear layers; None: nothing.
        routes: collects the chosen experts; None: they are not kept.
    """

    config: ModelConfig
    dtype: torch.dtype
    activation_dtype: torch.dtype
    device: torch.device | str
    ops: Ops
    parallel: TensorParallel
    layer: str = ""
    additions: Additions | None = None
    routes: Routes | None = None

    def inside(self, layer: str) -> "Build":
        return replace(self, layer=layer)

    def weight(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return torch.nn.Parameter(tensor, requires_grad=False)

    def norm(self, width: int | None = None) -> torch.nn.Parameter:
        """Allocate a norm's weight; ``width`` defaults to the hidden size."""
        return self.weight(width or self.config.hidden_size, dtype=self.activation_dtype)

    def norm_slot(self, weight: torch.Tensor, part: tuple[slice, ...] = (), size: int | None = None) -> WeightSlot:
        return WeightSlot(weight.data, (size or len(weight),), part, self.config.norm_offset)

    def rows_linear(
        self, name: str, parts: Sequence["Rows"], inputs: int, bias: bool, *, plain: bool = False
    ) -> Projection:
        """Allocate a layer sharded by outputs: ``parts`` are concatenated by rows, in the weight and the bias.

        Args:
            name: name of the projections below the layer, with ``{}`` in place of the part's name.
            plain: the layer is never quantised.
        """
        whole = slice(0, inputs)
        cuts = [Cut(name.format(rows.name), rows.part, rows.total, whole, inputs) for rows in parts]
        return self._linear(cuts, bias, bias, plain)

    def columns_linear(self, name: str, outputs: int, part: slice, total: int, bias: bool) -> Projection:
        """Allocate a layer sharded by inputs: this rank's ``part`` of the ``total`` in the checkpoint.

        Its outputs are summed over the ranks, so that only rank 0 has the bias.
        """
        cut = Cut(name, slice(0, outputs), outputs, part, total)
        return self._linear([cut], bias and self.parallel.rank == 0, bias)

    def _linear(self, cuts: Sequence[Cut], bias: bool, stored_bias: bool, plain: bool = False) -> Projection:
        formats = [None if plain else self.format_of(cut.name) for cut in cuts]
        parts: list[tuple[list[Cut], WeightFormat | None]] = []
        for cut, form in zip(cuts, formats, strict=True):
            # With act-order, each projection has groups of its own.
            if parts and parts[-1][1] == form and not (form is not None and form.act_order):
                parts[-1][0].append(cut)
            else:
                parts.append(([cut], form))
        linears = [self._fused(each, form, bias, stored_bias) for each, form in parts]
        layer = linears[0] if len(linears) == 1 else RowParts(linears, self.ops)
        if self.additions is None:
            return layer
        return WithAddition(layer, self.additions.at(self.layer, cuts))

    def _fused(self, cuts: Sequence[Cut], form: WeightFormat | None, bias: bool, stored_bias: bool) -> Linear:
        outputs = sum(cut.num_rows for cut in cuts)
        own_bias = self.weight(outputs) if bias else None
        if form is not None:
            return quantised_linear(form, cuts, own_bias, self.layer, self.device, stored_bias=stored_bias)
        return Linear(self.weight(outputs, cuts[0].num_columns), own_bias, cuts=cuts, stored_bias=stored_bias)

    def vocabulary_linear(self, name: str, held: slice) -> Linear:
        """Allocate the embedding or the head, sharded by outputs. Only GGUF files have quantised ones.

        Args:
            name: full name in the checkpoint.
            held: token ids of this rank's rows.
        """
        config, form = self.config, self.config.weight_format
        cuts = [Cut(name, held, config.vocab_size, slice(0, config.hidden_size), config.hidden_size)]
        own = form.of_layer(name) if form is not None and form.layout == "gguf" else None
        if own is not None:
            return quantised_linear(own, cuts, None, "", self.device, stored_bias=False, float32_output=True)
        weight = self.weight(cuts[0].num_rows, config.hidden_size)
        return Linear(weight, float32_output=True, cuts=cuts)

    def label_linear(self, name: str, num_labels: int) -> Linear:
        """Allocate the head of a classification, which all ranks hold. ``name``: full name in the checkpoint."""
        hidden = self.config.hidden_size
        cuts = [Cut(name, slice(0, num_labels), num_labels, slice(0, hidden), hidden)]
        return Linear(self.weight(num_labels, hidden), float32_output=True, cuts=cuts)

    def format_of(self, name: str) -> WeightFormat | None:
        """Return the format of a projection, by its name below the layer; None if it is not quantised."""
        form = self.config.weight_format
        return None if form is None else form.of_layer(f"{self.layer}.{name}")

    def share(self, name: str, width: int, form: WeightFormat | None = None) -> slice:
        """Return this rank's slice of ``width``; ``name`` is for the error message.

        Args:
            form: format of the layer that has ``width`` inputs: it is cut at the boundaries of groups, if each rank
                can have one, else of stored words.
        """
        size = self.parallel.size
        if form is not None and size > 1:
            grouped = form.group_size and width % form.group_size == 0 and width // form.group_size >= size
            return self.share_of_groups(name, width, form.group_size if grouped else form.pack)
        if width % size:
            raise ConfigError(f"tensor_parallel_size {size} does not divide the model's {name} {width}")
        own = width // size
        return slice(self.parallel.rank * own, (self.parallel.rank + 1) * own)

    def share_of_groups(self, name: str, width: int, group: int) -> slice:
        """As ``share``, in whole groups of columns: ranks may differ by one group."""
        size, rank = self.parallel.size, self.parallel.rank
        groups = width // group
        if width % group or groups < size:
            raise ConfigError(
                f"the model's {name} {width} must be a multiple of {group}, with at least {group} for each of the "
                f"{size} ranks of tensor_parallel_size"
            )
        return slice(rank * groups // size * group, (rank + 1) * groups // size * group)


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a fused layer, with their source in the checkpoint.

    Attributes:
        name: the projection's name in the checkpoint.
        part: rows of the checkpoint tensor that this rank holds.
        total: number of rows of the checkpoint tensor.
    """

    name: str
    part: slice
    total: int
