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
than values and joined experts; queries, keys and values in one tensor of the checkpoint; sinks and windows; layers that
read another layer's keys."""


def tiny_config(family: str, **changes: Any) -> Any:
    """Return the config object of a family, by its ``model_type``."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[family](**(SIZES | FAMILIES.get(family, {}) | changes))


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
