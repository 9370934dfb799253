"""This rank's share of an adapter, in one piece of host memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.kernels.cpu.linear.weight_memory import allocate_alone
from quire.kernels.lora.lora import LoraPart
from quire.protocol.model.adapter import Adapter, AdapterPart, AdapterTensor
from quire.protocol.model.adapter_config import AdapterError
from quire.worker_proc.adapters.sites import AdapterSites, SiteTarget, aligned_bytes

Placed = tuple[AdapterPart, SiteTarget]


@dataclass(frozen=True, slots=True)
class _Place:
    """The matrices of one part: their site, sizes, and the bytes from which on they are stored."""

    site: int
    first: int
    scale: float
    rank: int
    inputs: int
    outputs: int
    a: int
    b: int


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """
    Attributes:
        memory: uint8, the matrices one after the other; pinned for a GPU.
        dtype: dtype of the matrices.
    """

    memory: torch.Tensor
    dtype: torch.dtype
    places: tuple[_Place, ...]

    def parts(self, memory: torch.Tensor) -> dict[int, list[LoraPart]]:
        """Return the parts by the number of their site. ``memory``: that of this adapter, or a copy of it."""
        found: dict[int, list[LoraPart]] = {}
        for place in self.places:
            part = LoraPart(*self.matrices(place, memory), place.first, place.scale)
            found.setdefault(place.site, []).append(part)
        return found

    def matrices(self, place: _Place, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A ``[rank, inputs]`` and B ``[rank, outputs]``, as views of ``memory``."""
        size = place.rank * self.dtype.itemsize
        a = memory[place.a : place.a + size * place.inputs].view(self.dtype)
        b = memory[place.b : place.b + size * place.outputs].view(self.dtype)
        return a.view(place.rank, -1), b.view(place.rank, -1)


def pack_adapter(adapter: Adapter, sites: AdapterSites) -> PackedAdapter:
    """Copy this rank's columns of each A and rows of each B, in the dtype of the sites.

    Raises:
        AdapterError: a value is not finite in the dtype.
    """
    groups, places, size, dtype = _joined(adapter, sites), [], 0, sites.dtype
    for group in groups:
        part, target = group[0]
        inputs, outputs = target.cut.num_columns, sum(own.cut.num_rows for _, own in group)
        b = size + aligned_bytes(part.rank * inputs, dtype)
        places.append(_Place(target.site, target.first, part.scale, part.rank, inputs, outputs, size, b))
        size = b + aligned_bytes(part.rank * outputs, dtype)
    if sites.device.type == "cuda":
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    else:
        memory = allocate_alone(size)
    packed = PackedAdapter(memory, dtype, tuple(places))
    for group, place in zip(groups, places, strict=True):
        part, target = group[0]
        a, b_columns = packed.matrices(place, memory)
        _fill(a, part.a.take(slice(None), target.cut.columns), adapter)
        for each, own in group:
            at = own.first - place.first
            _fill(b_columns[:, at : at + own.cut.num_rows].T, each.b.take(own.cut.rows, slice(None)), adapter)
    return packed


def _joined(adapter: Adapter, sites: AdapterSites) -> list[list[Placed]]:
    """Return the parts with their places; those of one fused module, which share A, as one group."""
    groups: list[list[Placed]] = []
    for part in adapter.parts:
        target = sites.targets.get(part.module)
        if target is None:  # of a class of transformers: the layer shares its weight, or is kept in float32
            raise AdapterError(f"{adapter.folder}: {part.module} is not computed as a product of its own")
        if groups and _adjoin(groups[-1], part, target):
            groups[-1].append((part, target))
        else:
            groups.append([(part, target)])
    return groups


def _adjoin(group: Sequence[Placed], part: AdapterPart, target: SiteTarget) -> bool:
    last, before = group[-1]
    follows = before.site == target.site and before.first + before.cut.num_rows == target.first
    return follows and last.a is part.a and last.scale == part.scale


def _fill(target: torch.Tensor, tensor: AdapterTensor, adapter: Adapter) -> None:
    target.copy_(torch.from_numpy(tensor.float32()))
    if not target.isfinite().all():
        dtype = str(target.dtype).removeprefix("torch.")
        raise AdapterError(f"{adapter.folder}: tensor {tensor.name} has values that are not finite in {dtype}")
