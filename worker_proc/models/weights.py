"""Allocation of a decoder's weights, and the description of each rank's share of a checkpoint tensor."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.protocol.errors import ConfigError
from quire.protocol.model.model_config import ModelConfig
from quire.worker_proc.models.linear import Linear
from quire.worker_proc.models.ops import Ops
from quire.worker_proc.parallel.group import TensorParallel


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Destination of one checkpoint tensor.

    Attributes:
        target: a view into a (possibly fused) parameter, into which this rank's part of the checkpoint tensor is
            broadcast. Empty if another rank holds all of it.
        shape: the required shape of the checkpoint tensor.
        part: this rank's part: one slice with both ends per leading dimension; further dimensions are whole.
        offset: number that is added to the stored values.
    """

    target: torch.Tensor
    shape: tuple[int, ...]
    part: tuple[slice, ...] = ()
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Heads:
    """A rank's share of the attention heads.

    With more ranks than KV heads, all ranks whose query heads read a KV head hold a copy of it (``kv_replicas``).
    """

    num_heads: int
    num_kv_heads: int
    first_head: int
    first_kv_head: int
    kv_replicas: int

    @classmethod
    def of_rank(cls, num_heads: int, kv_heads: int, rank: int, size: int) -> "Heads":
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
    """

    config: ModelConfig
    dtype: torch.dtype
    activation_dtype: torch.dtype
    device: torch.device | str
    ops: Ops
    parallel: TensorParallel

    def weight(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return torch.nn.Parameter(tensor, requires_grad=False)

    def norm(self, width: int | None = None) -> torch.nn.Parameter:
        """Allocate a norm's weight; ``width`` defaults to the hidden size."""
        return self.weight(width or self.config.hidden_size, dtype=self.activation_dtype)

    def norm_slot(self, weight: torch.Tensor, part: tuple[slice, ...] = (), size: int | None = None) -> WeightSlot:
        return WeightSlot(weight.data, (size or len(weight),), part, self.config.norm_offset)

    def linear(self, outputs: int, inputs: int, bias: bool) -> Linear:
        return Linear(self.weight(outputs, inputs), self.weight(outputs) if bias else None)

    def summed_linear(self, outputs: int, inputs: int, bias: bool) -> Linear:
        """Allocate a layer sharded by inputs, whose outputs are summed over the ranks: only rank 0 has the bias."""
        return self.linear(outputs, inputs, bias and self.parallel.rank == 0)

    def share(self, name: str, width: int) -> slice:
        """Return this rank's slice of ``width``. ``name`` is for the error message."""
        size = self.parallel.size
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


def row_slots(name: str, fused: Linear, parts: Sequence[Rows]) -> dict[str, WeightSlot]:
    """Slots of a fused layer sharded by outputs: ``parts`` are concatenated by rows, in the weight and the bias.

    Args:
        name: name of the checkpoint tensors, with ``{}`` in place of the part's name.
    """
    slots = {}
    inputs = fused.weight.shape[1:]
    first = 0
    for rows in parts:
        held = slice(first, first + rows.part.stop - rows.part.start)
        first = held.stop
        slots[f"{name.format(rows.name)}.weight"] = WeightSlot(
            fused.weight.data[held], (rows.total, *inputs), (rows.part,)
        )
        if fused.bias is not None:
            slots[f"{name.format(rows.name)}.bias"] = WeightSlot(fused.bias.data[held], (rows.total,), (rows.part,))
    return slots


def column_slots(name: str, linear: Linear, part: slice, total: int, bias: bool) -> dict[str, WeightSlot]:
    """Slots of a layer sharded by inputs, of which the checkpoint has ``total``. Only rank 0 holds the bias."""
    outputs = linear.weight.shape[0]
    slots = {f"{name}.weight": WeightSlot(linear.weight.data, (outputs, total), (slice(0, outputs), part))}
    if bias:
        slots[f"{name}.bias"] = summed_bias_slot(linear.bias, outputs, linear.weight)
    return slots


def summed_bias_slot(bias: torch.Tensor | None, outputs: int, like: torch.Tensor) -> WeightSlot:
    if bias is None:
        return WeightSlot(like.data.new_empty(0), (outputs,), (slice(0, 0),))
    return WeightSlot(bias.data, (outputs,), (slice(0, outputs),))
