"""What ``config.json`` of checkpoints with a vision tower means, in its older forms too."""

from typing import Any

import pytest

from quire.protocol.errors import ConfigError
from quire.protocol.model.model_config import ModelConfig, parse_model_config
from quire.protocol.model.vision_config import VisionConfig

QWEN = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936}


def parsed(architecture: str, **fields: Any) -> ModelConfig:
    return parse_model_config({"architectures": [architecture], **fields}, "config.json")


def test_llava_with_the_defaults_of_its_language_model() -> None:
    text = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "vocab_size": 32064}
    config = parsed("LlavaForConditionalGeneration", image_token_index=32000, text_config=text)
    assert (config.architecture, config.hidden_size, config.num_layers) == ("LlamaForCausalLM", 4096, 32)
    assert config.vision == VisionConfig("LlavaForConditionalGeneration", 32000)
    mistral = parsed("LlavaForConditionalGeneration", text_config={"model_type": "mistral", "vocab_size": 40000})
    assert (mistral.architecture, mistral.num_kv_heads) == ("MistralForCausalLM", 8)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_qwen_with_and_without_text_config(name: str) -> None:
    rope = {name: {"type": "mrope", "mrope_section": [16, 24, 24]}, "rope_theta": 1e6}
    flat = parsed("Qwen2_5_VLForConditionalGeneration", **QWEN, **rope, tie_word_embeddings=True)
    nested = parsed("Qwen2_5_VLForConditionalGeneration", text_config=QWEN | rope, tie_word_embeddings=True)
    assert flat == nested
    assert flat.vision == VisionConfig("Qwen2_5_VLForConditionalGeneration", 151655, mrope_section=(16, 24, 24))
    assert (flat.rope.kind, flat.rope.theta, flat.tie_word_embeddings, flat.qkv_bias) == ("default", 1e6, True, True)


def test_qwen3_vl_has_deepstack_and_interleaved_sections() -> None:
    eyes = {"deepstack_visual_indexes": [5, 11, 17]}
    config = parsed("Qwen3VLForConditionalGeneration", text_config=QWEN | {"head_dim": 128}, vision_config=eyes)
    wanted = VisionConfig(
        "Qwen3VLForConditionalGeneration", 151655, True, (24, 20, 20), num_deepstack=3, mrope_interleaved=True
    )
    assert config.vision == wanted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_config": []}, "text_config must be an object"),
        ({"text_config": {"model_type": "phi"}}, "text_config.model_type 'phi' is not supported by Quire's own code"),
        ({"text_config": {"vocab_size": 100}}, "image_token_id must be an integer from 0 to 99 (got 32000)"),
        ({"text_config": {}, "image_token_index": "x"}, "image_token_index must be an integer"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parsed("LlavaForConditionalGeneration", **fields)
    assert message in str(refused.value)


def test_sections_must_fill_a_head() -> None:
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 25]}}
    with pytest.raises(ConfigError, match="mrope_section must be 3 numbers that add up to 64"):
        parsed("Qwen2_5_VLForConditionalGeneration", **QWEN, **rope)
