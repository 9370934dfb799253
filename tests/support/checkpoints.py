"""Tiny random checkpoints, saved by transformers: what the engine loads and is compared with in tests."""

import functools
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


@functools.cache
def _families() -> dict[str, tuple[type, type]]:
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    return {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }


def make_checkpoint(folder: Path, family: str, *, seed: int = 0, max_shard_size: str = "5GB", **overrides: Any) -> Any:
    """Save a random checkpoint of a family (llama, qwen2, qwen3) and return transformers' model of it.

    Biases and norm weights are random too: transformers starts them at 0 and 1, where they would prove nothing.

    Args:
        overrides: fields of the family's config, over ``TINY``; ``dtype`` converts the weights before saving.
    """
    import torch

    config_class, model_class = _families()[family]
    dtype = overrides.pop("dtype", torch.float32)
    settings = TINY | {"head_dim": 8} | overrides if family == "qwen3" else TINY | overrides
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**settings)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                weight.add_(torch.empty(weight.shape).normal_(0.0, 0.2, generator=generator))
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def greedy_tokens(model: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """What transformers generates, greedily, for prompts of one length; no token ends it."""
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
