"""A decoder in forty lines of torch over the whole text at once, for models that transformers does not have."""

import torch
import torch.nn.functional as F

from quire.worker_proc.models.decoder import Decoder


def plain_logits(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Pre-norm blocks, default rope, head norms, windows, chunks, caches that layers share: ``[tokens, vocab]``."""
    config = model.config
    weights = {name: slot.target for name, slot in model.weight_slots().items()}
    hidden = weights["model.embed_tokens.weight"][tokens] * config.embedding_multiplier
    caches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for layer in range(config.num_layers):
        mine = {n.removeprefix(f"model.layers.{layer}."): w for n, w in weights.items() if f"layers.{layer}." in n}
        x = _norm(hidden, mine["input_layernorm.weight"], config.rms_norm_eps)
        theta = (
            config.local_rope.theta if config.local_rope and layer in config.local_rope_layers else config.rope.theta
        )
        dim = config.kv_shape(layer)[1]
        query = _turned(_heads(x, mine, "q", dim, config.rms_norm_eps), theta)
        if config.cache_source(layer) == layer:
            key = _turned(_heads(x, mine, "k", dim, config.rms_norm_eps), theta)
            value = F.linear(x, mine["self_attn.v_proj.weight"]).unflatten(-1, (-1, dim))
            caches[layer] = key, value
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1)
                      for part in caches[config.cache_source(layer)])  # fmt: skip
        scores = torch.einsum("qhd,khd->hqk", query, key) * (config.attention_scale or dim**-0.5)
        distance = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))
        window = config.window(layer) or len(tokens)
        of_chunk = torch.arange(len(tokens)) // (config.chunk(layer) or len(tokens))
        apart = of_chunk[:, None] != of_chunk
        scores = scores.masked_fill((distance < 0) | (distance >= window) | apart, float("-inf"))
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
        x = F.linear(attended, mine["self_attn.o_proj.weight"])
        hidden = hidden + _norm(x, mine["post_attention_layernorm.weight"], config.rms_norm_eps)
        x = _norm(hidden, mine["pre_feedforward_layernorm.weight"], config.rms_norm_eps)
        gate = F.gelu(F.linear(x, mine["mlp.gate_proj.weight"]), approximate="tanh")
        x = F.linear(gate * F.linear(x, mine["mlp.up_proj.weight"]), mine["mlp.down_proj.weight"])
        hidden = hidden + _norm(x, mine["post_feedforward_layernorm.weight"], config.rms_norm_eps)
    return F.linear(
        _norm(hidden, weights["model.norm.weight"], config.rms_norm_eps), weights["model.embed_tokens.weight"]
    )


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _heads(x: torch.Tensor, weights: dict[str, torch.Tensor], name: str, dim: int, eps: float) -> torch.Tensor:
    heads = F.linear(x, weights[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, dim))
    return _norm(heads, weights[f"self_attn.{name}_norm.weight"], eps)


def _turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """As complex numbers: dimensions ``i`` and ``i + dim / 2`` form one."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None, None] * theta ** (-torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)
