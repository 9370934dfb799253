"""Weights from a Hugging Face folder of safetensors files into a model: memory-mapped, every tensor accounted for.

Everything that can be known from the files' headers (names, shapes, dtypes, truncation) is checked before the first
tensor is read, so that a wrong checkpoint fails within a second. Pickled weights (``.bin``, ``.pt``) are never opened.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from quire.protocol.checkpoint import HEAD, StoredTensor, stored_tensors
from quire.protocol.errors import ConfigError
from quire.worker_proc.models.decoder import Decoder, WeightSlot

_EMBEDDING = "model.embed_tokens.weight"


def load_weights(model: Decoder, folder: Path, dtype: torch.dtype, progress: bool) -> None:
    """Fill the model from ``model.safetensors`` or the shards of ``model.safetensors.index.json``.

    Args:
        model: its parameters are of ``dtype``; tensors stored in another floating dtype are converted.
        progress: show a bar on stderr.

    Raises:
        ConfigError: one line that names file and tensor: a file absent, truncated or with a bad header, a tensor
            missing, unexpected, doubled, of the wrong shape or not of a floating dtype.
    """
    stored = stored_tensors(folder)
    slots = model.weight_slots()
    head = stored.pop(HEAD, None) if HEAD not in slots else None
    _check(folder, stored, slots)
    if any(slot.target.dtype is not dtype for slot in slots.values()):
        raise ValueError(f"the model's parameters are not all {dtype}")
    by_file: dict[Path, list[tuple[StoredTensor, WeightSlot]]] = {}
    for name, tensor in stored.items():
        by_file.setdefault(tensor.file, []).append((tensor, slots[name]))
    total = sum(tensor.num_bytes for tensor in stored.values())
    bar = tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not progress)
    with bar:
        for file, tensors in by_file.items():
            _fill(file, tensors, bar)
    if head is not None:
        _check_tied(head, slots[_EMBEDDING].target)


def init_dummy_weights(model: Decoder, seed: int) -> None:
    """Random weights that depend on the seed and the model's shape only: norms 1, the rest normal, deviation 0.02.

    One pool of random numbers is repeated through the parameters (its length is prime, so that rows differ):
    drawing billions of numbers would take minutes.
    """
    generator = torch.Generator().manual_seed(seed)
    pool = torch.empty(1_048_573).normal_(0.0, 0.02, generator=generator)
    offset = 0
    for name, slot in model.weight_slots().items():
        if name.endswith("norm.weight"):
            slot.target.fill_(1.0)
            continue
        flat = slot.target.view(-1)
        done = 0
        while done < flat.numel():
            length = min(flat.numel() - done, pool.numel() - offset)
            flat[done : done + length] = pool[offset : offset + length]
            done += length
            offset = (offset + length) % pool.numel()


def _fill(file: Path, tensors: list[tuple[StoredTensor, WeightSlot]], bar: "tqdm[Any]") -> None:
    """Copy one file's tensors to their places, in the order of the file's headers."""
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for stored, slot in tensors:
                slot.target.copy_(opened.get_tensor(stored.name))
                bar.update(stored.num_bytes)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: cannot be read: {_one_line(error)}") from None


def _check(folder: Path, stored: dict[str, StoredTensor], slots: dict[str, WeightSlot]) -> None:
    """Names and shapes agree with the model's."""
    missing = [name for name in slots if name not in stored]
    if missing:
        raise ConfigError(f"{folder}: tensor {missing[0]} is missing{_and_others(missing)}")
    unused = [tensor for name, tensor in stored.items() if name not in slots]
    if unused:
        raise ConfigError(f"{unused[0].file}: tensor {unused[0].name} is not part of the model{_and_others(unused)}")
    for name, slot in slots.items():
        tensor = stored[name]
        if tensor.shape != slot.shape:
            raise ConfigError(
                f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}, "
                f"but config.json means {list(slot.shape)}"
            )


def _check_tied(head: StoredTensor, embedding: torch.Tensor) -> None:
    """A stored output head beside tied embeddings is redundant if equal, and an error if not."""
    try:
        with safe_open(head.file, framework="pt", device="cpu") as opened:
            same = head.shape == embedding.shape and torch.equal(
                opened.get_tensor(head.name).to(embedding.dtype), embedding.cpu()
            )
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{head.file}: cannot be read: {_one_line(error)}") from None
    if not same:
        raise ConfigError(
            f"{head.file}: tensor {head.name} differs from the embedding, though config.json says tie_word_embeddings"
        )


def _and_others(items: list[Any]) -> str:
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
