"""Differences between model families: defaults of ``config.json``, and model settings of the one decoder.

A checkpoint may omit fields that equal the defaults of its transformers class (Gemma 3 checkpoints do), so these
defaults are part of the format.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from quire.protocol.errors import ConfigError
from quire.protocol.model.chunked_config import CHUNKED
from quire.protocol.model.config_fields import Fields
from quire.protocol.model.encoder_config import ENCODERS

Head: TypeAlias = Literal["tokens", "labels", "none"]
"""What a model computes from its hidden states: logits of tokens, logits of a classification's labels, or nothing."""

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    Attributes:
        defaults: default values of fields that a ``config.json`` may omit.
        slides: returns whether layer ``i`` has a sliding window if ``layer_types`` is absent; None if windows are not
            supported.
        model_settings: fields of ``ModelConfig`` that depend on the architecture only.
        fields: names that ``config.json`` has for fields of other families: by the other families' name.
        qkv_bias, o_bias: whether the projections have biases; None means as ``attention_bias``, and for ``o_bias`` as
            ``attention_out_bias`` if there is one.
        scaled_embedding: embeddings are multiplied by ``sqrt(hidden_size)``.
        experts: the feed-forward layers are mixtures of experts.
        gate: how experts are chosen if they may be in groups, or have a dense layer beside them: by softmaxes, by
            sigmoids with a bias, or by scores whose sigmoids multiply the inputs; "": they may not.
        latent: attention is over latents.
        chunked: attention is that of Llama 4 (``chunked_config.py``).
        rope_in_windows: if layers have sliding windows, those without one have no rotary embedding.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    slides: Callable[[Fields, int], bool] | None = None
    model_settings: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    scaled_embedding: bool = False
    experts: bool = False
    gate: Literal["", "softmax", "sigmoid", "inputs"] = ""
    latent: bool = False
    chunked: bool = False
    rope_in_windows: bool = False


def _always(config: Fields, layer: int) -> bool:
    return True


def _when_asked(config: Fields, layer: int) -> bool:
    return config.flag("use_sliding_window")


def _last_layers(config: Fields, layer: int) -> bool:
    return config.flag("use_sliding_window") and layer >= config.size("max_window_layers", low=0)


def _from_window_layer(config: Fields, layer: int) -> bool:
    return layer >= config.size("max_window_layers", low=0)


def _without_rope(config: Fields, layer: int) -> bool:
    return config.flag("use_sliding_window") and layer in layers_without_rope(config, layer + 1)


def _every_other(config: Fields, layer: int) -> bool:
    return layer % 2 == 0


def _all_but_each_fourth(config: Fields, layer: int) -> bool:
    return layer % 4 != 0


def _pattern(config: Fields, layer: int) -> bool:
    name = "sliding_window_pattern" if config.has("sliding_window_pattern") else "_sliding_window_pattern"
    return (layer + 1) % config.size(name, default=6) != 0


_GEMMA = {"head_dim": 256, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
_GEMMA3 = Family(
    defaults=_GEMMA
    | {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 4096,
    },
    slides=_pattern,
    model_settings={"norms": "both", "norm_offset": 1.0, "qk_norm": "head"},
    scaled_embedding=True,
)
_GEMMA2 = Family(
    defaults=_GEMMA
    | {
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    slides=_every_other,
    model_settings={"norms": "both", "norm_offset": 1.0},
    scaled_embedding=True,
)
_GLM = {"head_dim": 128, "rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5, "attention_bias": True}
_ROUTED = {"num_experts": "n_routed_experts"}
_DEEPSEEK = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
}
_GLM4_NORMS = ["input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"]
_LLAMA4 = Family(
    defaults={
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "max_position_embeddings": 131072,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "use_qk_norm": True,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    fields={
        "intermediate_size": "intermediate_size_mlp",
        "moe_intermediate_size": "intermediate_size",
        "decoder_sparse_step": "interleave_moe_layer_step",
    },
    experts=True,
    gate="inputs",
    chunked=True,
)
_CWM_ROPE = {"rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 8192}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(defaults={"sliding_window": 4096}, slides=_always, qkv_bias=False, o_bias=False),
    "Qwen2ForCausalLM": Family(
        defaults={"sliding_window": 4096, "max_window_layers": 28}, slides=_last_layers, qkv_bias=True, o_bias=False
    ),
    "Qwen3ForCausalLM": Family(
        defaults={"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
        slides=_last_layers,
        model_settings={"qk_norm": "head"},
    ),
    "Phi3ForCausalLM": Family(
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}, slides=_always, qkv_bias=False, o_bias=False
    ),
    "GraniteForCausalLM": Family(defaults={"attention_multiplier": 1.0}),
    "Olmo2ForCausalLM": Family(defaults={"rms_norm_eps": 1e-5}, model_settings={"norms": "after", "qk_norm": "width"}),
    "SmolLM3ForCausalLM": Family(
        defaults={
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
            "max_position_embeddings": 32768,
        },
        slides=_without_rope,
    ),
    "GemmaForCausalLM": Family(
        defaults=_GEMMA | {"max_position_embeddings": 8192}, model_settings={"norm_offset": 1.0}, scaled_embedding=True
    ),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "MixtralForCausalLM": Family(
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2},
        slides=_always,
        qkv_bias=False,
        o_bias=False,
        experts=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        defaults={"num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False},
        slides=_when_asked,
        model_settings={"qk_norm": "head"},
        experts=True,
    ),
    "GptOssForCausalLM": Family(
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "head_dim": 64,
            "sliding_window": 128,
            "attention_bias": True,
            "num_experts_per_tok": 4,
            "max_position_embeddings": 131072,
        },
        slides=_every_other,
        model_settings={"attention_sinks": True},
        experts=True,
    ),
    "MinistralForCausalLM": Family(defaults={"sliding_window": 4096}, slides=_always, qkv_bias=False, o_bias=False),
    "CwmForCausalLM": Family(
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 8192, "rope_theta": 1e6, "rope_scaling": _CWM_ROPE},
        slides=_all_but_each_fourth,
        qkv_bias=False,
        o_bias=False,
    ),
    "Olmo3ForCausalLM": Family(
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096, "sliding_window_pattern": 4},
        slides=_pattern,
        model_settings={"norms": "after", "qk_norm": "width"},
        fields={"rope_local_base_freq": "rope_theta"},  # only layers without a window have the scaled rope
    ),
    "Exaone4ForCausalLM": Family(
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
        slides=_pattern,
        model_settings={"norms": "after", "qk_norm": "head"},
        qkv_bias=False,
        o_bias=False,
        rope_in_windows=True,
    ),
    "ExaoneForCausalLM": Family(
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5},
        fields={
            "num_hidden_layers": "num_layers",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
    ),
    "InternLM3ForCausalLM": Family(
        defaults={"head_dim": 128, "rms_norm_eps": 1e-5},
        fields={"attention_bias": "qkv_bias", "attention_out_bias": "bias", "mlp_bias": "bias"},
    ),
    "IQuestCoderForCausalLM": Family(defaults={"head_dim": 128, "rms_norm_eps": 1e-5}),
    "SeedOssForCausalLM": Family(defaults={"head_dim": 128, "attention_bias": True, "attention_out_bias": False}),
    "VaultGemmaForCausalLM": Family(
        _GEMMA2.defaults,
        _GEMMA2.slides,
        model_settings={"norm_offset": 1.0, "norm_names": ["input_layernorm", "", "pre_feedforward_layernorm", ""]},
        scaled_embedding=True,
    ),
    "HeliumForCausalLM": Family(
        defaults={"head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 1e5},
        model_settings={"interleaved_rope": True},
        o_bias=False,
    ),
    "GlmForCausalLM": Family(defaults=_GLM, model_settings={"interleaved_rope": True}, o_bias=False),
    "Glm4ForCausalLM": Family(
        defaults=_GLM,
        model_settings={"interleaved_rope": True, "norms": "both", "norm_names": _GLM4_NORMS},
        o_bias=False,
    ),
    "Ernie4_5ForCausalLM": Family(
        defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True},
        model_settings={"interleaved_rope": True},
        fields={"attention_bias": "use_bias", "attention_out_bias": "use_bias", "mlp_bias": "use_bias"},
    ),
    "OlmoeForCausalLM": Family(
        defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
        model_settings={"qk_norm": "width"},
        experts=True,
    ),
    "FlexOlmoForCausalLM": Family(
        defaults={"rope_theta": 5e5, "num_experts": 7, "num_experts_per_tok": 5, "norm_topk_prob": False},
        model_settings={"norms": "after", "qk_norm": "width"},
        experts=True,
    ),
    "GraniteMoeForCausalLM": Family(
        defaults={"attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2}, experts=True
    ),
    "DeepseekV2ForCausalLM": Family(
        defaults=_DEEPSEEK
        | {
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "norm_topk_prob": False,
        },
        fields=_ROUTED,
        experts=True,
        gate="softmax",
        latent=True,
    ),
    "DeepseekV3ForCausalLM": Family(
        defaults=_DEEPSEEK
        | {
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "max_position_embeddings": 4096,
            "num_nextn_predict_layers": 1,
        },
        fields=_ROUTED,
        experts=True,
        gate="sigmoid",
        latent=True,
    ),
    "Glm4MoeLiteForCausalLM": Family(
        defaults=_DEEPSEEK
        | {
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "rms_norm_eps": 1e-5,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.8,
            "max_position_embeddings": 202752,
            "num_nextn_predict_layers": 1,
        },
        fields=_ROUTED,
        experts=True,
        gate="sigmoid",
        latent=True,
    ),
    "MiniCPM3ForCausalLM": Family(
        defaults={
            "kv_lora_rank": 256,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "rms_norm_eps": 1e-5,
            "scale_emb": 12.0,
            "scale_depth": 1.4,
            "dim_model_base": 256,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
        },
        fields={"embedding_multiplier": "scale_emb"},
        latent=True,
    ),
    "YoutuForCausalLM": Family(
        defaults=_DEEPSEEK | {"tie_word_embeddings": True, "max_position_embeddings": 131072}, latent=True
    ),
    "Glm4MoeForCausalLM": Family(
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 131072,
            "num_nextn_predict_layers": 1,
        },
        fields=_ROUTED,
        o_bias=False,
        experts=True,
        gate="sigmoid",
    ),
    "Dots1ForCausalLM": Family(
        defaults={"norm_topk_prob": False, "sliding_window": 4096, "max_window_layers": 62},
        slides=_from_window_layer,
        model_settings={"qk_norm": "head"},
        fields=_ROUTED,
        experts=True,
        gate="sigmoid",
    ),
    "Llama4ForCausalLM": _LLAMA4,
}


_TEXT_PARTS = {"Gemma3Text": "Gemma3", "Llama4Text": "Llama4"}
_NESTED = ("Gemma3", "Llama4")


def family_of(architecture: str) -> tuple[str, Head]:
    """Return the causal language model or encoder that an architecture is a variant of, and the variant's head.

    For example ``Qwen3Model`` and ``Qwen3ForSequenceClassification`` are variants of ``Qwen3ForCausalLM``, and
    ``BertForMaskedLM`` is one of ``BertModel``. Any other name is returned with the head for tokens.
    """
    heads: tuple[tuple[str, Head], ...] = (
        ("ForSequenceClassification", "labels"),
        ("ForMaskedLM", "none"),
        ("Model", "none"),
    )
    for suffix, head in heads:
        base = architecture.removesuffix(suffix)
        name = f"{_TEXT_PARTS.get(base, base)}ForCausalLM"
        if base != architecture and base not in _NESTED and name in FAMILIES:
            return name, head
        if base != architecture and f"{base}Model" in ENCODERS:
            return f"{base}Model", head
    return architecture, "tokens"


def layer_types(family: Family, config: Fields, num_layers: int) -> list[str]:
    """Return the attention type of each layer, from ``layer_types`` or by the family's rule."""
    where = config.where
    given = config.raw.get("layer_types")
    if given is not None:
        if not isinstance(given, list) or len(given) != num_layers:
            raise ConfigError(f"{where}: layer_types must be a list of {num_layers} names")
        known = (LAYER_TYPES[0], CHUNKED) if family.chunked else LAYER_TYPES
        types = [config.choice("layer_types", name, known) for name in given]
        if "sliding_attention" not in types or family.slides is not None:
            return types
    if family.chunked:
        whole = layers_without_rope(config, num_layers)
        return [LAYER_TYPES[0] if layer in whole else CHUNKED for layer in range(num_layers)]
    if family.slides is None:
        if given is not None or config.has("sliding_window") or config.raw.get("use_sliding_window"):
            raise ConfigError(f"{where}: use_sliding_window: sliding windows are not supported for this architecture")
        return ["full_attention"] * num_layers
    windowed = [config.has("sliding_window") and family.slides(config, layer) for layer in range(num_layers)]
    return ["sliding_attention" if slides else "full_attention" for slides in windowed]


def layer_windows(family: Family, config: Fields, types: list[str], max_position: int) -> list[int]:
    """Return the number of tokens that a token attends to per layer, itself included; 0 means all.

    A window at least as long as the longest context counts as none.
    """
    switched_off = "use_sliding_window" in config.raw and not config.flag("use_sliding_window")
    if "sliding_attention" not in types or switched_off or not config.has("sliding_window"):
        return [0] * len(types)
    window = config.size("sliding_window", high=2**31 - 1)
    window = 0 if window >= max_position else window
    return [window if name == "sliding_attention" else 0 for name in types]


def layers_without_rope(config: Fields, num_layers: int) -> list[int]:
    """Return the layers without rotary embedding; ``no_rope_layers`` has, despite its name, a 1 for each layer *with*
    one.
    """
    if config.raw.get("no_rope_layers") not in (None, []):
        rotates = config.integers("no_rope_layers", high=1)
        if len(rotates) < num_layers:
            raise ConfigError(f"{config.where}: no_rope_layers must have an entry for each of {num_layers} layers")
        return [layer for layer in range(num_layers) if not rotates[layer]]
    if not config.has("no_rope_layer_interval"):
        return []
    interval = config.size("no_rope_layer_interval")
    return [layer for layer in range(num_layers) if (layer + 1) % interval == 0]


def rotation_free(family: Family, config: Fields, types: list[str]) -> list[int]:
    """Return the layers without rotary embedding, given the attention type of each layer."""
    if family.rope_in_windows and config.has("sliding_window"):
        return [layer for layer, name in enumerate(types) if name == "full_attention"]
    return layers_without_rope(config, len(types))


def cache_sources(config: Fields, types: list[str]) -> list[int]:
    """Return per layer the layer that owns its KV cache: itself, or with ``num_kv_shared_layers`` an earlier one.

    The last ``num_kv_shared_layers`` layers read the cache of the last earlier layer of their type.
    """
    num_layers = len(types)
    shared = config.size("num_kv_shared_layers", default=0, low=0, high=num_layers)
    owners = num_layers - shared
    sources = list(range(owners))
    for layer in range(owners, num_layers):
        same = [other for other in range(owners) if types[other] == types[layer]]
        if not same:
            raise ConfigError(
                f"{config.where}: num_kv_shared_layers {shared}: no layer before {owners} is of type {types[layer]}"
            )
        sources.append(same[-1])
    return sources if shared else []
