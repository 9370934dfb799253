"""What a checkpoint's ``config.json`` says, read once and checked, for every process.

Field names differ between transformers 4 and 5 (``rope_theta`` and ``rope_scaling`` against ``rope_parameters``,
``torch_dtype`` against ``dtype``); both are read.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from quire.protocol.errors import ConfigError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = ("bfloat16", "float16", "float32")


class RopeConfig(msgspec.Struct, frozen=True):
    """Rotary embedding: ``kind`` is default, linear or llama3."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder: everything that scheduler, worker and front end need, nothing of the weights."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    max_position: int = 2048
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "bfloat16"
    eos_token_ids: list[int] = []


def load_model_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` (and ``generation_config.json`` for further end tokens) of a checkpoint folder.

    Raises:
        ConfigError: one line that names the file and what is wrong with it.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder with a checkpoint")
    if not path.is_file():
        raise ConfigError(f"{folder} is not a checkpoint: it has no config.json")
    raw = _read_json(path)
    eos = _token_ids(raw.get("eos_token_id"), f"{path}: eos_token_id")
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos += _token_ids(_read_json(generation).get("eos_token_id"), f"{generation}: eos_token_id")
    return parse_model_config(raw, str(path), eos)


def parse_model_config(raw: dict[str, Any], where: str, eos_token_ids: list[int] | None = None) -> ModelConfig:
    """A ModelConfig from the decoded ``config.json``; ``where`` starts every error.

    Raises:
        ConfigError: unsupported architecture or feature, or a field missing, of the wrong type or absurd.
    """
    architectures = raw.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ConfigError(
            f"{where}: architecture {architecture!r} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if raw.get("quantization_config"):
        raise ConfigError(f"{where}: quantization_config: quantised checkpoints are not supported")
    if raw.get("use_sliding_window") or (architecture == "LlamaForCausalLM" and raw.get("sliding_window")):
        raise ConfigError(f"{where}: use_sliding_window: sliding windows are not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{where}: hidden_act {raw['hidden_act']!r} is not supported; supported: silu")
    field = _Fields(raw, where)
    hidden, heads = field.size("hidden_size"), field.size("num_attention_heads")
    kv_heads = field.size("num_key_value_heads", default=heads)
    if raw.get("head_dim") is None and hidden % heads:
        raise ConfigError(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    if heads % kv_heads:
        raise ConfigError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise ConfigError(f"{where}: dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    qwen2 = architecture == "Qwen2ForCausalLM"
    attention_bias = bool(raw.get("attention_bias", False))
    head_dim = field.size("head_dim", default=hidden // heads, high=1024)
    if head_dim % 2:
        raise ConfigError(f"{where}: head_dim {head_dim} must be even")
    return ModelConfig(
        architecture=architecture,
        vocab_size=field.size("vocab_size", high=2**24),
        hidden_size=hidden,
        intermediate_size=field.size("intermediate_size"),
        num_layers=field.size("num_hidden_layers", high=4096),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=field.number("rms_norm_eps", 1e-6),
        rope=_rope(field),
        max_position=field.size("max_position_embeddings", default=2048, high=2**31 - 1),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=qwen2 or attention_bias,
        o_bias=attention_bias and not qwen2,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        dtype=dtype,
        eos_token_ids=sorted(set(eos_token_ids or [])),
    )


def _rope(field: "_Fields") -> RopeConfig:
    """Rotary settings from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``."""
    raw, where = field.raw, field.where
    new = raw.get("rope_parameters")
    scaling = new if isinstance(new, dict) else (raw.get("rope_scaling") or {})
    if not isinstance(scaling, dict):
        raise ConfigError(f"{where}: rope_scaling must be an object")
    inner = _Fields(scaling, f"{where}: rope_scaling")
    theta = inner.number("rope_theta", field.number("rope_theta", 10000.0))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(f"{where}: rope type {kind!r} is not supported; supported: default, linear, llama3")
    if any(source.get("partial_rotary_factor", 1.0) not in (1, 1.0, None) for source in (raw, scaling)):
        raise ConfigError(f"{where}: partial_rotary_factor is not supported")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=inner.number("factor", 1.0),
        low_freq_factor=inner.number("low_freq_factor", 1.0),
        high_freq_factor=inner.number("high_freq_factor", 4.0),
        original_max_position=inner.size("original_max_position_embeddings", default=8192, high=2**31 - 1),
    )


class _Fields:
    """Typed look-ups in a decoded JSON object, with errors that name the file and the field."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def size(self, name: str, *, default: int | None = None, high: int = 2**20) -> int:
        value = self.raw.get(name)
        if value is None and default is not None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            raise ConfigError(f"{self.where}: {name} must be an integer from 1 to {high}, not {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise ConfigError(f"{self.where}: {name} must be a positive number, not {value!r}")
        return float(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return raw


def _token_ids(value: Any, where: str) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ConfigError(f"{where} must be a token id or a list of token ids")
    return list(ids)
