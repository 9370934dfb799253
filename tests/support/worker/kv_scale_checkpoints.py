"""Tiny checkpoints with scales of an fp8 KV cache."""

import json
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file

SCHEME: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
"""``kv_cache_scheme`` as llm-compressor writes it."""


def make_scaled(folder: Path, scales: dict[str, torch.Tensor], family: str = "llama", **overrides: Any) -> Path:
    """Save a checkpoint with further tensors ``scales``, by name below ``model.layers.``."""
    make_checkpoint(folder, family, **overrides)
    add_tensors(folder, {f"model.layers.{name}": scale for name, scale in scales.items()})
    return folder


def add_tensors(folder: Path, more: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | more, file, {"format": "pt"})


def declare(folder: Path, **quantization: Any) -> None:
    """Set ``quantization_config`` in ``config.json``."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def enlarge_keys(folder: Path, factor: float) -> None:
    """Multiply all keys by a factor, and the queries by its inverse: attention stays the same."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".k_proj." in name or ".q_proj." in name:
            tensor.mul_(factor if ".k_proj." in name else 1 / factor)
    save_file(tensors, file, {"format": "pt"})
