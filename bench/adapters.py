"""Random LoRA adapters for benchmarks, in PEFT's format."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from quire.launch.offline.lora_request import LoRARequest
from quire.protocol.model.adapter import WEIGHTS, projection_shapes
from quire.protocol.model.adapter_config import CONFIG
from quire.protocol.model.model_config import ModelConfig


def write_adapters(folder: Path, model: ModelConfig, count: int, rank: int, seed: int) -> list[LoRARequest]:
    """Write adapters of all projections of attention and dense MLPs, and return requests for them."""
    return [_write(folder / f"adapter-{i}", model, rank, seed + i, i + 1) for i in range(count)]


def _write(folder: Path, model: ModelConfig, rank: int, seed: int, number: int) -> LoRARequest:
    generator = np.random.default_rng(seed)
    tensors = {}
    for layer in range(model.num_layers):
        for name, (outputs, inputs) in projection_shapes(model, layer).items():
            if name == "mlp.gate" or name.startswith("mlp.experts."):
                continue
            for matrix, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = generator.standard_normal(shape, np.float32) * 0.01
                tensors[f"base_model.model.model.layers.{layer}.{name}.lora_{matrix}.weight"] = values
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}))
    save_file(tensors, folder / WEIGHTS)
    return LoRARequest(folder.name, number, folder)
