"""Weights from a Hugging Face folder of safetensors files into a model: memory-mapped, every tensor accounted for.

Everything that can be known from the files' headers (names, shapes, dtypes, truncation) is checked before the first
tensor is read, so that a wrong checkpoint fails within a second. Pickled weights (``.bin``, ``.pt``) are never opened.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from quire.protocol.errors import ConfigError
from quire.worker_proc.models.decoder import Decoder, WeightSlot

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES = 100_000_000
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor in a file: its name there, and what the header says of it."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def weight_bytes(folder: Path) -> int:
    """Bytes of all tensors of a checkpoint, in the dtypes in which it stores them, from the headers alone.

    Raises:
        ConfigError: see ``load_weights``.
    """
    return sum(stored.num_bytes for stored in _stored_tensors(folder).values())


def load_weights(model: Decoder, folder: Path, dtype: torch.dtype, progress: bool) -> None:
    """Fill the model from ``model.safetensors`` or the shards of ``model.safetensors.index.json``.

    Args:
        model: its parameters are of ``dtype``; tensors stored in another floating dtype are converted.
        progress: show a bar on stderr.

    Raises:
        ConfigError: one line that names file and tensor: a file absent, truncated or with a bad header, a tensor
            missing, unexpected, doubled, of the wrong shape or not of a floating dtype.
    """
    stored = _stored_tensors(folder)
    slots = model.weight_slots()
    head = stored.pop(_HEAD, None) if _HEAD not in slots else None
    _check(folder, stored, slots)
    if any(slot.target.dtype is not dtype for slot in slots.values()):
        raise ValueError(f"the model's parameters are not all {dtype}")
    by_file: dict[Path, list[tuple[_Stored, WeightSlot]]] = {}
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


def _fill(file: Path, tensors: list[tuple[_Stored, WeightSlot]], bar: "tqdm[Any]") -> None:
    """Copy one file's tensors to their places, in the order of the file's headers."""
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for stored, slot in tensors:
                slot.target.copy_(opened.get_tensor(stored.name))
                bar.update(stored.num_bytes)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: cannot be read: {_one_line(error)}") from None


def _check(folder: Path, stored: dict[str, _Stored], slots: dict[str, WeightSlot]) -> None:
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


def _check_tied(head: _Stored, embedding: torch.Tensor) -> None:
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


def _stored_tensors(folder: Path) -> dict[str, _Stored]:
    """Every tensor of a checkpoint by its full name, from the headers of all its files."""
    stored: dict[str, _Stored] = {}
    for file, expected in _files(folder).items():
        tensors = _read_header(file)
        if expected is not None:
            absent = sorted(expected - {tensor.name for tensor in tensors})
            if absent:
                raise ConfigError(f"{file}: tensor {absent[0]} is missing, though {INDEX} places it there")
        for tensor in tensors:
            if "rotary_emb." in tensor.name:
                continue  # Tables that old checkpoints carry; they follow from config.json.
            if tensor.dtype not in _DTYPE_BYTES:
                raise ConfigError(
                    f"{file}: tensor {tensor.name} has dtype {tensor.dtype}; supported: {', '.join(_DTYPE_BYTES)}"
                )
            name = tensor.name
            if not name.startswith("model.") and name != _HEAD:
                name = f"model.{name}"  # Saved from the model without its head.
            if name in stored:
                raise ConfigError(f"{file}: tensor {tensor.name} is also in {stored[name].file.name}")
            stored[name] = tensor
    return stored


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """The files to read, each with the tensors that the index places there (None without an index)."""
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return {single: None}
    if not index.is_file():
        raise ConfigError(_no_weights(folder))
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(tensor): str(shard) for tensor, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{index}: has no readable weight_map") from None
    files: dict[Path, set[str] | None] = {}
    for shard in sorted(set(names.values())):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ConfigError(f"{index}: {shard!r} is not the name of a safetensors file in this folder")
        if not (folder / shard).is_file():
            tensor = next(tensor for tensor, file in names.items() if file == shard)
            raise ConfigError(f"{folder / shard}: shard is missing (it should hold {tensor})")
        files[folder / shard] = {tensor for tensor, file in names.items() if file == shard}
    if not files:
        raise ConfigError(f"{index}: has no readable weight_map")
    return files


def _no_weights(folder: Path) -> str:
    """What to say of a folder without the two files that we read."""
    if not folder.is_dir():
        return f"{folder} is not a folder with a checkpoint"
    pickled = sorted(f.name for f in folder.iterdir() if f.suffix in (".bin", ".pt", ".pth"))
    if pickled:
        return f"{folder}: has only pickled weights ({pickled[0]}), which are never opened; convert them to safetensors"
    other = sorted(f.name for f in folder.glob("*.safetensors"))
    found = f" (found {other[0]})" if other else ""
    return f"{folder}: has neither {SINGLE} nor {INDEX}{found}"


def _read_header(file: Path) -> list[_Stored]:
    """A safetensors header: 8 bytes of length, little-endian, then JSON; tensor data follows and ends the file.

    The format: https://github.com/huggingface/safetensors#format
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            prefix = opened.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
            if length > _MAX_HEADER_BYTES or 8 + length > size:
                raise ConfigError(f"{file}: is truncated or not a safetensors file ({size} bytes)")
            entries = json.loads(opened.read(length))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: header cannot be read: {_one_line(error)}") from None
    if not isinstance(entries, dict):
        raise ConfigError(f"{file}: header is not a JSON object")
    entries.pop("__metadata__", None)
    tensors = [_entry(file, name, entry) for name, entry in entries.items()]
    end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if end != size:
        problem = "truncated" if size < end else "longer than its header says"
        raise ConfigError(f"{file}: is {problem}: {size} bytes instead of {end}")
    return tensors


def _entry(file: Path, name: str, entry: Any) -> _Stored:
    """One tensor of a header, its offsets checked against its shape and dtype."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sizes = [*shape, begin, end]
        valid = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in sizes) and begin <= end
        count = 1
        for n in shape:
            count *= n
        valid = valid and (dtype not in _DTYPE_BYTES or count * _DTYPE_BYTES[dtype] == end - begin)
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise ConfigError(f"{file}: header is wrong for tensor {name}")
    return _Stored(file, name, dtype, tuple(shape), end - begin)


def _and_others(items: list[Any]) -> str:
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
