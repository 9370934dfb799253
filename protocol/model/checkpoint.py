"""Reads the headers of a checkpoint's safetensors files, without reading a tensor and without torch.

This rejects an unusable checkpoint before any process starts. Pickled weights (``.bin``, ``.pt``) are never opened.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open

from quire.protocol.errors import ConfigError, printable
from quire.protocol.model.checkpoint_links import check_links
from quire.protocol.model.config_fields import read_json
from quire.protocol.model.encoder_config import decoder_style
from quire.protocol.model.gguf_file import QUANTISED, GgufTensor, is_gguf, read_gguf
from quire.protocol.model.gguf_model import interleaved_rows, named_tensors
from quire.protocol.model.model_config import ModelConfig
from quire.protocol.model.weight_format import gguf_format

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
SCORE = "score.weight"
"""The head of a classification."""

EMBEDDING = "model.embed_tokens.weight"

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
PACKED_BYTES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "I32": 4, "I64": 8}
"""Dtypes of quantised weights, their scales and zero points. Each weight slot allows only its own."""
MASK_BYTES = {"BOOL": 1}
"""Dtype of the causal masks in old checkpoints, which classes of transformers ignore by name."""
MAX_DIMENSIONS = 8

_RENAMED = (
    (".feed_forward.", ".mlp."),
    (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
    (".block_sparse_moe.router.layer.", ".mlp.gate."),
    (".block_sparse_moe.", ".mlp."),
    (".mlp.router.", ".mlp.gate."),
    (".mlp.shared_expert.", ".mlp.shared_experts."),
    ("transformer.wte.", "model.embed_tokens."),
    ("transformer.ln_f.", "model.norm."),
    ("transformer.h.", "model.layers."),
    (".attn.attention.out_proj.", ".self_attn.o_proj."),
    (".attn.attention.", ".self_attn."),
    (".ln_1.", ".input_layernorm."),
    (".ln_2.", ".post_attention_layernorm."),
    (".mlp.c_fc_0.", ".mlp.gate_proj."),
    (".mlp.c_fc_1.", ".mlp.up_proj."),
    (".mlp.c_proj.", ".mlp.down_proj."),
)
"""Parts of names in Llama 4, Mixtral, GraniteMoE and EXAONE 3, in the order in which they are replaced."""
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_MIXTRAL_EXPERT = re.compile(r"(.*\.experts\.\d+)\.(w[123])\.(\w+)")
_WEIGHT = re.compile(r"model\.layers\..*(?:\.weight|\.experts\.(?:gate_up_proj|down_proj))")
_ANY_WEIGHT = re.compile(r".*\.weight")
_SCALES = (".weight_scale", ".weight_scale_inv", ".scales")
_NARROW = {"F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".h5")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Name, dtype and shape of one tensor, as the header of its file states them.

    Attributes:
        dtype: type of the values that a slot gets: a quantised tensor of a GGUF file that is no matrix
            of the model counts as F32.
        gguf: type and place in a GGUF file.
        interleaved: if not 0, the rows of a head, whose rows are those of its two halves in turn (GGUF, Llama).
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    gguf: GgufTensor | None = None
    interleaved: int = 0

    @property
    def num_bytes(self) -> int:
        if self.gguf is not None:
            return self.gguf.num_bytes
        return prod(self.shape) * (DTYPE_BYTES | PACKED_BYTES | MASK_BYTES)[self.dtype]


def stored_tensors(folder: Path, *, renamed: bool = True) -> dict[str, StoredTensor]:
    """Return every tensor of a checkpoint by its full name, from the headers of all its files.

    Args:
        renamed: by the names of Quire's own models; otherwise by those in the files.

    Raises:
        ConfigError: one line that names file and tensor.
    """
    if is_gguf(folder):
        return _gguf_tensors(folder)
    check_links(folder)
    allowed = DTYPE_BYTES | PACKED_BYTES | ({} if renamed else MASK_BYTES)
    stored: dict[str, StoredTensor] = {}
    for file, expected in _files(folder).items():
        tensors = _read_header(file)
        if expected is not None:
            absent = sorted(expected - {tensor.name for tensor in tensors})
            if absent:
                raise ConfigError(
                    f"{file}: tensor {printable(absent[0])[1:-1]} is missing, but {INDEX} places it there"
                )
        for tensor in tensors:
            if "rotary_emb." in tensor.name:
                continue  # precomputed tables in old checkpoints; they follow from config.json
            if tensor.dtype not in allowed:
                raise ConfigError(
                    f"{file}: tensor {tensor.name} has dtype {tensor.dtype}; supported: {', '.join(DTYPE_BYTES)}"
                )
            name = full_name(tensor.name) if renamed else tensor.name
            if name in stored:
                raise ConfigError(f"{file}: tensor {tensor.name} is also in {stored[name].file.name}")
            stored[name] = tensor
    return stored


def check_sizes(folder: Path, stored: Mapping[str, StoredTensor], config: ModelConfig) -> None:
    """Compare tensor sizes with config.json, so that a mismatch fails before any process starts.

    Raises:
        ConfigError: the shape of the embedding or the head, or the number of layers, differs from config.json.
    """
    if config.transformers is not None:
        return  # its names are known to workers alone, which compare all shapes before they read a tensor
    shape = (config.vocab_size, config.hidden_size)
    for name in (EMBEDDING, HEAD):
        tensor = stored.get(name)
        if tensor is not None and tensor.shape != shape:
            raise ConfigError(
                f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}, "
                f"but config.json requires {list(shape)}"
            )
    layers = {int(match[1]) for name in stored if (match := re.match(r"model\.layers\.(\d{1,9})\.", name))}
    if len(layers) != config.num_layers or max(layers, default=-1) != config.num_layers - 1:
        raise ConfigError(f"{folder}: has tensors of {len(layers)} layers; config.json requires {config.num_layers}")


def with_stored_format(folder: Path, stored: Mapping[str, StoredTensor], config: ModelConfig) -> ModelConfig:
    """Complete the configuration from the stored tensors: which layers are plain, and the dtype of the scales.

    A model with a pooling configuration may be stored without its output head, and then it does not generate.

    The files decide which layers are quantised, not the patterns of ``config.json``: these are written for the names of
    modules in the framework that made the file.

    Raises:
        ConfigError: the output head is quantised.
    """
    if config.vision is not None:  # its config.json need not say whether the head is the embedding
        config = msgspec.structs.replace(config, tie_word_embeddings=HEAD not in stored)
    if config.pooling is not None and not config.pooling.label_token_ids:
        has_head = config.tie_word_embeddings or HEAD in stored
        config = msgspec.structs.replace(config, generates=config.generates and has_head)
    declared = config.weight_format
    types = {name: tensor.dtype for name, tensor in stored.items() if tensor.dtype in QUANTISED}
    if types and declared is None:
        layers = {name.removesuffix(".weight"): kind for name, kind in types.items()}
        return msgspec.structs.replace(config, weight_format=gguf_format(layers))
    if declared is None:
        return config
    head = next((tensor for name, tensor in stored.items() if name.startswith("model.lm_head.")), None)
    if head is not None:
        raise ConfigError(
            f"{head.file}: tensor {head.name}: a quantised output head is not supported: leave lm_head in 16 bits"
        )
    pattern = _WEIGHT if config.transformers is None else _ANY_WEIGHT
    plain = [
        name.removesuffix(".weight")
        for name, tensor in stored.items()
        if tensor.dtype in DTYPE_BYTES and len(tensor.shape) > 1 and pattern.fullmatch(name)
    ]
    scales = {tensor.dtype for name, tensor in stored.items() if name.endswith(_SCALES)}
    dtype = _NARROW.get(next(iter(scales)), "float32") if len(scales) == 1 else "float32"
    present = any(name.endswith((".g_idx", ".weight_g_idx")) for name in stored)
    rounding = declared.fp8_activations
    if rounding == "static" and not any(name.endswith(".input_scale") for name in stored):
        rounding = ""
    completed = msgspec.structs.replace(
        declared,
        fp8_activations=rounding,
        plain=tuple(sorted(plain)),
        scale_dtype=dtype,
        act_order=declared.act_order and present,
        has_input_groups=present,
    )
    return msgspec.structs.replace(config, weight_format=completed)


def full_name(name: str) -> str:
    """Return the tensor's name in a text model with a head, with all families' names for experts alike.

    A model saved without its head lacks the prefix ``model.``; in a vision-language model the text part is nested.
    Tensors of an encoder have the names of the corresponding ones of a decoder.
    """
    for old, new in _RENAMED:
        name = name.replace(old, new)
    match = _MIXTRAL_EXPERT.fullmatch(name)
    name = f"{match[1]}.{_MIXTRAL[match[2]]}.{match[3]}" if match else name
    for prefix in ("model.language_model.", "language_model.model.", "language_model.", "model.text_model."):
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    if name in (HEAD, SCORE):
        return name
    return decoder_style(name if name.startswith("model.") else f"model.{name}")


def is_text_tensor(name: str) -> bool:
    """Whether a tensor of a checkpoint with a vision tower, by its full name, belongs to the language model."""
    return name.startswith(("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head."))


def _gguf_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a GGUF file. Norms that are quantised are widened as they are read."""
    file = read_gguf(path)
    stored = {}
    for full, tensor in named_tensors(file):
        name = tensor.name
        packed = tensor.kind in QUANTISED
        if packed and len(tensor.shape) != 2:
            raise ConfigError(f"{path}: tensor {name} has type {tensor.kind} and {len(tensor.shape)} dimensions, not 2")
        kept = _WEIGHT.fullmatch(full) or full in (EMBEDDING, HEAD)
        dtype = "F32" if packed and not kept else tensor.kind
        stored[full] = StoredTensor(path, name, dtype, tensor.shape, tensor, interleaved_rows(file, name))
    return stored


def _read_header(file: Path) -> list[StoredTensor]:
    """Return the tensors of one file in the order of their offsets.

    The library checks that each tensor's size matches its shape and dtype, and that the tensors fill the file.

    Raises:
        ConfigError: one line that names the file, and the tensor if the library names it.
    """
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
            tensors = [StoredTensor(file, name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices]
    except SafetensorError as error:
        reason = printable(str(error).removeprefix("Error while deserializing header: "))[1:-1]
        raise ConfigError(f"{file}: is truncated, damaged or not a safetensors file: {reason}") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from None
    for tensor in tensors:
        printable_name = printable(tensor.name)[1:-1]
        if printable_name != tensor.name:
            raise ConfigError(f"{file}: invalid header for tensor {printable_name}: invalid name")
        if len(tensor.shape) > MAX_DIMENSIONS:
            raise ConfigError(
                f"{file}: invalid header for tensor {tensor.name}: "
                f"the shape has {len(tensor.shape)} dimensions, at most {MAX_DIMENSIONS} are allowed"
            )
    return tensors


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """Return the files to read, each with the tensors that the index places there (None without an index)."""
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return {single: None}
    if not index.is_file():
        raise ConfigError(_no_weights(folder))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ConfigError(f"{index}: has no readable weight_map")
    names: dict[str, str] = weight_map
    files: dict[Path, set[str] | None] = {}
    for shard in sorted(set(names.values())):
        if Path(shard).name != shard or not shard.endswith(".safetensors") or printable(shard)[1:-1] != shard:
            raise ConfigError(f"{index}: {printable(shard)} is not the name of a safetensors file in this directory")
        if not (folder / shard).is_file():
            tensor = next(tensor for tensor, file in names.items() if file == shard)
            raise ConfigError(f"{folder / shard}: shard is missing (it should hold {printable(tensor)[1:-1]})")
        files[folder / shard] = {tensor for tensor, file in names.items() if file == shard}
    if not files:
        raise ConfigError(f"{index}: has no readable weight_map")
    return files


def _no_weights(folder: Path) -> str:
    """Return the error text for a directory without readable weights."""
    if not folder.is_dir():
        return f"{folder} is not a folder with a checkpoint"
    pickled = sorted(f.name for f in folder.iterdir() if f.suffix in _PICKLED)
    if pickled:
        return f"{folder}: has only pickled weights ({pickled[0]}), which are never opened; convert them to safetensors"
    other = sorted(f.name for f in folder.glob("*.safetensors"))
    found = f" (found {other[0]})" if other else ""
    return f"{folder}: has neither {SINGLE} nor {INDEX}{found}"
