"""The attention sublayer: fused QKV projection, the attention backend, output projection."""

from dataclasses import replace
from typing import Any

import torch

from quire.worker_proc.attention.backend import AttentionSpec, LayerAttention, Rotary
from quire.worker_proc.models.module import Module
from quire.worker_proc.models.weight_slot import WeightSlot
from quire.worker_proc.models.weights import Build, HeadShare, Rows


class Attention(Module):
    """This rank's heads of one layer. A layer that reads an earlier layer's KV cache projects queries only.

    Raises:
        ConfigError: the heads cannot be divided among the ranks.
    """

    def __init__(self, build: Build, layer: int) -> None:
        config = build.config
        self.config = config
        self.build = build
        self.num_kv_heads, self.head_dim = config.kv_shape(layer)
        self.heads = heads = HeadShare.of_rank(
            config.num_heads, self.num_kv_heads, build.parallel.rank, build.parallel.size
        )
        self.owns_cache = config.cache_source(layer) == layer
        # Plain weights are ordered as they are loaded. Other tensors mix outputs, and adapters have the stored order.
        mixed = any(build.format_of(f"self_attn.{name}_proj") for name in "qk") or build.additions is not None
        self.orders_outputs = config.interleaved_rope and mixed
        self.num_projected = heads.num_heads + (2 * heads.num_kv_heads if self.owns_cache else 0)
        dim = self.head_dim
        own = _head_slice(heads.first_head, heads.num_heads, dim)
        own_kv = _head_slice(heads.first_kv_head, heads.num_kv_heads, dim)
        total, total_kv = config.num_heads * dim, self.num_kv_heads * dim
        parts = [Rows("q", own, total)]
        if self.owns_cache:
            parts += [Rows("k", own_kv, total_kv), Rows("v", own_kv, total_kv)]
        self.qkv = build.rows_linear("self_attn.{}_proj", parts, config.hidden_size, config.qkv_bias)
        self.o = build.columns_linear("self_attn.o_proj", config.hidden_size, own, total, config.o_bias)
        self.q_norm: torch.nn.Parameter | None = None
        self.k_norm: torch.nn.Parameter | None = None
        if config.qk_norm in ("head", "width"):
            per_head = config.qk_norm == "head"
            self.q_norm = build.norm(dim if per_head else heads.num_heads * dim)
            self.k_norm = build.norm(dim if per_head else heads.num_kv_heads * dim)
        self.sinks = build.weight(heads.num_heads, dtype=torch.float32) if config.attention_sinks else None
        in_backend = config.qk_norm == "head"
        # Rotation keeps the norm of a head, so a norm before it, as backends compute it, is that of Llama 4 after it.
        is_unit = config.qk_norm == "unit" and layer not in config.no_rope_layers
        ones = torch.ones(dim, dtype=build.activation_dtype, device=build.device) if is_unit else None
        self.spec = AttentionSpec(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=dim,
            scale=dim**-0.5 if config.attention_scale is None else config.attention_scale,
            soft_cap=config.attention_soft_cap,
            sinks=self.sinks,
            q_norm=self.q_norm if in_backend else ones,
            k_norm=self.k_norm if in_backend else ones,
            norm_eps=config.rms_norm_eps,
        )

    def __call__(
        self, x: torch.Tensor, kv_cache: torch.Tensor, plan: Any, backend: LayerAttention, rotary: Rotary | None
    ) -> torch.Tensor:
        """Map ``[num_tokens, hidden_size]`` to the same shape, summed over the ranks."""
        num_tokens = x.shape[0]
        qkv = self.qkv(x)
        if self.config.qk_norm == "width":
            self._normalise_width(qkv)
        qkv = qkv.view(num_tokens, self.num_projected, self.head_dim)
        if self.orders_outputs and rotary is not None:
            self._order_outputs(qkv, rotary.table.shape[-1])
        attended = backend.attend(qkv, kv_cache, plan, self.spec, rotary)
        return self.build.parallel.all_reduce(self.o(attended.reshape(num_tokens, -1)))

    def set_kv_scales(self, k_scale: torch.Tensor, v_scale: torch.Tensor) -> None:
        """Set the scales of an fp8 cache: float32 ``[1]``, or ``[num_kv_heads]`` for all heads of all ranks."""
        first, count = self.heads.first_kv_head, self.heads.num_kv_heads

        def own(scale: torch.Tensor) -> torch.Tensor:
            return scale.expand(self.num_kv_heads)[first : first + count].to(self.build.device).contiguous()

        self.spec = replace(self.spec, k_scale=own(k_scale), v_scale=own(v_scale))

    def _normalise_width(self, qkv: torch.Tensor) -> None:
        """Normalise queries and keys in place, each over all heads of all ranks (OLMo 2)."""
        assert self.q_norm is not None and self.k_norm is not None
        config, parallel = self.config, self.build.parallel
        pairs = [(qkv[:, : len(self.q_norm)], self.q_norm, config.num_heads)]
        if self.owns_cache:
            keys = qkv[:, len(self.q_norm) : len(self.q_norm) + len(self.k_norm)]
            pairs.append((keys, self.k_norm, self.num_kv_heads * self.heads.kv_replicas))
        if parallel.size == 1:
            for x, weight, _ in pairs:
                x.copy_(self.build.ops.rms_norm(x, weight, config.rms_norm_eps))
            return
        squares = torch.stack([x.float().square().sum(-1) for x, _, _ in pairs], -1)
        squares = parallel.all_reduce(squares)
        for (x, weight, heads), square in zip(pairs, squares.unbind(-1), strict=True):
            scale = torch.rsqrt(square / (heads * self.head_dim) + config.rms_norm_eps)
            x.copy_(x.float() * scale[:, None] * weight)

    def _order_outputs(self, qkv: torch.Tensor, rotary_dim: int) -> None:
        """Order queries and keys in place, as ``in_halves`` orders rows of weights."""
        num_values = self.heads.num_kv_heads if self.owns_cache else 0
        rotated = qkv[:, : self.num_projected - num_values, :rotary_dim]
        rotated.copy_(in_halves(rotated))

    def weight_slots(self) -> dict[str, WeightSlot]:
        config, heads, dim = self.config, self.heads, self.head_dim
        own = _head_slice(heads.first_head, heads.num_heads, dim)
        own_kv = _head_slice(heads.first_kv_head, heads.num_kv_heads, dim)
        total, total_kv = config.num_heads * dim, self.num_kv_heads * dim
        slots = self.qkv.weight_slots() | self.o.weight_slots()
        if config.interleaved_rope and not self.orders_outputs:
            for name, slot in slots.items():
                if name.startswith(("self_attn.q_proj.", "self_attn.k_proj.")):
                    order = torch.arange(slot.target.shape[0]).view(1, -1, dim)
                    rotated = order[..., : config.rope.rotary_dim(dim)]
                    rotated.copy_(in_halves(rotated))
                    slots[name] = replace(slot, order=order.flatten())
        if self.q_norm is not None:
            per_head = config.qk_norm == "head"
            cut, size = ((), None) if per_head else ((own,), total)
            slots["self_attn.q_norm.weight"] = self.build.norm_slot(self.q_norm, cut, size)
        if self.k_norm is not None and self.owns_cache:
            cut, size = ((), None) if per_head else ((own_kv,), total_kv)
            slots["self_attn.k_norm.weight"] = self.build.norm_slot(self.k_norm, cut, size)
        if self.sinks is not None:
            own_heads = slice(heads.first_head, heads.first_head + heads.num_heads)
            slots["self_attn.sinks"] = WeightSlot(self.sinks.data, (config.num_heads,), (own_heads,))
        return slots


def in_halves(heads: torch.Tensor) -> torch.Tensor:
    """Return ``[rows, heads, dims]`` with neighbouring dimensions ``dims / 2`` apart, as backends rotate them.

    Attention scores do not depend on the order.
    """
    pairs = heads.view(*heads.shape[:2], heads.shape[2] // 2, 2)
    return pairs.transpose(2, 3).reshape(heads.shape)


def _head_slice(first_head: int, count: int, head_dim: int) -> slice:
    return slice(first_head * head_dim, (first_head + count) * head_dim)
