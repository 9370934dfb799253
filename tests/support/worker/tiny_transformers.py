"""Tiny random checkpoints of families that Quire has no code for, saved by transformers."""

from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": 2,
}

MLA: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "gpt2": {"n_inner": 48},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3},
    "deepseek_v3": MLA
    | {
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "sarvam_moe": {
        "head_dim": 8,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "gpt_oss": {
        "head_dim": 8,
        "num_key_value_heads": 2,
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 512,
        "num_key_value_heads": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
        "num_kv_shared_layers": 0,
    },
    "gemma3n_text": {
        "head_dim": 8,
        "num_key_value_heads": 2,
        "sliding_window": 8,
        "num_hidden_layers": 6,
        "intermediate_size": [48] * 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 6,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
        "laurel_rank": 8,
    },
}
"""In order: the plainest; names without a prefix and a tied head; learnt positions below a nested decoder; keys wider
than values and joined experts; queries, keys and values in one tensor of the checkpoint; sinks and windows; layers with
32 times as wide heads; layers that read another layer's keys."""


MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_state": 16, "num_key_value_heads": 2}
DELTA: dict[str, Any] = {
    "head_dim": 8,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts": 4}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA | EXPERTS | {"num_experts_per_tok": 2, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": DELTA,
    "granitemoehybrid": MAMBA
    | {
        "mamba_d_head": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "nemotron_h": {
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M-M*",
        "num_key_value_heads": 2,
        "head_dim": 8,
        "ssm_state_size": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
    },
    "falcon_h1": MAMBA | {"mamba_d_ssm": 32, "mamba_d_head": 8},
    "lfm2": {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention", "conv"]},
    "kimi_linear": MLA
    | EXPERTS
    | {
        "q_lora_rank": None,
        "num_experts_per_token": 2,
        "pad_token_id": 0,
        "linear_num_heads": 2,
        "linear_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
}
"""With recurrent states. In order: gated delta rule with experts, without; state space with experts, and a dense layer
in between; state space and attention in one layer; a convolution alone; Kimi's delta and latent attention."""


def tiny_config(family: str, **changes: Any) -> Any:
    """Return the config object of a family, by its ``model_type``."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[family](**(SIZES | FAMILIES.get(family, HYBRIDS.get(family, {})) | changes))


def make_tiny(folder: Path, family: str, **changes: Any) -> Any:
    """Save a checkpoint with random weights in float32, and return its model."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(weight)
    model.save_pretrained(folder)
    return model
