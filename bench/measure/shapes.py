"""Model shapes by name, to run with random weights: all that speed depends on, without a checkpoint."""

from typing import Any

from quire.protocol.errors import ConfigError, did_you_mean
from quire.protocol.model.model_config import ModelConfig, parse_model_config

_SIZES = (
    ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"),
    ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
)
_TABLE = {
    # As small as the built-in demo model, so that the engine's own overhead dominates.
    "tiny": ("LlamaForCausalLM", "llama", (4096, 128, 352, 2048), (4, 4, 2, 32)),
    "smollm2-135m": ("LlamaForCausalLM", "llama", (49152, 576, 1536, 8192), (30, 9, 3, 64)),
    "qwen3-0.6b": ("Qwen3ForCausalLM", "qwen3", (151936, 1024, 3072, 40960), (28, 16, 8, 128)),
    "qwen2.5-0.5b": ("Qwen2ForCausalLM", "qwen2", (151936, 896, 4864, 32768), (24, 14, 2, 64)),
    "qwen2.5-1.5b": ("Qwen2ForCausalLM", "qwen2", (151936, 1536, 8960, 32768), (28, 12, 2, 128)),
    "llama-3.1-8b": ("LlamaForCausalLM", "llama", (128256, 4096, 14336, 131072), (32, 32, 8, 128)),
    "mistral-7b": ("MistralForCausalLM", "mistral", (32000, 4096, 14336, 32768), (32, 32, 8, 128)),
    "gemma-3-1b": ("Gemma3ForCausalLM", "gemma3_text", (262144, 1152, 6912, 32768), (26, 4, 1, 256)),
    "qwen3-30b-a3b": ("Qwen3MoeForCausalLM", "qwen3_moe", (151936, 2048, 6144, 40960), (48, 32, 4, 128)),
    "gpt-oss-20b": ("GptOssForCausalLM", "gpt_oss", (201088, 2880, 2880, 131072), (24, 64, 8, 64)),
}
"""Architecture, model type, and the values of ``_SIZES``. Other fields are in ``_FURTHER``."""

_LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_QWEN2 = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "use_sliding_window": False}
_FURTHER: dict[str, dict[str, Any]] = {
    "tiny": {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": True},
    "smollm2-135m": {"rms_norm_eps": 1e-5, "rope_theta": 1e5, "tie_word_embeddings": True},
    "qwen3-0.6b": {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True},
    "qwen2.5-0.5b": _QWEN2,
    "qwen2.5-1.5b": _QWEN2,
    "llama-3.1-8b": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 8192} | _LLAMA3_ROPE,
        "tie_word_embeddings": False,
    },
    "mistral-7b": {"rms_norm_eps": 1e-5, "sliding_window": 4096},
    "gemma-3-1b": {"sliding_window": 512, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "qwen3-30b-a3b": {
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "rope_theta": 1e6,
    },
    "gpt-oss-20b": {
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "rope_theta": 150000,
        "rope_scaling": {"original_max_position_embeddings": 4096} | _YARN,
        "quantization_config": {"quant_method": "mxfp4"},
    },
}


def _published(name: str) -> dict[str, Any]:
    """Return the fields of the published checkpoint's ``config.json``."""
    architecture, model_type, *sizes = _TABLE[name]
    config: dict[str, Any] = {"architectures": [architecture], "model_type": model_type, "dtype": "bfloat16"}
    for fields, values in zip(_SIZES, sizes, strict=True):
        config |= zip(fields, values, strict=True)
    return config | _FURTHER[name]


SHAPES = {name: parse_model_config(_published(name), name) for name in _TABLE}


def find_shape(name: str) -> ModelConfig:
    """Return the shape named ``name``.

    Raises:
        ConfigError: unknown name; suggests the closest one.
    """
    if name not in SHAPES:
        near = did_you_mean(name.lower(), SHAPES)
        raise ConfigError(f"--shape {name}: unknown shape{near or ' (known: ' + ', '.join(SHAPES) + ')'}")
    return SHAPES[name]


def checkpoint_config(name: str) -> dict[str, Any]:
    """Return the ``config.json`` of a checkpoint of this shape, for engines that load Hugging Face folders.

    Weights are not quantised, since random ones are written with 16 or 32 bits.
    """
    # With the usual 0.02, random logits are nearly equal; a wider range makes argmax stable across engines.
    config = _published(name) | {"initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": 2}
    config.pop("quantization_config", None)
    return config
