"""A GGUF file's settings and tensors in the names of a Hugging Face checkpoint."""

import re
from collections.abc import Iterator, Mapping
from struct import unpack_from
from typing import Any

from quire.protocol.errors import ConfigError, printable
from quire.protocol.model.config_fields import token_ids
from quire.protocol.model.gguf_file import GgufArray, GgufFile, GgufTensor

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
_WITH_EXPERTS = {"llama": "MixtralForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM"}
_FIELDS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
}
_WIDE_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27 billion weights, whose scores are scaled by the hidden size divided by the heads."""
_END_TEXTS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")
"""Tokens that end an answer beside the declared ones, where the file marks them as control tokens."""
_CONTROL = 3

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_OF_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Tensors that hold all experts of a layer."""
_BLOCK = re.compile(r"blk\.(\d{1,9})\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_INTERLEAVED = ("llama",)
"""Architectures whose rows of queries and keys are stored with the two halves of each head interleaved."""


def model_settings(file: GgufFile) -> dict[str, Any]:
    """Return the settings as ``config.json`` has them.

    Raises:
        ConfigError: the architecture, or a kind of layer or of rotary embedding, is not supported.
    """
    given = file.settings
    name = given.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: general.architecture {printable(name)} is not supported in GGUF files; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    own = {key.removeprefix(f"{name}."): value for key, value in given.items() if key.startswith(f"{name}.")}
    if own.get("expert_count") and name not in _WITH_EXPERTS:
        raise ConfigError(
            f"{file.path}: experts are not supported in GGUF files of {name}; supported: {', '.join(_WITH_EXPERTS)}"
        )
    if own.get("attention.value_length", own.get("attention.key_length")) != own.get("attention.key_length"):
        raise ConfigError(f"{file.path}: attention.value_length must equal attention.key_length")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(f"{file.path}: tensor token_embd.weight is missing")
    raw = {field: own[key] for key, field in _FIELDS.items() if key in own}
    raw |= {
        "architectures": [ARCHITECTURES[name]],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": name == "llama" and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "torch_dtype": _dtype(file),
    }
    if name == "llama" and "sliding_window" in raw:
        raw["architectures"] = ["MistralForCausalLM"]
    if own.get("expert_count"):
        raw["architectures"] = [_WITH_EXPERTS[name]]
        raw.setdefault("norm_topk_prob", True)
    hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        raise ConfigError(f"{file.path}: {name}.embedding_length and attention.head_count must be positive integers")
    raw.setdefault("head_dim", hidden // heads)
    if name in _WIDE_GEMMA:
        wide = raw.get("num_hidden_layers") == _WIDE_GEMMA[name]
        raw["query_pre_attn_scalar"] = hidden // heads if wide else raw["head_dim"]
    rotated = own.get("rope.dimension_count", raw["head_dim"])
    if rotated != raw["head_dim"]:
        raise ConfigError(
            f"{file.path}: rope.dimension_count {printable(rotated)} is not supported; supported: {raw['head_dim']}, "
            f"the head dimension"
        )
    return raw | _rope(file, own, raw)


def end_tokens(file: GgufFile) -> list[int]:
    """Return the tokens that end an answer."""
    given = file.settings
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [given[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in given]
    tokens, kinds = given.get("tokenizer.ggml.tokens"), given.get("tokenizer.ggml.token_type")
    if isinstance(tokens, GgufArray) and isinstance(kinds, GgufArray):
        named = zip(tokens.values(), kinds.values(), strict=False)
        ids += [index for index, (text, kind) in enumerate(named) if kind == _CONTROL and text in _END_TEXTS]
    return token_ids(ids, f"{file.path}: tokenizer.ggml.eos_token_id")


def named_tensors(file: GgufFile) -> Iterator[tuple[str, GgufTensor]]:
    """Yield tensors by their names in a Hugging Face checkpoint, or as they are if it has none.

    A tensor of all experts is yielded in parts, one for each of them.

    Raises:
        ConfigError: it does not have the declared number of experts.
    """
    architecture = str(file.settings.get("general.architecture"))
    for name, tensor in file.tensors.items():
        match = _BLOCK.fullmatch(name)
        if name == _ROPE_FACTORS:
            continue  # part of the configuration
        if match is None or match[2] not in _OF_EXPERTS:
            yield _full_name(name, match, architecture), tensor
            continue
        count = file.settings.get(f"{architecture}.expert_count")
        if len(tensor.shape) != 3 or tensor.shape[0] != count:
            raise ConfigError(
                f"{file.path}: tensor {name} has shape {list(tensor.shape)}, expected {printable(count)} experts first"
            )
        size = tensor.num_bytes // tensor.shape[0]
        for expert in range(tensor.shape[0]):
            part = GgufTensor(name, tensor.kind, tensor.shape[1:], tensor.start + expert * size)
            yield f"model.layers.{match[1]}.mlp.experts.{expert}.{_OF_EXPERTS[match[2]]}.{match[3]}", part


def _full_name(name: str, match: re.Match[str] | None, architecture: str) -> str:
    if match is None:
        return _TOP.get(name, name)
    norm = "pre_feedforward_layernorm" if architecture in _WIDE_GEMMA else "post_attention_layernorm"
    place = norm if match[2] == "ffn_norm" else _IN_LAYER.get(match[2])
    return name if place is None else f"model.layers.{match[1]}.{place}.{match[3]}"


def interleaved_rows(file: GgufFile, name: str) -> int:
    """Return the rows of a head if its row ``2 i + j`` is row ``j * head_dim / 2 + i`` of the checkpoint, or 0."""
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in ("attn_q", "attn_k"):
        return 0
    settings = model_settings(file)
    return int(settings["head_dim"]) if file.settings["general.architecture"] in _INTERLEAVED else 0


def _rope(file: GgufFile, own: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a rotary embedding that is scaled: by a rule, or by a divisor for each frequency."""
    kind, length = own.get("rope.scaling.type", "none"), raw.get("max_position_embeddings")
    factor = own.get("rope.scaling.factor", 1.0)
    if _ROPE_FACTORS in file.tensors:
        divisors = _floats(file, file.tensors[_ROPE_FACTORS])
        scaling = {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}
        return {"rope_scaling": scaling | {"factor": 1.0, "original_max_position_embeddings": length}}
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {}
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn" and "rope.scaling.yarn_log_multiplier" not in own:
        original = own.get("rope.scaling.original_context_length", length)
        return {"rope_scaling": {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}}
    raise ConfigError(f"{file.path}: rope.scaling.type {printable(kind)} is not supported; supported: linear, yarn")


def _floats(file: GgufFile, tensor: GgufTensor) -> list[float]:
    if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 2**16:
        raise ConfigError(f"{file.path}: tensor {tensor.name} must be a vector in F32")
    with file.path.open("rb") as opened:
        opened.seek(tensor.start)
        return list(unpack_from(f"<{tensor.shape[0]}f", opened.read(tensor.num_bytes)))


def _dtype(file: GgufFile) -> str:
    """Return the dtype of a plain file's matrices; bfloat16 for a quantised one. Routers of experts are always F32."""
    matrices = (tensor for name, tensor in file.tensors.items() if len(tensor.shape) > 1 and "ffn_gate_inp" not in name)
    kinds = {tensor.kind for tensor in matrices}
    return "float32" if kinds == {"F32"} else "float16" if kinds == {"F16"} else "bfloat16"
