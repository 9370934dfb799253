"""Model shapes by name, to be run with random weights: what speed depends on is all there but the weights."""

from typing import Any

from quire.protocol.errors import ConfigError, did_you_mean
from quire.protocol.model.model_config import ModelConfig, parse_model_config
from quire.protocol.model.rope_config import RopeConfig

SHAPES = {
    # As small as the built-in demo model: what remains is the engine's own cost.
    "tiny": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=352,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        max_position=2048,
        tie_word_embeddings=True,
    ),
    "smollm2-135m": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=100000.0),
        max_position=8192,
        tie_word_embeddings=True,
    ),
    "qwen3-0.6b": ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1000000.0),
        max_position=40960,
        tie_word_embeddings=True,
        qk_norm="head",
    ),
    "llama-3.1-8b": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0, kind="llama3", factor=8.0, original_max_position=8192),
        max_position=131072,
    ),
}

_PUBLISHED: dict[str, dict[str, Any]] = {
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "max_position_embeddings": 32768,
    },
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "max_position_embeddings": 32768,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
}
"""As in the checkpoints' own ``config.json``; gpt-oss's experts in 16 bits."""

SHAPES |= {name: parse_model_config({"dtype": "bfloat16"} | raw, name) for name, raw in _PUBLISHED.items()}

MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}

_RANDOM: dict[str, Any] = {
    # Random logits are nearly equal with the usual 0.02; a wider spread makes argmax mean something.
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def find_shape(name: str) -> ModelConfig:
    """The shape of that name.

    Raises:
        ConfigError: there is none; says the nearest.
    """
    if name not in SHAPES:
        near = did_you_mean(name.lower(), SHAPES)
        raise ConfigError(f"--shape {name}: no such shape{near or '; known: ' + ', '.join(SHAPES)}")
    return SHAPES[name]


def checkpoint_config(model: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of a checkpoint of this shape, for engines that read Hugging Face folders."""
    for name, raw in _PUBLISHED.items():
        if SHAPES[name] == model:
            return {"dtype": model.dtype} | raw | _RANDOM
    rope: dict[str, Any] = {"rope_type": model.rope.kind, "rope_theta": model.rope.theta}
    if model.rope.kind == "llama3":
        rope |= {
            "factor": model.rope.factor,
            "low_freq_factor": model.rope.low_freq_factor,
            "high_freq_factor": model.rope.high_freq_factor,
            "original_max_position_embeddings": model.rope.original_max_position,
        }
    return {
        "architectures": [model.architecture],
        "model_type": MODEL_TYPES[model.architecture],
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_parameters": rope,
        "max_position_embeddings": model.max_position,
        "tie_word_embeddings": model.tie_word_embeddings,
        "dtype": model.dtype,
        "hidden_act": "silu",
        **_RANDOM,
    }
