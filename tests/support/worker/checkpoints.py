"""Tiny random checkpoints, saved by transformers: what the engine loads and is compared with in tests."""

import functools
import json
from pathlib import Path
from typing import Any

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    # The default of 0.02 makes tiny models repeat a few tokens, and then most mistakes change nothing.
    "initializer_range": 0.3,
}

LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


WINDOWED: dict[str, Any] = {"sliding_window": 8, "num_hidden_layers": 4, "head_dim": 8}
ALTERNATING = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 8, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "phi3": ("Phi3", {}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 2.0},
    ),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "gemma": ("Gemma", {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        WINDOWED
        | {
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        WINDOWED | {"tie_word_embeddings": True, "query_pre_attn_scalar": 12, "layer_types": ALTERNATING},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 8,
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
        },
    ),
    "gpt_oss": (
        "GptOss",
        WINDOWED
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 8.0,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "ministral": ("Ministral", WINDOWED | {"layer_types": ALTERNATING}),
    "cwm": ("Cwm", WINDOWED | {"rope_parameters": LLAMA3_ROPE}),
    "olmo3": ("Olmo3", WINDOWED),
    "exaone4": ("Exaone4", WINDOWED),
    "exaone": ("Exaone", {}),
    "internlm3": ("InternLM3", {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("IQuestCoder", {"head_dim": 8}),
    "seed_oss": ("SeedOss", {"head_dim": 8}),
    "helium": ("Helium", {"head_dim": 8}),
    "glm": ("Glm", {"head_dim": 8}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": True}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "flex_olmo": ("FlexOlmo", {"num_experts": 6, "num_experts_per_tok": 3}),
}
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
ROUTED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
"""Sizes of latent attention, and of experts in groups."""
FAMILIES |= {
    "deepseek_v2": ("DeepseekV2", LATENTS | ROUTED | {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", LATENTS | ROUTED),
    "glm4_moe_lite": ("Glm4MoeLite", LATENTS | ROUTED | {"n_group": 1, "topk_group": 1, "q_lora_rank": None}),
    "minicpm3": ("MiniCPM3", LATENTS | {"num_hidden_layers": 3, "dim_model_base": 16, "head_dim": 4}),
    "youtu": ("Youtu", LATENTS | {"attention_bias": True}),
    "glm4_moe": ("Glm4Moe", ROUTED | {"head_dim": 8, "use_qk_norm": True, "attention_bias": True}),
    "dots1": ("Dots1", ROUTED | {"head_dim": 8, "sliding_window": 8, "max_window_layers": 1}),
}
FAMILIES["vaultgemma"] = ("VaultGemma", FAMILIES["gemma2"][1])
FAMILIES["granitemoe"] = ("GraniteMoe", FAMILIES["granite"][1] | FAMILIES["mixtral"][1])
FAMILIES["gemma3_vision"] = ("Gemma3Vision", FAMILIES["gemma3"][1])
FAMILIES["llama4"] = (
    "Llama4",
    {
        "num_hidden_layers": 4,
        "head_dim": 8,
        "intermediate_size": 24,
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_layers": [0, 1, 3],
        "no_rope_layers": [1, 0, 1, 1],
        "attention_chunk_size": 16,
        "floor_scale": 5,
        "attn_scale": 0.7,
        "rope_parameters": LLAMA3_ROPE,
    },
)
FAMILIES["llama4_vision"] = ("Llama4Vision", FAMILIES["llama4"][1])
"""Families by name: transformers' name before ``Config`` and ``ForCausalLM``, and settings over ``TINY``."""

TINY_EYES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
    "vision_output_dim": 16,
}


@functools.cache
def _classes(name: str) -> tuple[Any, Any]:
    import transformers

    if name in ("Gemma3", "Llama4"):
        return getattr(transformers, f"{name}TextConfig"), getattr(transformers, f"{name}ForCausalLM")
    # Architectures whose code was the checkpoint's own have only a config in transformers, for the Llama class.
    model_class = getattr(transformers, f"{name}ForCausalLM", transformers.LlamaForCausalLM)
    return getattr(transformers, f"{name}Config"), model_class


def _new_model(name: str, settings: dict[str, Any]) -> Any:
    family = name.removesuffix("Vision")
    if family == name:
        config_class, model_class = _classes(name)
        return model_class(config_class(**settings))
    import transformers

    config_class = getattr(transformers, f"{family}Config")
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 96} if family == "Gemma3" else {}
    config = config_class(text_config=settings, vision_config=TINY_EYES, **tokens)
    return getattr(transformers, f"{family}ForConditionalGeneration")(config)


def make_checkpoint(folder: Path, family: str, *, seed: int = 0, max_shard_size: str = "5GB", **overrides: Any) -> Any:
    """Save a random checkpoint of a family (of ``FAMILIES``) and return transformers' model of it.

    Biases and norm weights are random too: transformers starts them at 0 and 1, where they would prove nothing.

    Args:
        overrides: fields of the family's config, over ``TINY``; ``dtype`` converts the weights before saving.
    """
    import torch

    name, settings = FAMILIES[family]
    dtype = overrides.pop("dtype", torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _new_model(name, TINY | settings | overrides).eval()
    with torch.no_grad():
        for key, weight in [*model.named_parameters(), *model.named_buffers()]:
            if key.endswith(("bias", "norm.weight", "sinks")):
                weight.add_(torch.empty(weight.shape).normal_(0.0, 0.2, generator=generator))
            if family == "gpt_oss" and key.endswith("gate_up_proj"):
                weight.mul_(4)  # Otherwise no value reaches the clamp.
    if dtype is not torch.float32:
        model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if type(model).__name__ == "LlamaForCausalLM" and name != "Llama":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [f"{name}ForCausalLM"]}))
    return model.language_model if name == "Llama4Vision" else model  # the whole fails without an image


def pack_experts(folder: Path, seed: int = 0) -> dict[str, Any]:
    """Replace the experts of a gpt-oss checkpoint with random ones in MXFP4.

    Returns:
        The same experts as transformers dequantises them in float32, by the names of its model's parameters.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(seed)
    plain = {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32, 16)
        blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, shape[:-1], generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors")
    return plain


def experts_of(model: Any, tokens: list[int]) -> list[list[int]]:
    """Return the experts that transformers chooses for each token: by layer."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    top_k = model.config.num_experts_per_tok
    rows: list[list[int]] = torch.cat([of_layer.topk(top_k, -1).indices for of_layer in logits], 1).tolist()
    return rows


def greedy_tokens(model: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return the greedy tokens of transformers for prompts of one length; no stop token ends them early."""
    import torch

    batch = torch.tensor(prompts)
    with torch.no_grad():
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    answers: list[list[int]] = out[:, batch.shape[1] :].tolist()
    return answers
