"""What a checkpoint's vision tower means for its prompts, and the classes of such checkpoints that have one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.protocol.errors import ConfigError, printable
from quire.protocol.model.config_fields import Fields


class VisionConfig(msgspec.Struct, frozen=True):
    """The images of a model, as front end, scheduler and worker need them.

    Attributes:
        architecture: transformers' class of the whole checkpoint.
        token_id: token whose positions take the rows of an image.
        is_causal: positions of an image attend only to earlier ones, so that a chunk of a prompt may end inside it.
        mrope_section: how many pairs of rotary dimensions have positions in time, height and width; empty: positions
            are plain.
        num_deepstack: first layers behind each of which rows of the image are added to the residual stream.
        mrope_interleaved: the pairs of the three kinds take turns; otherwise those of each kind are side by side.
    """

    architecture: str
    token_id: int
    is_causal: bool = True
    mrope_section: tuple[int, ...] = ()
    num_deepstack: int = 0
    mrope_interleaved: bool = False


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """One class of transformers for images and text, with the defaults of fields that a ``config.json`` may omit.

    Attributes:
        text: model type of the language model.
        token_id: as in ``VisionConfig``.
        mrope_section, mrope_interleaved, is_causal: as in ``VisionConfig``.
        deepstack: layers of the tower whose rows are added to the residual stream.
        flat: older checkpoints have the settings of the language model beside those of the tower.
        is_read: images are read; otherwise the checkpoint reads text only.
    """

    text: str
    token_id: int
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    is_causal: bool = True
    deepstack: tuple[int, ...] = ()
    flat: bool = False
    is_read: bool = True


VISION_FAMILIES: dict[str, VisionFamily] = {
    "Gemma3ForConditionalGeneration": VisionFamily("gemma3_text", 262144, is_causal=False),
    "LlavaForConditionalGeneration": VisionFamily("llama", 32000),
    "Mistral3ForConditionalGeneration": VisionFamily("mistral", 10),
    "Idefics3ForConditionalGeneration": VisionFamily("llama", 128257),
    "SmolVLMForConditionalGeneration": VisionFamily("llama", 128257),
    "InternVLForConditionalGeneration": VisionFamily("qwen2", 151667),
    "Qwen2VLForConditionalGeneration": VisionFamily("qwen2_vl_text", 151655, (16, 24, 24), flat=True),
    "Qwen2_5_VLForConditionalGeneration": VisionFamily("qwen2_5_vl_text", 151655, (16, 24, 24), flat=True),
    "Qwen3VLForConditionalGeneration": VisionFamily(
        "qwen3_vl_text", 151655, (24, 20, 20), mrope_interleaved=True, deepstack=(8, 16, 24)
    ),
    "Llama4ForConditionalGeneration": VisionFamily("llama4_text", 200092, is_read=False),
}


@dataclass(frozen=True, slots=True)
class TextModel:
    """The language model of such checkpoints: a family of Quire, and defaults of its class of transformers."""

    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, vocab: int, positions: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
    }


_QWEN2 = TextModel("Qwen2ForCausalLM", _sizes(4096, 22016, 32, 32, 151936, 32768) | {"num_key_value_heads": 32})
_QWEN2_VL_TEXT = TextModel(
    "Qwen2ForCausalLM",
    _sizes(8192, 29568, 80, 64, 152064, 32768)
    | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80, "rope_theta": 1e6},
)
TEXT_MODELS: dict[str, TextModel] = {
    "llama": TextModel("LlamaForCausalLM", _sizes(4096, 11008, 32, 32, 32000, 2048)),
    "mistral": TextModel(
        "MistralForCausalLM", _sizes(4096, 14336, 32, 32, 32000, 4096 * 32) | {"num_key_value_heads": 8}
    ),
    "gemma3_text": TextModel("Gemma3ForCausalLM"),
    "llama4_text": TextModel("Llama4ForCausalLM"),
    "qwen2": _QWEN2,
    "qwen2_vl_text": _QWEN2_VL_TEXT,
    "qwen2_5_vl_text": _QWEN2_VL_TEXT,
    "qwen3": TextModel("Qwen3ForCausalLM", _QWEN2.defaults),
    "qwen3_vl_text": TextModel(
        "Qwen3ForCausalLM",
        {**_QWEN2.defaults, "max_position_embeddings": 128000, "head_dim": 128, "rope_theta": 5e5},
    ),
}


def text_settings(raw: Mapping[str, Any], family: VisionFamily, where: str) -> tuple[TextModel, dict[str, Any]]:
    """Return the language model of a checkpoint with a vision tower, and its own settings.

    Raises:
        ConfigError: Quire has no code for the language model, or its settings are missing.
    """
    text = raw.get("text_config")
    if text is None and family.flat:
        text = {}
    if not isinstance(text, dict):
        raise ConfigError(f"{where}: text_config must be an object")
    kind = text.get("model_type") or family.text
    model = TEXT_MODELS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise ConfigError(
            f"{where}: text_config.model_type {printable(kind)} is not supported by Quire's own code; supported: "
            f"{', '.join(TEXT_MODELS)}"
        )
    # The whole model's flag decides whether the head is the embedding; a checkpoint may repeat it wrongly below.
    ties = {"tie_word_embeddings": raw["tie_word_embeddings"]} if "tie_word_embeddings" in raw else {}
    return model, {**text, **ties}


def read_vision(raw: Mapping[str, Any], architecture: str, field: Fields) -> VisionConfig:
    """Return what the tower of a checkpoint means. ``field``: settings of the language model, with those beside it.

    Raises:
        ConfigError: a field is of the wrong type, or out of range.
    """
    family = VISION_FAMILIES[architecture]
    name = "image_token_index" if field.has("image_token_index") else "image_token_id"
    vocab = field.size("vocab_size", high=2**24)
    section: tuple[int, ...] = ()
    if family.mrope_section:
        rope = field.part("rope_parameters" if field.has("rope_parameters") else "rope_scaling")
        section = tuple(rope.integers("mrope_section", high=1024)) or family.mrope_section
        dim = field.size("head_dim", default=field.size("hidden_size") // field.size("num_attention_heads"))
        if len(section) != 3 or sum(section) != dim // 2:
            raise ConfigError(f"{rope.where}: mrope_section must be 3 numbers that add up to {dim // 2}")
    layers: tuple[int, ...] | list[int] = ()
    if family.deepstack:
        eyes = Fields(dict(raw), field.where).part("vision_config")
        named = eyes.has("deepstack_visual_indexes")
        layers = eyes.integers("deepstack_visual_indexes", high=4096) if named else family.deepstack
    return VisionConfig(
        architecture=architecture,
        token_id=field.size(name, default=family.token_id, low=0, high=vocab - 1),
        is_causal=family.is_causal,
        mrope_section=section,
        num_deepstack=len(layers),
        mrope_interleaved=family.mrope_interleaved,
    )


def without_sections(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings whose rope has no sections: what remains of it is the same for each of the three positions."""
    cleaned = dict(settings)
    for name in ("rope_parameters", "rope_scaling"):
        rope = cleaned.get(name)
        if isinstance(rope, dict):
            kept = {key: value for key, value in rope.items() if key != "mrope_section"}
            cleaned[name] = {key: "default" if value == "mrope" else value for key, value in kept.items()}
    return cleaned
