"""Reads the header of a GGUF file: its settings, and the type, shape and place of every tensor, without torch.

Layout, little-endian: the magic ``GGUF``, the version (uint32), the numbers of tensors and settings (uint64); each
setting as name, type and value; each tensor as name, number of dimensions, dimensions with the innermost first, type
and offset; then the tensors' data, from the next multiple of ``general.alignment`` on.

Every count, length and offset is checked against the size of the file before it is used. A header takes at most four
times its size in memory, and 16 MiB for its settings and tensors.
"""

import mmap
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from quire.protocol.errors import ConfigError, printable

SUFFIX = ".gguf"
BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Supported types of tensors: elements of a block, and its bytes."""
QUANTISED = tuple(kind for kind, (elements, _) in BLOCKS.items() if elements > 1)

_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K"}
_TYPES |= {12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"}
_TYPES |= {20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0"}
_TYPES |= {35: "TQ2_0", 39: "MXFP4"}
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_VERSIONS = (2, 3)
_MAX_SETTINGS = 2**12
_MAX_TENSORS = 2**15
_MAX_ARRAY = 2**21
_MAX_TEXT_BYTES = 2**20
_MAX_NAME = 256
_MAX_HEADER_BYTES = 2**28
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Type, shape and place of a tensor. ``shape`` has the outputs first; ``start`` counts from the file's begin."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        elements, size = BLOCKS[self.kind]
        return prod(self.shape) // elements * size


@dataclass(frozen=True, slots=True)
class GgufArray:
    """Values as their bytes: as objects, they would take many times as much, also those that nothing uses."""

    kind: int
    count: int
    data: bytes = field(repr=False)

    def values(self) -> list[Any]:
        if self.kind != _STRING:
            return list(struct.unpack(f"<{self.count}{_SCALARS[self.kind][1]}", self.data))
        data, end, length = self.data, 0, _LENGTH.unpack_from
        texts = []
        for _ in range(self.count):  # some 100,000 tokens and merges
            at, end = end + 8, end + 8 + length(data, end)[0]
            texts.append(data[at:end].decode("utf-8", errors="replace"))
        return texts


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of one file: its settings by name, and its tensors in the order of the file.

    A setting is a number, a boolean, a text, or a ``GgufArray``, which a text of more than 1 MiB is, too.
    """

    path: Path
    settings: dict[str, Any]
    tensors: dict[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Whether a model's path is a GGUF file, not a folder."""
    return path.suffix == SUFFIX and path.is_file()


def read_gguf(path: Path) -> GgufFile:
    """Read the header.

    Raises:
        ConfigError: one line that names the file, and the setting or tensor.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(path, data).read()
    except (struct.error, EOFError):
        raise ConfigError(f"{path}: is truncated or damaged: its header does not fit the file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError:  # an empty file cannot be mapped
        raise ConfigError(f"{path}: is not a GGUF file: it is empty") from None


class _Header:
    """A position in the mapped file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0
        self.end = min(len(data), _MAX_HEADER_BYTES)

    def read(self) -> GgufFile:
        if self.data[:4] != b"GGUF":
            raise ConfigError(f"{self.path}: is not a GGUF file: it does not begin with GGUF")
        self.at = 4
        version = self._scalar("<I")
        if version not in _VERSIONS:
            raise ConfigError(f"{self.path}: GGUF version {version} is not supported; supported: 2 and 3")
        num_tensors = self._count("tensors", _MAX_TENSORS)
        settings: dict[str, Any] = {}
        for _ in range(self._count("settings", _MAX_SETTINGS)):
            name = self._name("setting")
            if name in settings:
                raise ConfigError(f"{self.path}: setting {name} is there twice")
            settings[name] = self._value(name)
        alignment = settings.get("general.alignment", 32)
        if type(alignment) is not int or alignment % 8 or not 8 <= alignment <= 2**16:
            raise ConfigError(f"{self.path}: general.alignment must be a multiple of 8 (got {printable(alignment)})")
        if settings.get("split.count", 1) != 1:
            raise ConfigError(
                f"{self.path}: a model in several GGUF files is not supported: merge them (llama-gguf-split --merge)"
            )
        tensors = [self._tensor(alignment) for _ in range(num_tensors)]
        start = -(-self.at // alignment) * alignment
        return GgufFile(self.path, settings, self._placed(tensors, start))

    def _placed(self, tensors: list[GgufTensor], start: int) -> dict[str, GgufTensor]:
        """Return the tensors by name, with offsets counted from the file's begin, and checked against its end."""
        placed: dict[str, GgufTensor] = {}
        for each in tensors:
            tensor = GgufTensor(each.name, each.kind, each.shape, start + each.start)
            if each.name in placed:
                raise ConfigError(f"{self.path}: tensor {each.name} is there twice")
            if tensor.start + tensor.num_bytes > len(self.data):
                raise ConfigError(
                    f"{self.path}: is truncated or damaged: tensor {each.name} ends at byte "
                    f"{tensor.start + tensor.num_bytes} of {len(self.data)}"
                )
            placed[each.name] = tensor
        end = start
        # Tensors that overlap would be legal reads, but no writer makes them: the offsets are damaged, and the weights
        # would be noise.
        for tensor in sorted(placed.values(), key=lambda tensor: tensor.start):
            if tensor.start < end:
                raise ConfigError(f"{self.path}: is damaged: tensor {tensor.name} overlaps another one")
            end = tensor.start + tensor.num_bytes
        return placed

    def _tensor(self, alignment: int) -> GgufTensor:
        name = self._name("tensor")
        dimensions = self._scalar("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ConfigError(f"{self.path}: tensor {name} must have 1 to {_MAX_DIMENSIONS} dimensions")
        shape = tuple(reversed([self._scalar("<Q") for _ in range(dimensions)]))
        number, offset = self._scalar("<I"), self._scalar("<Q")
        kind = _TYPES.get(number, f"number {number}")
        if kind not in BLOCKS:
            raise ConfigError(f"{self.path}: tensor {name} has type {kind}; supported: {', '.join(BLOCKS)}")
        if prod(shape) > 2**48 or shape[-1] % BLOCKS[kind][0] or offset % alignment or 0 in shape:
            raise ConfigError(
                f"{self.path}: tensor {name} has shape {list(shape)} in {kind} at offset {offset}: the last dimension "
                f"must be a multiple of {BLOCKS[kind][0]}, and the offset of {alignment}"
            )
        return GgufTensor(name, kind, shape, offset)

    def _value(self, name: str) -> Any:
        kind = self._scalar("<I")
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            if (size := self._scalar("<Q")) <= _MAX_TEXT_BYTES:
                return self._take(size).decode("utf-8", errors="replace")
            # Long texts are kept as bytes like an array, because most of them (chat templates apart) are never used.
            self.at -= _LENGTH.size
            return GgufArray(_STRING, 1, self._take(_LENGTH.size + size))
        if kind == _ARRAY:
            return self._array(name)
        raise ConfigError(f"{self.path}: setting {name} has unknown type {kind}")

    def _array(self, name: str) -> GgufArray:
        kind = self._scalar("<I")
        count = self._count(f"values of {name}", _MAX_ARRAY)
        if kind == _STRING:
            return GgufArray(kind, count, self._strings(count))
        if kind not in _SCALARS:
            raise ConfigError(f"{self.path}: setting {name} has an array of unknown type {kind}")
        return GgufArray(kind, count, self._take(count * struct.calcsize(_SCALARS[kind])))

    def _count(self, what: str, most: int) -> int:
        count = self._scalar("<Q")
        # Each value takes a byte at least, so a count beyond the rest of the file is false, and is refused before
        # memory is allocated for it.
        if count > most or count > self.end - self.at:
            raise ConfigError(f"{self.path}: is damaged or too large: {count} {what}, at most {most} are supported")
        return int(count)

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def _name(self, what: str) -> str:
        name = self._take(self._scalar("<Q"))[: 4 * _MAX_NAME + 1].decode("utf-8", errors="replace")
        if not name or len(name) > _MAX_NAME or printable(name)[1:-1] != name:
            raise ConfigError(f"{self.path}: is damaged: a {what} has the name {printable(name)[:80]}")
        return name

    def _strings(self, count: int) -> bytes:
        """Return strings with their lengths. There are some 100,000 tokens and merges, so this loop is short."""
        data, at, length = self.data, self.at, _LENGTH.unpack_from
        for _ in range(count):
            at += 8 + length(data, at)[0]
            if at > self.end:
                raise EOFError
        return self._take(at - self.at)

    def _take(self, count: int) -> bytes:
        if count > self.end - self.at:
            raise EOFError
        self.at += count
        return self.data[self.at - count : self.at]
