"""How a checkpoint stores the weights of its linear layers, read from ``quantization_config``.

Methods: compressed-tensors (llm-compressor), fp8 (DeepSeek, Qwen, AutoFP8), gptq, awq and modelopt. The tensors are
read by ``worker_proc/models/formats``.
"""

import re
from typing import Any, Literal

import msgspec

from quire.protocol.errors import ConfigError, printable
from quire.protocol.model.config_fields import Fields
from quire.protocol.model.gguf_file import BLOCKS

SUPPORTED_METHODS = (
    "compressed-tensors (pack-quantized with 4 or 8 bits, int-quantized, float-quantized, nvfp4-pack-quantized)",
    "fp8",
    "gptq",
    "awq",
    "modelopt (FP8, NVFP4)",
)

_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
_FUSED |= {"up_proj": "gate_up_proj"}
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(\w+)")


ONLINE_GROUP = 32


class WeightFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The format of a checkpoint's quantised linear layers. The output head and the embedding are never quantised.

    Attributes:
        layout: which tensors a layer has, and their shapes: a format of compressed-tensors, fp8, gptq, awq,
            modelopt-nvfp4, or online for plain tensors that are quantised as they are loaded.
        kind: codes in memory: int8, int4, fp8 or fp4 (``kernels/common/scaled_weight.py``), or the type of a GGUF
            file's blocks (``kernels/common/block_weight.py``).
        group_size: inputs that share a scale; 0: all inputs.
        block_rows: outputs that share a scale; 0: all outputs.
        zero_points: each scale has a zero point.
        zero_offset: number added to the stored zero points: 1 in the first version of GPTQ.
        act_order: groups are not consecutive inputs.
        has_input_groups: the group of each input is a tensor of the checkpoint (``g_idx``).
        int8_activations: activations are rounded to int8 with a scale for each token.
        fp8_activations: activations are rounded to fp8, with scales of their own, or with the layer's ``input_scale``.
        activation_group: inputs of a token that share such a scale of their own; 0: all inputs.
        scale_dtype: dtype of the scales in memory; float32 if the checkpoint's tensors are not known or differ.
        plain: layers that are not quantised, by full name.
        types: the type of each quantised layer of a GGUF file, by full name.
    """

    layout: str
    kind: str
    group_size: int = 0
    block_rows: int = 1
    zero_points: bool = False
    zero_offset: int = 0
    act_order: bool = False
    has_input_groups: bool = False
    int8_activations: bool = False
    fp8_activations: Literal["", "dynamic", "static"] = ""
    activation_group: int = 0
    scale_dtype: str = "float32"
    plain: tuple[str, ...] = ()
    types: dict[str, str] = {}

    @property
    def pack(self) -> int:
        """The number of codes in one element of the stored weight, along the inputs."""
        per_word = 8 if self.kind == "int4" else 4
        return {"pack-quantized": per_word, "gptq": per_word}.get(self.layout, 2 if self.kind in ("int4", "fp4") else 1)

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of one weight in memory, with its share of a group's scale and zero point; a GGUF file's mean."""
        if self.types:
            return sum(BLOCKS[kind][1] / BLOCKS[kind][0] for kind in self.types.values()) / len(self.types)
        scale = {"float8_e4m3fn": 1, "float32": 4}.get(self.scale_dtype, 2) + self.zero_points
        return (0.5 if self.kind in ("int4", "fp4") else 1) + (scale / self.group_size if self.group_size else 0)

    def of_layer(self, layer: str) -> "WeightFormat | None":
        """Return the format of a layer, by its full name with separate projections; None if it is not quantised."""
        if self.layout != "gguf":
            return self if self.covers(layer) else None
        kind = self.types.get(layer)
        if kind is None:
            return None
        codes = {"Q4_0": "int4", "Q8_0": "int8"}.get(kind, kind)
        return WeightFormat(layout="gguf", kind=codes, group_size=BLOCKS[kind][0], scale_dtype="float16")

    def covers(self, layer: str) -> bool:
        """Whether a layer is quantised, by its full name with separate projections."""
        if layer in self.plain:
            return False
        match = _EXPERT.fullmatch(layer)
        base, _, name = (f"{match[1]}.{match[2]}" if match else layer).rpartition(".")
        return f"{base}.{_FUSED.get(name, name)}" not in self.plain


def gguf_format(types: dict[str, str]) -> WeightFormat:
    """Return the format of a GGUF file, whose layers may be of different types."""
    return WeightFormat(layout="gguf", kind="mixed", types=types)


def online_format(kind: str) -> WeightFormat:
    """Return the format of plain weights that are quantised at load: int8 and fp8 by outputs, int4 in small groups."""
    if kind == "int4":
        return WeightFormat(layout="online", kind=kind, group_size=ONLINE_GROUP, scale_dtype="bfloat16")
    return WeightFormat(layout="online", kind=kind)


def parse_weight_format(raw: dict[str, Any], architecture: str, where: str) -> WeightFormat | None:
    """Return the format that ``quantization_config`` declares, or None if it declares no quantised weights.

    Raises:
        ConfigError: the method or one of its settings is not supported.
    """
    given = raw.get("quantization_config")
    method = given.get("quant_method") if isinstance(given, dict) else None
    readers = {
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "gptq": _gptq,
        "awq": _awq,
        "modelopt": _modelopt,
    }
    if not isinstance(given, dict) or not isinstance(method, str) or method not in readers:
        return None
    field = Fields(given, f"{where}: quantization_config")
    form = readers[method](field)
    if form is not None and architecture == "GptOssForCausalLM":
        raise ConfigError(f"{field.where}: method {method!r} is not supported for {architecture}; supported: mxfp4")
    return form


def _compressed_tensors(field: Fields) -> WeightFormat | None:
    for name in ("sparsity_config", "transform_config"):
        value = field.raw.get(name)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise ConfigError(f"{field.where}: {name} is not supported: use a checkpoint without it")
    groups = field.raw.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ConfigError(f"{field.where}: config_groups must be an object of objects")
    formats = [
        _compressed_group(Fields(group, f"{field.where}: {name}"), field.raw.get("format"))
        for name, group in groups.items()
        if group.get("weights")
    ]
    if any(each != formats[0] for each in formats):
        raise ConfigError(f"{field.where}: config_groups with different formats of weights are not supported: use one")
    if not formats and not field.raw.get("kv_cache_scheme"):
        raise ConfigError(f"{field.where}: config_groups must have a group with weights")
    return formats[0] if formats else None


def _compressed_group(group: Fields, layout: object) -> WeightFormat:
    weights = group.raw["weights"]
    if not isinstance(weights, dict):
        raise ConfigError(f"{group.where}: weights must be an object (got {printable(weights)})")
    field = Fields(weights, f"{group.where}: weights")
    known = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized")
    layout = group.choice("format", group.raw.get("format") or layout, known)
    kinds = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "fp8", ("float", 4): "fp4"}
    bits = field.size("num_bits", default=8, high=64)
    kind = kinds.get((field.choice("type", field.raw.get("type") or "int", ("int", "float")), bits))
    if layout == "naive-quantized":
        layout = "float-quantized" if kind == "fp8" else "int-quantized"
    kinds_of = {"pack-quantized": ("int4", "int8"), "int-quantized": ("int8",), "float-quantized": ("fp8",)}
    allowed = kinds_of.get(layout, ("fp4",))
    if kind not in allowed:
        raise ConfigError(
            f"{field.where}: type {field.raw.get('type') or 'int'} with {bits} bits is not supported in format "
            f"{layout}; supported: {' and '.join(allowed)}"
        )
    if field.raw.get("dynamic"):
        raise ConfigError(f"{field.where}: dynamic must be false for weights")
    zero_points = not field.flag("symmetric", True)
    if zero_points and kind in ("fp8", "fp4"):
        raise ConfigError(f"{field.where}: symmetric must be true for weights of type float")
    group_size, block_rows = _strategy(field, kind)
    fp8_activations, activation_group = _fp8_activations(group) if kind == "fp8" else ("", 0)
    return WeightFormat(
        layout=layout,
        kind=kind,
        group_size=group_size,
        block_rows=block_rows,
        zero_points=zero_points,
        act_order=field.raw.get("actorder") in ("group", "dynamic", True),
        has_input_groups=field.raw.get("actorder") in ("group", "dynamic", True),
        int8_activations=kind == "int8" and _rounds_activations(group),
        fp8_activations=fp8_activations,
        activation_group=activation_group,
    )


def _strategy(field: Fields, kind: str) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a scale; 0: all."""
    known = ("tensor_group",) if kind == "fp4" else ("tensor", "channel", "group", "block")
    default = "group" if (field.raw.get("group_size") or 0) else "tensor"
    strategy = field.choice("strategy", field.raw.get("strategy") or default, known)
    if strategy in ("group", "tensor_group"):
        size = field.size("group_size", low=2)
        if kind == "fp4" and size != 16:
            raise ConfigError(f"{field.where}: group_size {size} is not supported for NVFP4; supported: 16")
        return size, 1
    if strategy == "block":
        return _block(field, "block_structure")
    return 0, 0 if strategy == "tensor" else 1


def _block(field: Fields, name: str) -> tuple[int, int]:
    """Return a block's numbers of inputs and outputs."""
    block = field.raw.get(name)
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 1 <= n <= 65536 for n in block):
        raise ConfigError(f"{field.where}: {name} must be a list of two integers from 1 to 65536")
    return block[1], block[0]


def _rounds_activations(group: Fields) -> bool:
    """Whether activations are rounded to int8; raise ConfigError if in another way than with a scale per token.

    Activations that the checkpoint's maker rounded to floats beside other weights than fp8 are not rounded.
    """
    given = group.raw.get("input_activations")
    if not given:
        return False
    expected = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    for name, value in expected.items():
        found = given.get(name) if isinstance(given, dict) else None
        if found != value and not (found is None and name in ("type", "symmetric")):
            raise ConfigError(
                f"{group.where}: input_activations: {name} {printable(found)} is not supported beside int8 weights; "
                f"supported: 8 bits, type int, symmetric, dynamic, strategy token"
            )
    return True


def _fp8_activations(group: Fields) -> tuple[Literal["", "dynamic", "static"], int]:
    """Return how activations are rounded beside fp8 weights, and the inputs that share a scale.

    A scale for each token replaces one for all tokens of a step, with which results would depend on other requests.
    """
    given = group.raw.get("input_activations")
    if not isinstance(given, dict) or (given.get("type"), given.get("num_bits")) != ("float", 8):
        return "", 0
    if not given.get("dynamic"):
        return ("static" if given.get("strategy") in (None, "tensor") else ""), 0
    field = Fields(given, f"{group.where}: input_activations")
    return "dynamic", field.size("group_size", low=2) if given.get("strategy") == "group" else 0


def _fp8(field: Fields) -> WeightFormat:
    if field.raw.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise ConfigError(f"{field.where}: fmt {printable(field.raw['fmt'])} is not supported; supported: e4m3")
    if field.has("scale_fmt"):
        field.choice("scale_fmt", field.raw["scale_fmt"], ("float",))
    group_size, block_rows = _block(field, "weight_block_size") if field.has("weight_block_size") else (0, 0)
    return WeightFormat(
        layout="fp8",
        kind="fp8",
        group_size=group_size,
        block_rows=block_rows,
        fp8_activations="static" if field.raw.get("activation_scheme") == "static" else "dynamic",
        activation_group=group_size,
    )


def _integer_kind(field: Fields, name: str, supported: tuple[int, ...]) -> str:
    bits = field.size(name, high=64)
    if bits not in supported:
        listed = " and ".join(str(each) for each in supported)
        raise ConfigError(f"{field.where}: {name} {bits} is not supported; supported: {listed}")
    return f"int{bits}"


def _group_size(field: Fields) -> int:
    """Return the inputs of a group; 0 for -1, which means all inputs."""
    return 0 if field.raw.get("group_size") == -1 else field.size("group_size", low=2)


def _gptq(field: Fields) -> WeightFormat:
    kind = _integer_kind(field, "bits", (4, 8))
    if field.raw.get("dynamic"):
        raise ConfigError(f"{field.where}: dynamic (other settings for some layers) is not supported: use one setting")
    version = field.choice("checkpoint_format", field.raw.get("checkpoint_format") or "gptq", ("gptq", "gptq_v2"))
    return WeightFormat(
        layout="gptq",
        kind=kind,
        group_size=_group_size(field),
        zero_points=not field.flag("sym", True),
        zero_offset=1 if version == "gptq" else 0,
        act_order=field.flag("desc_act"),
        has_input_groups=True,
    )


def _awq(field: Fields) -> WeightFormat:
    kind = _integer_kind(field, "bits", (4,))
    field.choice("version", str(field.raw.get("version") or "gemm").lower(), ("gemm",))
    return WeightFormat(
        layout="awq", kind=kind, group_size=_group_size(field), zero_points=field.flag("zero_point", True)
    )


def _modelopt(field: Fields) -> WeightFormat | None:
    """Read TensorRT Model Optimizer's settings; without ``quant_algo`` only the KV cache may be quantised."""
    if field.raw.get("quant_algo") is None:
        return None
    if field.choice("quant_algo", field.raw["quant_algo"], ("FP8", "NVFP4")) == "FP8":
        return WeightFormat(layout="fp8", kind="fp8", block_rows=0, fp8_activations="static")
    return WeightFormat(layout="modelopt-nvfp4", kind="fp4", group_size=16)
