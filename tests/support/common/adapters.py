"""LoRA adapters for tests, in PEFT's format, made without PEFT."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from quire.protocol.model.adapter import projection_shapes
from quire.protocol.model.model_config import ModelConfig

Tensors = dict[str, npt.NDArray[Any]]


def make_adapter(
    folder: Path,
    model: ModelConfig,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    projections: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    size: float = 0.3,
    settings: Mapping[str, Any] | None = None,
    change: Callable[[Tensors], object] | None = None,
) -> Path:
    """Write an adapter with random matrices.

    Args:
        projections: last parts of the names of the projections that it adapts, in every layer that has them.
        size: standard deviation of the product of both matrices, relative to that of its input.
        settings: further settings of its configuration.
        change: called with the tensors, which it may change, before they are written.
    """
    generator = np.random.default_rng(seed)
    tensors: Tensors = {}
    for layer in range(model.num_layers):
        for name, (outputs, inputs) in projection_shapes(model, layer).items():
            if name.rpartition(".")[2] in projections:
                prefix = f"base_model.model.model.layers.{layer}.{name}"
                a = generator.standard_normal((rank, inputs)) / np.sqrt(inputs)
                b = generator.standard_normal((outputs, rank)) * size * np.sqrt(rank) / alpha
                tensors[f"{prefix}.lora_A.weight"] = a.astype(np.float32)
                tensors[f"{prefix}.lora_B.weight"] = b.astype(np.float32)
    if change is not None:
        change(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", **(settings or {})}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
