"""A plain torch Llama, for training the demo model only.

Module names follow the Hugging Face checkpoint layout, so that `state_dict` is the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The sizes of the demo model."""

    vocab_size: int = 1024
    hidden_size: int = 192
    intermediate_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


def rotary_tables(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary embedding, `[length, head_dim]` each."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.groups = shape.num_attention_heads // shape.num_key_value_heads
        query, key = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = hidden.shape
        query, key, value = (
            projection(hidden).view(rows, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        key, value = key.repeat_interleave(self.groups, dim=1), value.repeat_interleave(self.groups, dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))
        return out


class Mlp(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, mask)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Decoder(nn.Module):
    """Everything below the language-model head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, mask)
        out: Tensor = self.norm(hidden)
        return out


class Llama(nn.Module):
    """The model with its output tied to the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * shape.num_hidden_layers) ** 0.5)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token from the decoder's output."""
        return functional.linear(hidden, self.model.embed_tokens.weight)
