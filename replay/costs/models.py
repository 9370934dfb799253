"""Finds the shape of a model by a config.json, a folder with one, or a name."""

from pathlib import Path
from typing import Any

from quire.bench.measure.shapes import SHAPES
from quire.protocol.errors import ConfigError, did_you_mean
from quire.protocol.model.config_fields import read_json
from quire.protocol.model.model_config import ModelConfig, parse_model_config

_LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256}
_QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936}


def _dense(
    base: dict[str, Any], hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool = False
) -> ModelConfig:
    raw = base | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 131072,
        "dtype": "bfloat16",
    }
    return parse_model_config(raw, "built-in shape")


MODELS = SHAPES | {
    "llama-3.1-70b": _dense(_LLAMA, 8192, 28672, 80, 64, 8),
    "llama-3.2-3b": _dense(_LLAMA, 3072, 8192, 28, 24, 8, tied=True),
    "qwen3-1.7b": _dense(_QWEN3, 2048, 6144, 28, 16, 8, tied=True),
    "qwen3-4b": _dense(_QWEN3, 2560, 9728, 36, 32, 8, tied=True),
    "qwen3-8b": _dense(_QWEN3, 4096, 12288, 36, 32, 8),
    "qwen3-14b": _dense(_QWEN3, 5120, 17408, 40, 40, 8),
    "qwen3-32b": _dense(_QWEN3, 5120, 25600, 64, 64, 8),
}
"""Published shapes by name: those of the benchmarks, and others with published measurements."""

_SAME_SHAPE = {"llama-3-8b": "llama-3.1-8b", "llama-3-70b": "llama-3.1-70b", "llama-3.3-70b": "llama-3.1-70b"}
_SUFFIXES = ("-instruct", "-2507", "-hf", "-it", "-base", "-thinking")


def find_model(name: str) -> ModelConfig:
    """Return the model of a config.json, of a folder with one, or of a name, with or without its publisher.

    Raises:
        ConfigError: file not found, or an unknown name (suggests the nearest).
    """
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return parse_model_config(read_json(path), str(path))
    if path.suffix == ".json":
        raise ConfigError(f"{path}: file not found")
    short = _short(name)
    if short in MODELS:
        return MODELS[short]
    near = did_you_mean(short, MODELS) or f"; known: {', '.join(MODELS)}"
    raise ConfigError(f"{name}: neither a config.json nor a known model name{near}")


def _short(name: str) -> str:
    """Return the key of ``MODELS``: without the publisher and suffixes that do not affect the shape."""
    short = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    while stripped := next((s for s in _SUFFIXES if short.endswith(s)), ""):
        short = short.removesuffix(stripped)
    return _SAME_SHAPE.get(short, short)
