"""What a checkpoint's safetensors headers say, without reading a tensor and without torch.

So that a wrong checkpoint is refused before any process starts. Pickled weights (``.bin``, ``.pt``) are never opened.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.protocol.errors import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"

_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_PACKED_BYTES = {"U8": 1}
_PACKED_NAMES = ("_blocks", "_scales")
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file: its name there, and what the header says of it."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint by its full name, from the headers of all its files."""
    stored: dict[str, StoredTensor] = {}
    for file, expected in _files(folder).items():
        tensors = _read_header(file)
        if expected is not None:
            absent = sorted(expected - {tensor.name for tensor in tensors})
            if absent:
                raise ConfigError(f"{file}: tensor {absent[0]} is missing, though {INDEX} places it there")
        for tensor in tensors:
            if "rotary_emb." in tensor.name:
                continue  # Tables that old checkpoints carry; they follow from config.json.
            packed = tensor.dtype in _PACKED_BYTES and tensor.name.endswith(_PACKED_NAMES)
            if tensor.dtype not in _DTYPE_BYTES and not packed:
                raise ConfigError(
                    f"{file}: tensor {tensor.name} has dtype {tensor.dtype}; supported: {', '.join(_DTYPE_BYTES)}"
                )
            name = full_name(tensor.name)
            if name in stored:
                raise ConfigError(f"{file}: tensor {tensor.name} is also in {stored[name].file.name}")
            stored[name] = tensor
    return stored


def full_name(name: str) -> str:
    """The name as a text model with its head would have it.

    A model without a head is saved without ``model.``; of a model that sees images too, the text's part is nested.
    """
    for prefix in ("model.language_model.", "language_model.model.", "language_model."):
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    return name if name.startswith("model.") or name == HEAD else f"model.{name}"


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


def _read_header(file: Path) -> list[StoredTensor]:
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
        raise ConfigError(f"{file}: header cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(entries, dict):
        raise ConfigError(f"{file}: header is not a JSON object")
    entries.pop("__metadata__", None)
    tensors = [_entry(file, name, entry) for name, entry in entries.items()]
    end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if end != size:
        problem = "truncated" if size < end else "longer than its header says"
        raise ConfigError(f"{file}: is {problem}: {size} bytes instead of {end}")
    return tensors


def _entry(file: Path, name: str, entry: Any) -> StoredTensor:
    """One tensor of a header, its offsets checked against its shape and dtype."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sizes = [*shape, begin, end]
        valid = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in sizes) and begin <= end
        count = 1
        for n in shape:
            count *= n
        width = (_DTYPE_BYTES | _PACKED_BYTES).get(dtype)
        valid = valid and (width is None or count * width == end - begin)
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise ConfigError(f"{file}: header is wrong for tensor {name}")
    return StoredTensor(file, name, dtype, tuple(shape), end - begin)
