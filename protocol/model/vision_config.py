"""What a checkpoint's vision tower means for its prompts, and the classes of such checkpoints that have one."""

from collections.abc import Mapping
from functools import partial
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


_vision = partial(VisionConfig, "")
_QWEN2_VISION = _vision(151655, mrope_section=(16, 24, 24))
_QWEN3_VISION = _vision(151655, mrope_section=(24, 20, 20), num_deepstack=3, mrope_interleaved=True)
VISION_FAMILIES: dict[str, tuple[str, VisionConfig | None]] = {
    "Gemma3ForConditionalGeneration": ("gemma3_text", _vision(262144, is_causal=False)),
    "LlavaForConditionalGeneration": ("llama", _vision(32000)),
    "VipLlavaForConditionalGeneration": ("llama", _vision(32000)),
    "LlavaNextForConditionalGeneration": ("llama", _vision(32000)),
    "LlavaNextVideoForConditionalGeneration": ("llama", _vision(32001)),
    "DeepseekVLForConditionalGeneration": ("llama", _vision(100015)),
    "JanusForConditionalGeneration": ("llama", _vision(100581)),
    "GotOcr2ForConditionalGeneration": ("qwen2", _vision(151859)),
    "LightOnOcrForConditionalGeneration": ("qwen3", _vision(151655)),
    "VideoLlama3ForConditionalGeneration": ("qwen2", _vision(151655)),
    "Mistral3ForConditionalGeneration": ("mistral", _vision(10)),
    "Idefics3ForConditionalGeneration": ("llama", _vision(128257)),
    "SmolVLMForConditionalGeneration": ("llama", _vision(128257)),
    "InternVLForConditionalGeneration": ("qwen2", _vision(151667)),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl_text", _QWEN2_VISION),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl_text", _QWEN2_VISION),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl_text", _QWEN3_VISION),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe_text", _QWEN3_VISION),
    "Llama4ForConditionalGeneration": ("llama4_text", None),
}
"""By class of transformers for images and text: the model type of its language model, and the values of fields that a
``config.json`` may omit; None: images are not read."""


_SIZES = "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size max_position_embeddings"


def _sizes(*sizes: int, **others: Any) -> dict[str, Any]:
    return dict(zip(_SIZES.split(), sizes, strict=True), **others)


_QWEN = _sizes(4096, 22016, 32, 32, 151936, 32768, num_key_value_heads=32)
_QWEN2_VL = _sizes(
    8192, 29568, 80, 64, 152064, 32768, num_key_value_heads=8, rms_norm_eps=1e-5, max_window_layers=80, rope_theta=1e6
)
_QWEN3_VL = _QWEN | {"max_position_embeddings": 128000, "head_dim": 128, "rope_theta": 5e5}
_QWEN3_VL_MOE = _sizes(2048, 5632, 24, 16, 151936, 128000, num_key_value_heads=16, rope_theta=5e5) | {
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
}
TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _sizes(4096, 11008, 32, 32, 32000, 2048)),
    "mistral": ("MistralForCausalLM", _sizes(4096, 14336, 32, 32, 32000, 4096 * 32, num_key_value_heads=8)),
    "gemma3_text": ("Gemma3ForCausalLM", {}),
    "llama4_text": ("Llama4ForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", _QWEN),
    "qwen2_vl_text": ("Qwen2ForCausalLM", _QWEN2_VL),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", _QWEN2_VL),
    "qwen3": ("Qwen3ForCausalLM", _QWEN),
    "qwen3_vl_text": ("Qwen3ForCausalLM", _QWEN3_VL),
    "qwen3_vl_moe_text": ("Qwen3MoeForCausalLM", _QWEN3_VL_MOE),
}
"""The language models of these classes by model type: a family of Quire, and defaults of its class in transformers."""


def text_settings(raw: Mapping[str, Any], architecture: str, where: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the language model of a checkpoint with a vision tower: its family, defaults, and own settings.

    Raises:
        ConfigError: Quire has no code for the language model, or its settings are missing.
    """
    text = Fields(dict(raw), where).part("text_config").raw  # older checkpoints have its settings beside the tower's
    kind = text.get("model_type") or VISION_FAMILIES[architecture][0]
    if not isinstance(kind, str) or kind not in TEXT_MODELS:
        raise ConfigError(
            f"{where}: text_config.model_type {printable(kind)} is not supported by Quire's own code; supported: "
            f"{', '.join(TEXT_MODELS)}"
        )
    # The whole model's flag decides whether the head is the embedding; a checkpoint may repeat it wrongly below.
    ties = {"tie_word_embeddings": raw["tie_word_embeddings"]} if "tie_word_embeddings" in raw else {}
    return *TEXT_MODELS[kind], {**text, **ties}


def read_vision(raw: Mapping[str, Any], architecture: str, field: Fields) -> VisionConfig | None:
    """Return what the tower of a checkpoint means, or None if it has none that is read.

    ``field``: settings of the language model, with those beside it.

    Raises:
        ConfigError: a field is of the wrong type, or out of range.
    """
    _, usual = VISION_FAMILIES.get(architecture, ("", None))
    if usual is None:
        return None
    name = "image_token_index" if field.has("image_token_index") else "image_token_id"
    vocab = field.size("vocab_size", high=2**24)
    section, num_deepstack = usual.mrope_section, usual.num_deepstack
    if section:
        rope = field.part("rope_parameters" if field.has("rope_parameters") else "rope_scaling")
        section = tuple(rope.integers("mrope_section", high=1024)) or section
        dim = field.size("head_dim", default=field.size("hidden_size") // field.size("num_attention_heads"))
        if len(section) != 3 or sum(section) != dim // 2:
            raise ConfigError(f"{rope.where}: mrope_section must be 3 numbers that add up to {dim // 2}")
    if num_deepstack:
        eyes = Fields(dict(raw), field.where).part("vision_config")
        if eyes.has("deepstack_visual_indexes"):
            num_deepstack = len(eyes.integers("deepstack_visual_indexes", high=4096))
    return msgspec.structs.replace(
        usual,
        architecture=architecture,
        token_id=field.size(name, default=usual.token_id, low=0, high=vocab - 1),
        mrope_section=section,
        num_deepstack=num_deepstack,
    )
