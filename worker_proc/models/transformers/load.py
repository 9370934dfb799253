"""Where each tensor of a checkpoint goes in a model of transformers: slots for Quire's loader.

transformers renames tensors of older checkpoints, and joins or splits some (the experts of a layer, for example). Its
own table says which; names are mapped here, and ``Conversion`` computes what is joined or split.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quire.protocol.errors import ConfigError
from quire.protocol.model.checkpoint import StoredTensor
from quire.worker_proc.models.checkpoint_names import (
    UNREAD,
    Sources,
    TensorSource,
    check_shape,
    kv_scale_of,
    missing_tensors,
)
from quire.worker_proc.models.weight_slot import WeightSlot


def tensor_sources(
    folder: Path, stored: Mapping[str, StoredTensor], model: Any, slots: Mapping[str, WeightSlot]
) -> Sources:
    """Return the source of every slot.

    Args:
        stored: tensors by their names in the checkpoint.
        slots: by the names of ``model``'s parameters; tied ones share their target.

    Raises:
        ConfigError: a tensor is missing, duplicate, not part of the model, or of the wrong shape.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    table = get_model_conversion_mapping(model)
    renamings = [each for each in table if isinstance(each, WeightRenaming)]
    converters = [each for each in table if isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    names = dict(slots)
    conversions: dict[str, Conversion] = {}
    found: dict[str, TensorSource] = {}
    pieces: list[TensorSource] = []
    for tensor in sorted(stored.values(), key=lambda each: _numbers_apart(each.name)):
        name, pattern = rename_source_key(tensor.name, renamings, converters, model.base_model_prefix, names)
        if name not in slots and tensor.name in slots:
            name, pattern = tensor.name, None
        if name not in slots:
            if _is_ignored(name, model):
                continue
            raise ConfigError(f"{tensor.file}: tensor {tensor.name} is not part of {type(model).__name__}")
        if pattern is not None:
            if name not in conversions:
                conversions[name] = Conversion(name, deepcopy(of_pattern[pattern]), model, slots)
            pieces.append(conversions[name].source(tensor, pattern))
            continue
        if name in found:
            other = found[name].stored
            raise ConfigError(f"{tensor.file}: tensor {tensor.name} and {other.name} of {other.file} are both {name}")
        check_shape(tensor, slots[name].shape, slots[name])
        found[name] = TensorSource(tensor, slots[name])
    converted = {name for each in conversions.values() for name in each.fills}
    filled = {_place(slots[name]) for name in [*found, *converted]}
    ignored = model._keys_to_ignore_on_load_missing
    missing = [name for name, slot in slots.items() if _place(slot) not in filled and not _matches(name, ignored)]
    if missing:
        raise missing_tensors(folder, missing)
    tied: dict[int, TensorSource] = {}
    twice: list[tuple[StoredTensor, TensorSource]] = []
    for source in found.values():
        first = tied.setdefault(_place(source.slot), source)
        if first is not source:
            twice.append((source.stored, first))
    return Sources([*tied.values(), *pieces], twice)


def _place(slot: WeightSlot) -> int:
    """Identify what tied weights share: memory, or the slot itself, as slots that convert may share a target."""
    return id(slot.target if slot.put is None else slot)


def _is_ignored(name: str, model: Any) -> bool:
    """Whether the class ignores a stored tensor, or another part reads it (scales of the KV cache), or none does."""
    if name.endswith(UNREAD) or kv_scale_of(name) is not None:
        return True
    return _matches(name, [*(model._keys_to_ignore_on_load_unexpected or ()), r"(^|\.)position_ids$"])


def _matches(name: str, patterns: Any) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def _numbers_apart(name: str) -> list[int | str]:
    """Return a key that sorts expert 2 before expert 10: joined tensors are in the order of their names."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


@dataclass(slots=True)
class Conversion:
    """Some tensors of a checkpoint that transformers joins or splits; computed when the last of them is read.

    Attributes:
        name: name of the first parameter that it fills.
        converter: a ``WeightConverter`` of this conversion alone.
    """

    name: str
    converter: Any
    model: Any
    slots: Mapping[str, WeightSlot]
    _waiting: int = 0
    _read: dict[str, list[torch.Tensor | None]] = field(default_factory=dict)

    @property
    def fills(self) -> list[str]:
        """Names of the parameters that it fills."""
        first = self.converter.target_patterns[0]
        return [self.name.replace(first, pattern) for pattern in self.converter.target_patterns]

    def source(self, tensor: StoredTensor, pattern: str) -> TensorSource:
        """Return the source of a slot that keeps a stored tensor for this conversion."""
        place = self._read.setdefault(pattern, [])
        index = len(place)
        place.append(None)
        self._waiting += 1

        def put(values: torch.Tensor) -> str | None:
            place[index] = values.to(self.slots[self.name].target.dtype)
            self._waiting -= 1
            return None if self._waiting else self._convert()

        target = torch.empty(tensor.shape, device="meta")
        return TensorSource(tensor, WeightSlot(target, tensor.shape, put=put))

    def _convert(self) -> str | None:
        for pattern, tensors in self._read.items():
            for tensor in tensors:
                self.converter.add_tensor(self.name, self.name, pattern, lambda tensor=tensor: tensor)
        self._read.clear()
        # A converter reads no more of a model than this; and the model has no weight where Quire computes the layer.
        model = _Parameters(self.slots)
        made = self.converter.convert(self.name, model=model, config=self.model.config)
        for name, values in made.items():
            slot, value = self.slots.get(name), values[0] if isinstance(values, list) else values
            if slot is None or value.shape != slot.shape:
                return f"is joined to {name} with shape {list(value.shape)}, which config.json does not have"
            if not value.isfinite().all():
                return f"or another part of {name} has non-finite values"
            slot.fill(value[slot.part])
        return None


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Shapes and dtypes of a model's parameters, by the names of its class."""

    slots: Mapping[str, WeightSlot]

    def get_parameter(self, name: str) -> torch.Tensor:
        slot = self.slots[name]
        return torch.empty(slot.shape, dtype=slot.target.dtype, device="meta")
