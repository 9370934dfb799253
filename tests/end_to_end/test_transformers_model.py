"""A model that Quire has no code for, through real processes and HTTP: transformers computes it."""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save_file
from served import Served
from tokenizers import Tokenizer

from quire.launch.config.model_folder import DEMO_MODEL

HIDDEN, INNER, LAYERS, VOCABULARY = 32, 48, 2, 1024
CONFIG: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"],
    "model_type": "gpt_neox",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "dtype": "float32",
    "tie_word_embeddings": False,
}
PROMPT = [5, 9, 33, 70, 12, 90, 41]
TOKENS = [706, 277, 85, 325, 706, 624, 938, 607, 607, 699, 710, 589, 161, 589, 607, 624]
"""Greedy tokens of transformers' ``generate`` in float32, computed once because importing it takes seconds.
The best two logits of a token differ by 0.1 at least."""


def make_checkpoint(folder: Path) -> None:
    """Write GPT-NeoX with random weights, without transformers."""
    shapes: dict[str, tuple[int, ...]] = {"gpt_neox.embed_in.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        parts = {
            "attention.query_key_value": (3 * HIDDEN, HIDDEN),
            "attention.dense": (HIDDEN, HIDDEN),
            "mlp.dense_h_to_4h": (INNER, HIDDEN),
            "mlp.dense_4h_to_h": (HIDDEN, INNER),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }
        for name, shape in parts.items():
            shapes |= {f"gpt_neox.layers.{layer}.{name}.weight": shape}
            shapes |= {f"gpt_neox.layers.{layer}.{name}.bias": shape[:1]}
    shapes |= {f"gpt_neox.final_layer_norm.{part}": (HIDDEN,) for part in ("weight", "bias")}
    shapes |= {"embed_out.weight": (VOCABULARY, HIDDEN)}
    generator = np.random.default_rng(0)
    scale = {"weight": 0.5, "bias": 0.05}
    tensors = {
        name: generator.normal("norm.weight" in name, scale[name.rpartition(".")[2]], shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder)


def test_a_gpt_neox_answers_as_in_transformers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    server = Served(str(tmp_path), "--served-model-name", "neox")
    (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert card["implementation"].startswith("transformers 5.")
    body = {"model": "neox", "prompt": PROMPT, "max_tokens": len(TOKENS), "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    server.end()
    wanted = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(TOKENS)
    assert answer["choices"][0]["text"] == wanted
