"""Mapping of a checkpoint's tensors to a model's weight slots: names, fused tensors and all layouts of experts.

Experts are stored as one tensor each (Mixtral's ``w1``, ``w2``, ``w3``; Qwen's ``gate_proj``, ``up_proj``,
``down_proj``) or as one tensor per layer (``[experts, 2 * width, hidden]``, gate rows before up rows). gpt-oss stores
one tensor per layer with inputs before outputs and gate and up interleaved, or blocks and scales of MXFP4, which have
slots of their own. Llama 4 has inputs before outputs too, and gate before up.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.protocol.errors import ConfigError
from quire.protocol.model.checkpoint import EMBEDDING, HEAD, SCORE, StoredTensor, is_text_tensor
from quire.protocol.model.encoder_config import is_unread_head
from quire.protocol.model.model_config import ModelConfig
from quire.worker_proc.models.weight_slot import WeightSlot

_FUSED = re.compile(r"(.*\.(?:self_attn|mlp))\.(qkv_proj|gate_up_proj)\.(\w+)")
_ALL_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")
_PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
_KV_SCALE = re.compile(
    r"model\.layers\.(\d{1,9})\.self_attn\."
    r"(?:(?:attn\.|[qkv]_proj\.)?(?:(kv|[qkv])_scale)|([qkv])_proj\.output_scale|(?:attn\.)?prob(?:_output)?_scale)"
)
"""Scales of attention as llm-compressor (``k_scale``), ModelOpt (``k_proj.k_scale``), Quark and older formats of
compressed-tensors (``k_proj.output_scale``), AutoFP8 (``kv_scale`` for both) and vLLM (``attn.k_scale``) name them."""
UNREAD = (".weight_shape", ".input_scale", ".input_global_scale", ".output_scale")
"""Ends of names of tensors of a quantised layer that change nothing here."""
_INPUTS_FIRST = ("GptOssForCausalLM", "Llama4ForCausalLM")
"""Architectures whose tensors of all experts have inputs before outputs, as files of Qwen3-VL-MoE may, too."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A slot and the place of its tensor in the checkpoint.

    Attributes:
        lead: index into the stored tensor's leading dimensions (an expert).
        start, step: the slot's row ``r`` is the stored row ``start + step * r``, along the slot's ``rows_dim``.
        transposed: whether rows are the last dimension of the stored tensor.
    """

    stored: StoredTensor
    slot: WeightSlot
    lead: tuple[int, ...] = ()
    start: int = 0
    step: int = 1
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Sources:
    """What a checkpoint holds of a model.

    Attributes:
        pieces: the source of every slot.
        tied: tensors without a slot, each with the source that it must be equal to, because their weights are tied.
    """

    pieces: list[TensorSource]
    tied: list[tuple[StoredTensor, TensorSource]]


def find_tensor_sources(
    folder: Path, stored: Mapping[str, StoredTensor], slots: Mapping[str, WeightSlot], config: ModelConfig
) -> Sources:
    """Return the source of every slot, in the order of the stored tensors.

    Raises:
        ConfigError: a tensor is missing, duplicate, not part of the model, or of the wrong shape.
    """
    head = stored.get(HEAD) if HEAD not in slots and config.generates else None
    sources: dict[str, TensorSource] = {}
    unused = []
    for name, tensor in stored.items():
        if tensor is head:
            continue
        found = _sources_of(name, tensor, slots, config)
        if not found and not _is_ignored(name, config):
            unused.append(tensor)
        for slot, source in found.items():
            if slot in sources:
                other = sources[slot].stored
                raise ConfigError(
                    f"{tensor.file}: tensor {tensor.name} and tensor {other.name} of {other.file} both "
                    f"fill the weight slot {slot}"
                )
            sources[slot] = source
    missing = [name for name in slots if name not in sources]
    if missing:
        raise missing_tensors(folder, missing)
    if unused:
        raise ConfigError(f"{unused[0].file}: tensor {unused[0].name} is not part of the model{_and_others(unused)}")
    return Sources(list(sources.values()), [] if head is None else [(head, sources[EMBEDDING])])


def missing_tensors(folder: Path, names: list[str]) -> ConfigError:
    """Return the error for slots that no tensor of the checkpoint fills."""
    return ConfigError(f"{folder}: tensor {names[0]} is missing{_and_others(names)}")


def kv_scale_of(name: str) -> tuple[int, str] | None:
    """Return the layer of a KV cache's scale, and ``k``, ``v`` or ``kv``; None if the tensor is no such scale.

    Scales of queries and of softmax weights are none: these are not quantised.
    """
    match = _KV_SCALE.fullmatch(name)
    kind = (match[2] or match[3]) if match else None
    return None if match is None or kind in (None, "q") else (int(match[1]), str(kind))


def _is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a tensor without a slot is allowed.

    These are the vision parts of a multimodal model, keys and values of layers that read an earlier layer's KV cache,
    scales of attention (``kv_scale_of``), and tensors of a quantised layer that change nothing here: scales of
    activations, which are not rounded to floats, and the weight's shape, which ``config.json`` has. A model that makes
    vectors ignores heads for tokens and labels, and so does an encoder.
    """
    if config.encoder is not None and is_unread_head(name):
        return True
    if name == SCORE or (name == HEAD and not config.generates):
        return config.pooling is not None
    if (config.vision is not None or config.unread_vision) and not is_text_tensor(name):
        return True
    if _KV_SCALE.fullmatch(name) or (config.weight_format is not None and name.endswith(UNREAD)):
        return True
    match = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.(weight|bias)", name)
    if match and int(match[1]) < config.num_layers:
        return config.cache_source(int(match[1])) != int(match[1])
    return False


def _sources_of(
    name: str,
    tensor: StoredTensor,
    slots: Mapping[str, WeightSlot],
    config: ModelConfig,
) -> dict[str, TensorSource]:
    """Return the slots that one stored tensor fills; empty if it is not part of the model."""
    if name in slots:
        check_shape(tensor, slots[name].shape, slots[name])
        return {name: TensorSource(tensor, slots[name])}
    match = _FUSED.fullmatch(name)
    if match:
        names = [f"{match[1]}.{part}.{match[3]}" for part in _PARTS[match[2]]]
        return _fused(tensor, names, slots) if all(part in slots for part in names) else {}
    match = _ALL_EXPERTS.fullmatch(name)
    if match is None or config.moe is None:
        return {}
    if match[3] in ("_blocks", "_scales"):
        if config.moe.mxfp4:
            return {}
        raise ConfigError(
            f"{tensor.file}: tensor {tensor.name} is in MXFP4, but config.json has no quantization_config with "
            f"quant_method mxfp4"
        )
    return _all_experts(tensor, match, slots, config)


def _fused(tensor: StoredTensor, names: list[str], slots: Mapping[str, WeightSlot]) -> dict[str, TensorSource]:
    """Split a fused tensor whose parts are concatenated by outputs."""
    first = slots[names[0]]
    dim = first.rows_dim
    if dim is None:
        check_shape(tensor, first.shape, first)
        return {name: TensorSource(tensor, slots[name]) for name in names}
    total = sum(slots[name].shape[dim] for name in names)
    check_shape(tensor, (*first.shape[:dim], total, *first.shape[dim + 1 :]), first)
    sources, start = {}, 0
    for name in names:
        sources[name] = TensorSource(tensor, slots[name], start=start)
        start += slots[name].shape[dim]
    return sources


def _all_experts(
    tensor: StoredTensor,
    match: re.Match[str],
    slots: Mapping[str, WeightSlot],
    config: ModelConfig,
) -> dict[str, TensorSource]:
    """Split a tensor that holds all experts of a layer."""
    base, fused, kind = match.groups()
    moe = config.moe
    assert moe is not None
    is_gpt_oss = config.architecture == "GptOssForCausalLM"
    parts = _PARTS[fused]
    suffix = "bias" if kind == "_bias" else "weight"
    if f"{base}.0.{parts[0]}.{suffix}" not in slots:
        return {}
    slot = slots[f"{base}.0.{parts[0]}.{suffix}"]
    shape = slot.shape
    rows = shape[0]
    matrix = (rows * len(parts), *shape[1:])
    inputs_first = config.architecture in _INPUTS_FIRST or tensor.shape[1:] == matrix[::-1] != matrix
    transposed = inputs_first and kind == ""
    check_shape(tensor, (moe.num_experts, *(reversed(matrix) if transposed else matrix)), slot)
    sources = {}
    for expert in range(moe.num_experts):
        for index, part in enumerate(parts):
            name = f"{base}.{expert}.{part}.{suffix}"
            start, step = (index, len(parts)) if is_gpt_oss else (index * rows, 1)
            sources[name] = TensorSource(tensor, slots[name], (expert,), start, step, transposed)
    return sources


def check_shape(tensor: StoredTensor, expected: tuple[int, ...], slot: WeightSlot) -> None:
    """Raise ConfigError unless a stored tensor has the shape, and a dtype that the slot allows."""
    if tensor.dtype not in slot.dtypes:
        raise ConfigError(
            f"{tensor.file}: tensor {tensor.name} has dtype {tensor.dtype}; supported: {', '.join(slot.dtypes)}"
        )
    if tensor.shape != expected and not (tensor.shape == () and expected == (1,)):
        raise ConfigError(
            f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}, "
            f"but config.json requires {list(expected)}"
        )


def _and_others(items: list[Any]) -> str:
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""
