"""A LoRA adapter in the format of PEFT: read once, hashed, and checked against the model, without torch.

Its identity is the digest of its two files: two adapters with equal names and other content are two adapters.
Front ends read it to check it and to name it, workers to load it.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quire.protocol.errors import ConfigError, printable
from quire.protocol.model.adapter_config import CONFIG, AdapterConfig, AdapterError, parse_adapter_config
from quire.protocol.model.checkpoint import full_name
from quire.protocol.model.checkpoint_links import check_links
from quire.protocol.model.model_config import ModelConfig

WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 2**20
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(.+)\.lora_([AB])\.weight")
_LAYER = re.compile(r"model\.layers\.(\d{1,5})\.(.+)")
_STORED: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
"""Dtypes of an adapter's tensors, and of the arrays that hold them; bfloat16 as its bits."""
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Fused projections of some families, and their parts in the order of the outputs."""
_EXPERTS = ("mlp.experts", "mlp.experts.base_layer")
"""Modules of adapters of all experts' matrices as one parameter."""

Array = npt.NDArray[Any]
Shapes = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """One tensor of the file. ``data``: a matrix of ``dtype``'s stored form (``BF16``: uint16 with its bits)."""

    name: str
    dtype: str
    data: Array

    def take(self, rows: slice, columns: slice) -> "AdapterTensor":
        return AdapterTensor(self.name, self.dtype, self.data[rows, columns])

    def float32(self) -> npt.NDArray[np.float32]:
        """Return the values in float32."""
        if self.dtype == "BF16":
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        return self.data.astype(np.float32)

    def is_finite(self) -> bool:
        if self.dtype == "BF16":
            return not bool(np.any((self.data & 0x7F80) == 0x7F80))
        return bool(np.isfinite(self.data).all())


class _Entry(msgspec.Struct):
    """A tensor in the header of a safetensors file; its values are at these offsets after the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


Pair = tuple[AdapterTensor, AdapterTensor]


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """What an adapter adds to one projection: ``scale * B (A x)``.

    Attributes:
        module: full name of the projection, for example ``model.layers.0.self_attn.q_proj``, or below a layer
            ``mlp.experts.3.gate_proj``, or ``mlp.gate`` for the router of a layer with experts.
        a: ``[rank, inputs]``.
        b: ``[outputs, rank]``.
    """

    module: str
    a: AdapterTensor
    b: AdapterTensor
    scale: float

    @property
    def rank(self) -> int:
        return int(self.a.data.shape[0])


@dataclass(frozen=True, slots=True)
class Adapter:
    """
    Attributes:
        digest: SHA-256 of its content.
        rank: the highest rank of its parts.
        num_bytes: bytes of its weights as stored.
    """

    folder: Path
    digest: bytes
    rank: int
    num_bytes: int
    parts: tuple[AdapterPart, ...]


def read_adapter(folder: Path, model: ModelConfig, max_rank: int) -> Adapter:
    """Read an adapter's files once, and check them: names, shapes, ranks, and that all values are finite.

    Raises:
        AdapterError: one line that names the folder and what is wrong.
    """
    if model.transformers is None:
        layers = [projection_shapes(model, layer) for layer in range(model.num_layers)]
    else:
        layers = [model.transformers.linears]
    raw, data = _read_files(folder, 4 * largest_bytes(layers, max_rank) + 2**20, max_rank)
    digest = hashlib.sha256(b"quire adapter 1 %d " % len(raw))
    digest.update(raw)
    digest.update(data)
    config_path = folder / CONFIG
    try:
        settings = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError):  # clients may see this: no text of a library
        raise AdapterError(f"{config_path}: cannot be read as a JSON object") from None
    config = parse_adapter_config(settings, config_path, max_rank)
    pairs = _pairs(folder / WEIGHTS, data)
    parts = [part for name, pair in pairs.items() for part in _parts(folder, name, pair, config, model, layers)]
    seen: set[str] = set()
    for part in parts:
        if part.module in seen:
            raise AdapterError(f"{folder}: two tensors adapt {part.module}")
        seen.add(part.module)
    num_bytes = sum(tensor.data.nbytes for pair in pairs.values() for tensor in pair)
    return Adapter(folder, digest.digest(), max(part.rank for part in parts), num_bytes, tuple(parts))


def projection_shapes(model: ModelConfig, layer: int) -> Shapes:
    """Return the outputs and inputs of a layer's projections that an adapter may change, by name below the layer."""
    kv_heads, dim = model.kv_shape(layer)
    hidden, heads = model.hidden_size, model.num_heads * dim
    shapes = {"self_attn.q_proj": (heads, hidden), "self_attn.o_proj": (hidden, heads)}
    if model.cache_source(layer) == layer:
        shapes |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (kv_heads * dim, hidden))
    moe = model.moe
    if moe is None or layer not in moe.layers:
        shapes |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (model.intermediate_size, hidden))
        return shapes | {"mlp.down_proj": (hidden, model.intermediate_size)}
    shapes["mlp.gate"] = (moe.num_experts, hidden)
    if moe.shared_width:
        name, width = "mlp.shared_experts", moe.shared_width
        shapes |= {f"{name}.gate_proj": (width, hidden), f"{name}.up_proj": (width, hidden)}
        shapes[f"{name}.down_proj"] = (hidden, width)
    for expert in range(moe.num_experts) if moe.activation != "swiglu_oai" else ():
        name, width = f"mlp.experts.{expert}", moe.intermediate_size
        shapes |= {f"{name}.gate_proj": (width, hidden), f"{name}.up_proj": (width, hidden)}
        shapes[f"{name}.down_proj"] = (hidden, width)
    return shapes


def largest_bytes(layers: Sequence[Shapes], rank: int) -> int:
    """Return the bytes in float32 of an adapter that changes every projection with this rank."""
    return sum(4 * rank * (rows + columns) for layer in layers for rows, columns in layer.values())


def _read_files(folder: Path, most: int, max_rank: int) -> tuple[bytes, memoryview]:
    """Return the contents of both files. ``most``: bytes that the weights may have."""
    if not folder.is_dir():
        raise AdapterError(f"{folder} is not a folder with an adapter")
    try:
        check_links(folder)
    except ConfigError as error:
        raise AdapterError(str(error)) from None
    config, weights = folder / CONFIG, folder / WEIGHTS
    if not config.is_file():
        raise AdapterError(f"{folder} is not an adapter: {CONFIG} not found")
    if not weights.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        reason = ", only pickled weights, which are never opened" if pickled else ""
        raise AdapterError(f"{folder}: {WEIGHTS} not found{reason}")
    size = 0
    for file, limit in ((config, MAX_CONFIG_BYTES), (weights, most)):
        if (size := file.stat().st_size) > limit:
            raise AdapterError(f"{file}: has {size} bytes; an adapter of rank {max_rank} has at most {limit}")
    try:
        # Not read_bytes: views of an array that may be changed can be tensors of torch. A file that grows is cut.
        data = np.empty(size, np.uint8).data
        with weights.open("rb") as opened:
            return config.read_bytes(), data[: opened.readinto(data)]
    except OSError as error:
        raise AdapterError(f"{folder}: cannot be read: {error.strerror or error}") from None


def _header(path: Path, data: memoryview) -> tuple[dict[str, _Entry], int]:
    """Return the tensors of a safetensors file by name, and the offset of their values.

    The library would copy all values while it holds the interpreter lock: half a second for 300 MB, in which a front
    end or a worker does nothing else.
    """
    first = 8 + int.from_bytes(data[:8], "little")
    try:
        raw = msgspec.json.decode(data[8:first], type=dict[str, msgspec.Raw])
        return {name: msgspec.json.decode(raw[name], type=_Entry) for name in raw if name != "__metadata__"}, first
    except (ValueError, RecursionError):
        raise AdapterError(f"{path}: is truncated, damaged or not a safetensors file: invalid header") from None


def _pairs(path: Path, data: memoryview) -> dict[str, Pair]:
    """Return A and B of each module, by its name in the model."""
    entries, first = _header(path, data)
    values = data[first:]
    found: dict[str, dict[str, AdapterTensor]] = {}
    for name, tensor in entries.items():
        shown = printable(name)[1:-1]
        match = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
        if match is None or not name.startswith(_PREFIX):
            raise AdapterError(f"{path}: tensor {shown} {_why_unused(name)}")
        dtype, shape = tensor.dtype, tensor.shape
        if dtype not in _STORED:
            raise AdapterError(
                f"{path}: tensor {shown} has dtype {printable(dtype)[1:-1]}; supported: {', '.join(_STORED)}"
            )
        if len(shape) != 2 or min(shape) < 1:
            raise AdapterError(f"{path}: tensor {shown} has shape {shape}; it must be a matrix that is not empty")
        begin, end = tensor.data_offsets
        if not 0 <= begin <= end <= len(values) or end - begin != shape[0] * shape[1] * _STORED[dtype].itemsize:
            reason = f"the size of tensor {shown} is not that of its shape {shape}"
            raise AdapterError(f"{path}: is truncated, damaged or not a safetensors file: {reason}")
        held = AdapterTensor(name, dtype, np.frombuffer(values[begin:end], _STORED[dtype]).reshape(shape))
        if not held.is_finite():
            raise AdapterError(f"{path}: tensor {shown} has values that are not finite")
        found.setdefault(match[1], {})[match[2]] = held
    if not found:
        raise AdapterError(f"{path}: has no tensors")
    for name, pair in found.items():
        if len(pair) < 2:
            missing = "B" if "A" in pair else "A"
            raise AdapterError(f"{path}: tensor {_PREFIX}{printable(name)[1:-1]}.lora_{missing}.weight is missing")
    return {name: (pair["A"], pair["B"]) for name, pair in found.items()}


def _why_unused(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return "belongs to DoRA, which is not supported"
    if "lora_embedding" in name or "embed_tokens" in name or "lm_head" in name:
        return "belongs to an embedding or the output layer; adapters of these are not supported"
    return f"is not used: names must be {_PREFIX}MODULE.lora_A.weight or lora_B.weight"


def _parts(
    folder: Path, name: str, pair: Pair, config: AdapterConfig, model: ModelConfig, layers: Sequence[Shapes]
) -> Iterator[AdapterPart]:
    """Yield the parts that one module's matrices are: one, or one per projection and expert of a fused module."""
    a, b = pair
    if model.transformers is not None:
        if name not in layers[0]:
            raise AdapterError(
                f"{folder}: tensor {a.name} adapts {printable(name)}, which is not supported; supported are linear "
                f"layers outside of experts, such as {', '.join(list(layers[0])[:6])}"
            )
        outputs, inputs = layers[0][name]
        _require(folder, a, (config.rank_of(name), inputs))
        _require(folder, b, (outputs, config.rank_of(name)))
        yield AdapterPart(name, a, b, config.scale_of(name))
        return
    match = _LAYER.fullmatch(full_name(f"{name}.weight").removesuffix(".weight"))
    if match is None or int(match[1]) >= model.num_layers:
        raise AdapterError(
            f"{folder}: tensor {a.name} adapts {printable(name)}; supported are the projections of attention and MLP "
            f"in the model's {model.num_layers} layers"
        )
    layer, module = int(match[1]), match[2]
    shapes = layers[layer]
    if module in _EXPERTS and model.moe is not None and "mlp.experts.0.gate_proj" in shapes:
        yield from _expert_parts(folder, name, pair, config, model, layer)
        return
    own = (module,) if module in shapes else _FUSED.get(module, ())
    if not own or not all(part in shapes for part in own):
        raise AdapterError(
            f"{folder}: tensor {a.name} adapts {printable(module)}, which is not supported; "
            f"supported in layer {layer}: {', '.join(sorted(shapes)[:12])}"
        )
    rank, outputs = config.rank_of(name), sum(shapes[part][0] for part in own)
    _require(folder, a, (rank, shapes[own[0]][1]))
    _require(folder, b, (outputs, rank))
    first = 0
    for part in own:
        rows = slice(first, first + shapes[part][0])
        yield AdapterPart(f"model.layers.{layer}.{part}", a, b.take(rows, slice(None)), config.scale_of(name))
        first = rows.stop


def _expert_parts(
    folder: Path, name: str, pair: Pair, config: AdapterConfig, model: ModelConfig, layer: int
) -> Iterator[AdapterPart]:
    """Yield the parts of each expert, of matrices that PEFT stores for all of them: A's rows by expert and rank, B's
    columns by rank and expert.
    """
    moe, hidden = model.moe, model.hidden_size
    assert moe is not None
    count, width = moe.num_experts, moe.intermediate_size
    a, b = _exchanged(pair, count) if moe.scales_inputs else pair
    is_down = b.data.shape[0] != 2 * width
    parameter = "down_proj" if is_down else "gate_up_proj"
    module = f"{name.removesuffix('.base_layer')}.{parameter}"
    rank, scale = config.rank_of(module), config.scale_of(module)
    _require(folder, a, (count * rank, width if is_down else hidden))
    _require(folder, b, (hidden if is_down else 2 * width, count * rank))
    cuts = {"down_proj": slice(None)} if is_down else {"gate_proj": slice(0, width), "up_proj": slice(width, None)}
    for expert in range(count):
        own = a.take(slice(expert * rank, (expert + 1) * rank), slice(None))
        for projection, rows in cuts.items():
            part = b.take(rows, slice(expert, None, count))
            yield AdapterPart(f"model.layers.{layer}.mlp.experts.{expert}.{projection}", own, part, scale)


def _exchanged(pair: Pair, count: int) -> Pair:
    """Return A and B of the experts' transposed matrices: Llama 4 has inputs before outputs, and PEFT takes them for
    outputs. Matrices that are not those of ``count`` experts are returned as they are.
    """
    a, b = pair
    rank, rest = divmod(a.data.shape[0], count)
    if rest or b.data.shape[1] != count * rank:
        return pair
    rows = b.data.reshape(-1, rank, count).transpose(2, 1, 0).reshape(count * rank, -1)
    columns = a.data.reshape(count, rank, -1).transpose(2, 1, 0).reshape(-1, count * rank)
    return AdapterTensor(a.name, b.dtype, rows), AdapterTensor(b.name, a.dtype, columns)


def _require(folder: Path, tensor: AdapterTensor, shape: tuple[int, int]) -> None:
    if tensor.data.shape != shape:
        raise AdapterError(
            f"{folder}: tensor {tensor.name} has shape {list(tensor.data.shape)}, but the model and {CONFIG} require "
            f"{list(shape)}"
        )
