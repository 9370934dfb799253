"""GGUF files of tiny models, written from checkpoints, and the same models for transformers.

Blocks are random bytes with small scales; transformers' own reader of blocks says what weights they stand for.
"""

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from quire.protocol.model.checkpoint import full_name

NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30}
BLOCKS = {"Q4_0": (32, 18, (0,)), "Q4_1": (32, 20, (0, 2)), "Q8_0": (32, 34, (0,)), "Q4_K": (256, 144, (0, 2))}
BLOCKS |= {"Q5_K": (256, 176, (0, 2)), "Q6_K": (256, 210, (208,))}
"""Elements and bytes of a block, and the places of its float16 numbers."""
SCALES = {"Q4_0": 0.01, "Q4_1": 0.01, "Q8_0": 0.001, "Q4_K": 2e-4, "Q5_K": 1e-4, "Q6_K": 3e-5}
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}
_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
_ARCHITECTURES |= {"Gemma2ForCausalLM": "gemma2", "Qwen3MoeForCausalLM": "qwen3moe", "MixtralForCausalLM": "llama"}


def convert_checkpoint(
    source: Path, file: Path, plain: Path, kind: str, other: str = "", *, with_tokenizer: bool = True
) -> None:
    """Write a checkpoint as ``file`` with projections in ``kind``, and its weights in float32 in ``plain``.

    Args:
        other: type of values, the down projection and the embedding, as in files of mixed types; by default ``kind``.
    """
    config = json.loads((source / "config.json").read_text())
    name = _ARCHITECTURES[config["architectures"][0]]
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    dense: dict[str, torch.Tensor] = {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for full, weight in sorted(load_file(source / "model.safetensors").items()):
        is_norm = full.endswith("norm.weight")
        used = other if other and ("v_proj" in full or "down_proj" in full or "embed" in full) else kind
        used = "F32" if weight.ndim == 1 or full.endswith(".gate.weight") else used
        stored = weight + 1 if is_norm and name.startswith("gemma") else weight
        data, value = _stored(stored, used, generator)
        value = value - 1 if is_norm and name.startswith("gemma") else value
        if name == "llama" and ("q_proj" in full or "k_proj" in full):
            value = value.view(-1, head_dim // 2, 2, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
        dense[full] = value.contiguous()
        stored_name, shape = _gguf_name(full_name(full), name), tuple(weight.shape)
        if ".experts." in full:
            # All experts of a layer are one tensor; fewer than ten are in the order of their names.
            _, (count, *_), others = tensors.get(stored_name, (used, (0,), b""))
            shape, data = (count + 1, *shape), others + data
        tensors[stored_name] = (used, shape, data)
    plain.mkdir(parents=True)
    save_file(dense, plain / "model.safetensors", metadata={"format": "pt"})
    (plain / "config.json").write_text(json.dumps(config))
    tokenizer = tokenizer_settings() if with_tokenizer else {"tokenizer.ggml.model": "no_vocab"}
    write_gguf(file, _settings(config, name, head_dim) | tokenizer, tensors)


def write_gguf(file: Path, settings: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """Write a file from settings and tensors as type, shape and data."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(settings))
    for key, value in settings.items():
        out += _string(key) + _value(value)
    start, body = 0, b""
    for key, (kind, shape, data) in tensors.items():
        out += _string(key) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        out += struct.pack("<IQ", NUMBERS.get(kind, 99), start)
        body += data + bytes(-len(data) % 32)
        start = len(body)
    file.write_bytes(out + bytes(-len(out) % 32) + body)


def _stored(weight: torch.Tensor, kind: str, generator: torch.Generator) -> tuple[bytes, torch.Tensor]:
    """Return the data of a tensor and its float32 values."""
    if kind in _DTYPES:
        narrow = weight.to(_DTYPES[kind])
        return narrow.contiguous().view(torch.uint8).numpy().tobytes(), narrow.float()
    from transformers.integrations.gguf.dequant import dequantize

    elements, size, halves = BLOCKS[kind]
    blocks = torch.randint(0, 256, (weight.numel() // elements, size), dtype=torch.uint8, generator=generator)
    for place in halves:
        numbers = torch.empty(len(blocks), 1).uniform_(-1, 1, generator=generator) * SCALES[kind] * 8
        blocks[:, place : place + 2] = numbers.half().view(torch.uint8)
    return blocks.numpy().tobytes(), dequantize(blocks.flatten(), NUMBERS[kind]).view(weight.shape)


def _gguf_name(full: str, architecture: str) -> str:
    base, _, suffix = full.rpartition(".")
    if not base.startswith("model.layers."):
        return f"{_NAMES[base]}.{suffix}"
    layer, inner = base.removeprefix("model.layers.").split(".", 1)
    inner = inner.rpartition(".")[2] if ".experts." in inner else inner
    four_norms = architecture == "gemma2"
    norms = {"post_attention_layernorm": "post_attention_norm" if four_norms else "ffn_norm"}
    norms |= {"pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm"}
    return f"blk.{layer}.{(norms | _NAMES)[inner]}.{suffix}"


def _settings(config: dict[str, Any], name: str, head_dim: int) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    own = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
    }
    if "num_experts_per_tok" in config:
        own["expert_count"] = config.get("num_experts") or config["num_local_experts"]
        own["expert_used_count"] = config["num_experts_per_tok"]
    if name == "qwen3moe":
        own["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if name == "gemma2":
        own["attention.sliding_window"] = config["sliding_window"]
        own["attn_logit_softcapping"] = config["attn_logit_softcapping"]
        own["final_logit_softcapping"] = config["final_logit_softcapping"]
    return {
        "general.architecture": name,
        **{f"{name}.{key}": value for key, value in own.items()},
    }


def tokenizer_settings() -> dict[str, Any]:
    """Return a byte-level tokenizer of 97 tokens with a few merges, and a chat template."""
    letters = [chr(code) for code in range(33, 33 + 90)]
    tokens = ["<end>", "<begin>", "\u0120", *letters, "he", "ll", "hell", "hello"][:97]
    kinds = [3, 3, *[1] * (len(tokens) - 2)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{% for m in messages %}<begin>{{ m['content'] }}{% endfor %}",
    }


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        kind = {str: 8, int: 5, float: 6}[type(value[0])]
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(_value(each)[4:] for each in value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Ii", 5, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<I", 8) + _string(value)
