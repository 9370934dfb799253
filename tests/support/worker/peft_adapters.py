"""Adapters that PEFT writes and computes: what those of the engine are compared with. Importing PEFT takes seconds."""

import copy
from pathlib import Path
from typing import Any

import torch

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION = PROJECTIONS[:4]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def make_peft_adapter(base: Any, folder: Path, *, seed: int = 1, size: float = 0.5, **settings: Any) -> Any:
    """Save a random adapter of a transformers model, and return PEFT's model with it.

    B is random too: PEFT starts it at zero.

    Args:
        size: standard deviation of B's values before the scale.
        settings: fields of ``peft.LoraConfig``.
    """
    import peft

    config = peft.LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": PROJECTIONS} | settings))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = peft.get_peft_model(copy.deepcopy(base), config).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    rank = weight.shape[1]
                    weight.normal_(0.0, size / rank**0.5)
    model.save_pretrained(folder)
    return model
