"""The decoder that Llama, Qwen2 and Qwen3 share: pre-norm blocks of rotary attention and a gated MLP.

Owns the weights and the arithmetic between token ids and logits. It does not know what a request, a block or a
batch is: where keys and values live, and who attends to what, is the attention backend's, which gets a plan per layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from quire.protocol.model_config import ModelConfig
from quire.worker_proc.attention.backend import AttentionBackend, AttentionSpec
from quire.worker_proc.models.linear import Linear
from quire.worker_proc.models.rope import rope_table, rotate


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Where one checkpoint tensor goes.

    Attributes:
        target: a view into a (perhaps fused) parameter; the checkpoint's tensor is broadcast into it.
        shape: the shape that the checkpoint's tensor must have.
    """

    target: torch.Tensor
    shape: tuple[int, ...]


class Decoder(torch.nn.Module):
    """A decoder-only transformer with switches for the families in ``ModelConfig``.

    Weights are allocated, not initialised: ``quire.worker_proc.loader`` fills them through ``weight_slots``.

    Args:
        config: shape and switches.
        dtype: of weights and activations; norms, rotary tables and logits are computed in float32.
        device: where the weights live; ``meta`` works for counting.
        max_position: positions that the rotary table covers (the engine's longest request); by default the model's.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str, max_position: int | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self._prepacked = False
        self.embed = _weight(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = torch.nn.ModuleList(DecoderLayer(config, dtype, device) for _ in range(config.num_layers))
        self.norm = _weight(config.hidden_size, dtype=dtype, device=device)
        tied = config.tie_word_embeddings
        self.lm_head = Linear(self.embed if tied else _weight(*self.embed.shape, dtype=dtype, device=device))
        rope = rope_table(config.rope, config.head_dim, max_position or config.max_position, device)
        self.rope: torch.Tensor
        self.register_buffer("rope", rope.to(dtype), persistent=False)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        plans: Sequence[Any],
        backend: AttentionBackend,
    ) -> torch.Tensor:
        """Run the tokens of one step through all layers, writing their keys and values.

        Args:
            token_ids, positions: int64 ``[num_tokens]``, rows flattened in batch order.
            kv_caches: one cache per layer, of the backend's shape.
            plans: one plan per layer: that of the layer's KV group.
            backend: writes the caches and attends.

        Returns:
            ``[num_tokens, hidden_size]`` after the final norm.
        """
        cos, sin = self.rope.index_select(1, positions).unsqueeze(2)
        hidden = F.embedding(token_ids, self.embed)
        for layer, cache, plan in zip(self.layers, kv_caches, plans, strict=True):
            hidden = layer(hidden, cos, sin, cache, plan, backend)
        return rms_norm(hidden, self.norm, self.config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of every token of the vocabulary: ``[rows, hidden_size]`` → float32 ``[rows, vocab_size]``."""
        scores: torch.Tensor = self.lm_head(hidden)
        return scores.float()

    def prepack(self) -> bool:
        """Once weights are loaded: lay them out for this CPU; false where that is not to be had.

        The plain weights are gone afterwards, and nothing can be loaded any more; memory grows only by one copy of
        the embedding, when it is tied.
        """
        linears = [module for module in self.modules() if isinstance(module, Linear)]
        packed = [linear.prepack(keep=linear.weight is self.embed) for linear in linears]
        self._prepacked = any(packed)
        return all(packed)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Every tensor that a checkpoint must hold, by its Hugging Face name.

        With tied embeddings ``lm_head.weight`` is not among them: the loader accepts it when it equals the embedding.

        Raises:
            RuntimeError: after ``prepack``.
        """
        if self._prepacked:
            raise RuntimeError("the weights are prepacked: load them before")
        slots = {"model.embed_tokens.weight": _whole(self.embed), "model.norm.weight": _whole(self.norm)}
        if not self.config.tie_word_embeddings:
            slots["lm_head.weight"] = _whole(self.lm_head.weight)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            slots |= {f"model.layers.{index}.{name}": slot for name, slot in layer.weight_slots().items()}
        return slots


class DecoderLayer(torch.nn.Module):
    """One block: attention and gated MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()

        def weight(*shape: int) -> torch.nn.Parameter:
            return _weight(*shape, dtype=dtype, device=device)

        def linear(outputs: int, inputs: int, bias: bool) -> Linear:
            return Linear(weight(outputs, inputs), weight(outputs) if bias else None)

        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.attention = AttentionSpec(config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5)
        self.eps = config.rms_norm_eps
        hidden, inner = config.hidden_size, config.intermediate_size
        heads = self.num_heads + 2 * self.num_kv_heads
        self.input_norm = weight(hidden)
        self.qkv = linear(heads * self.head_dim, hidden, config.qkv_bias)
        # One row per query and key head: the two norms of Qwen3 are then one multiplication over neighbouring heads.
        self.qk_norm = weight(self.num_heads + self.num_kv_heads, self.head_dim) if config.qk_norm else None
        self.o = linear(hidden, self.num_heads * self.head_dim, config.o_bias)
        self.post_norm = weight(hidden)
        self.gate_up = linear(2 * inner, hidden, config.mlp_bias)
        self.down = linear(hidden, inner, config.mlp_bias)

    def forward(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: Any,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        """``hidden`` ``[num_tokens, hidden_size]`` is the residual stream; it is updated in place and returned."""
        tokens = hidden.shape[0]
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv(rms_norm(hidden, self.input_norm, self.eps))
        qkv = qkv.view(tokens, heads + 2 * kv_heads, self.head_dim)
        qk = qkv[:, : heads + kv_heads]
        if self.qk_norm is not None:
            qk = rms_norm(qk, None, self.eps).mul_(self.qk_norm)
        qk = rotate(qk, cos, sin)
        attended = backend.forward(
            qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :], kv_cache, plan, self.attention
        )
        hidden += self.o(attended.reshape(tokens, heads * self.head_dim))
        gate, up = self.gate_up(rms_norm(hidden, self.post_norm, self.eps)).chunk(2, -1)
        hidden += self.down(F.silu(gate).mul_(up))
        return hidden

    def weight_slots(self) -> dict[str, WeightSlot]:
        """This layer's checkpoint tensors, by their names under ``model.layers.N.``."""
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.head_dim
        slots = {
            "input_layernorm.weight": _whole(self.input_norm),
            "post_attention_layernorm.weight": _whole(self.post_norm),
        }
        inner = self.down.weight.shape[1]
        _split(slots, "self_attn.{}_proj", self.qkv, q=heads * dim, k=kv_heads * dim, v=kv_heads * dim)
        _split(slots, "self_attn.{}_proj", self.o, o=len(self.o.weight))
        _split(slots, "mlp.{}_proj", self.gate_up, gate=inner, up=inner)
        _split(slots, "mlp.{}_proj", self.down, down=len(self.down.weight))
        if self.qk_norm is not None:
            slots["self_attn.q_norm.weight"] = WeightSlot(self.qk_norm.data[:heads], (dim,))
            slots["self_attn.k_norm.weight"] = WeightSlot(self.qk_norm.data[heads:], (dim,))
        return slots


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Divide by the root mean square over the last dimension, in float32, and scale (arXiv 1910.07467)."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _weight(*shape: int, dtype: torch.dtype, device: torch.device | str) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def _whole(weight: torch.Tensor) -> WeightSlot:
    return WeightSlot(weight.data, tuple(weight.shape))


def _split(slots: dict[str, WeightSlot], name: str, fused: Linear, **rows: int) -> None:
    """Add the slots of a fused layer, its weight and bias cut along their rows in the order given."""
    for kind, tensor in (("weight", fused.weight), ("bias", fused.bias)):
        if tensor is not None:
            parts = torch.split(tensor.data, list(rows.values()))
            slots |= {f"{name.format(key)}.{kind}": _whole(part) for key, part in zip(rows, parts, strict=True)}
