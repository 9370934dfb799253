"""The header of one safetensors file, read without trust in any number that it tells and without reading a tensor.

8 bytes of length, little-endian, then JSON; the tensors follow, one behind the other, and end the file. The format:
https://github.com/huggingface/safetensors#format
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from quire.protocol.errors import ConfigError
from quire.protocol.model.config_fields import shown

MAX_HEADER_BYTES = 16 * 2**20
"""More than a hundred thousand tensors need; and what is read as JSON takes many times its size."""

MAX_DIMENSIONS = 8
MAX_SIZE = 2**48

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
PACKED_BYTES = {"U8": 1}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file: its name there, and what the header says of it.

    ``begin``: where, in bytes behind the header.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    begin: int = 0


def read_header(file: Path) -> list[StoredTensor]:
    """Its tensors, which lie one behind the other without a gap and fill the file.

    Raises:
        ConfigError: one line that names the file, and the tensor where there is one.
    """
    entries, data_bytes = _read_json(file)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ConfigError(f"{file}: header is wrong: __metadata__ must hold texts")
    tensors = [_entry(file, name, entry) for name, entry in entries.items()]
    _check_places(file, tensors, data_bytes)
    return tensors


def _read_json(file: Path) -> tuple[dict[str, Any], int]:
    """The header, and how many bytes follow it."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            prefix = opened.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if 8 + length > size:
                raise ConfigError(f"{file}: is truncated or not a safetensors file ({size} bytes)")
            if length > MAX_HEADER_BYTES:
                raise ConfigError(f"{file}: header has {length} bytes; at most {MAX_HEADER_BYTES} are read")
            entries = json.loads(opened.read(length), object_pairs_hook=_only_once, parse_constant=_no_number)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: header cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(entries, dict):
        raise ConfigError(f"{file}: header is not a JSON object")
    return entries, size - 8 - length


def _only_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in it")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")


def _entry(file: Path, name: str, entry: Any) -> StoredTensor:
    """One tensor, its extent checked against its shape and dtype."""
    told = shown(name)[1:-1]
    if told != name:
        raise ConfigError(f"{file}: header is wrong for tensor {told}: that is no name")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ConfigError(f"{file}: header is wrong for tensor {name}: it has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not dtype.isalnum() or len(dtype) > 16:
        raise ConfigError(f"{file}: header is wrong for tensor {name}: dtype is {shown(dtype)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise ConfigError(
            f"{file}: header is wrong for tensor {name}: shape is no list of at most {MAX_DIMENSIONS} sizes"
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ConfigError(f"{file}: header is wrong for tensor {name}: data_offsets are not a beginning and an end")
    num_bytes, count = offsets[1] - offsets[0], 1
    for size in shape:
        count *= size
    width = (DTYPE_BYTES | PACKED_BYTES).get(dtype)
    if width is not None and count * width != num_bytes:
        raise ConfigError(f"{file}: header is wrong for tensor {name}: {dtype} {shape} does not have {num_bytes} bytes")
    return StoredTensor(file, name, dtype, tuple(shape), num_bytes, offsets[0])


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= MAX_SIZE for n in value)


def _check_places(file: Path, tensors: list[StoredTensor], data_bytes: int) -> None:
    """Two tensors in one place, or a place that is none's, would be read as if nothing were wrong."""
    end = 0
    for tensor in sorted(tensors, key=lambda t: (t.begin, t.num_bytes)):
        if tensor.begin != end:
            problem = "overlaps another" if tensor.begin < end else "does not follow the one before it"
            raise ConfigError(f"{file}: header is wrong for tensor {tensor.name}: its place {problem}")
        end += tensor.num_bytes
    if end != data_bytes:
        problem = "truncated" if data_bytes < end else "longer than its header says"
        raise ConfigError(f"{file}: is {problem}: {data_bytes} bytes of tensors instead of {end}")
