"""Latent attention (MLA): the cache has one vector per token, from which each head's key and value are projected."""

from typing import Any

import torch

from quire.protocol.errors import ConfigError
from quire.worker_proc.attention.backend import AttentionSpec, LayerAttention, Rotary
from quire.worker_proc.attention.cpu_expanded import LatentPart, attend_expanded, latent_parts
from quire.worker_proc.models.head_products import HeadProducts, head_products
from quire.worker_proc.models.module import Module
from quire.worker_proc.models.weight_slot import WeightSlot
from quire.worker_proc.models.weights import Build, Projection, Rows

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, which is not that of ``config.json``."""


class LatentAttention(Module):
    """This rank's heads of one layer, in the absorbed form of DeepSeek V2 (arXiv 2405.04434, section 2.1.2).

    A head's key is a product of the latent, beside the rotated numbers that all heads share. So its scores are those of
    the query's product with the same matrix, and attention needs no keys: it is that of many query heads over one key,
    the latent, whose own last numbers are the value. Each latent is read once for all heads. The result is multiplied
    by the matrix of the head's values. A latent is in the cache with the rotated numbers first, where backends rotate.
    Long prompts have the expanded form where it is faster (``latent_parts``): keys and values of each head.

    Raises:
        ConfigError: the heads cannot be divided among the ranks. Each rank has all latents.
    """

    def __init__(self, build: Build) -> None:
        config, size = build.config, build.parallel.size
        assert config.latent is not None
        self.build = build
        self.latent = latent = config.latent
        if config.num_heads % size:
            raise ConfigError(f"tensor_parallel_size {size} does not divide the model's {config.num_heads} heads")
        self.num_heads = heads = config.num_heads // size
        hidden, first = config.hidden_size, build.parallel.rank * heads

        def own(dim: int) -> tuple[slice, int]:
            return slice(first * dim, (first + heads) * dim), config.num_heads * dim

        narrow = [Rows("kv_a_proj_with_mqa", slice(0, latent.width), latent.width)]
        self.query_norm: torch.nn.Parameter | None = None
        if latent.query_rank:
            narrow.insert(0, Rows("q_a_proj", slice(0, latent.query_rank), latent.query_rank))
            self.query_norm = build.norm(latent.query_rank)
        self.narrow = build.rows_linear("self_attn.{}", narrow, hidden, config.qkv_bias)
        self.latent_norm = build.norm(latent.rank)
        name, inputs = ("q_b", latent.query_rank) if latent.query_rank else ("q", hidden)
        self.query = build.rows_linear("self_attn.{}_proj", [Rows(name, *own(latent.key_dim))], inputs, bias=False)
        wide = [Rows("kv_b", *own(latent.nope_dim + latent.value_dim))]
        self.wide: Projection | None = build.rows_linear("self_attn.{}_proj", wide, latent.rank, bias=False)
        self.o = build.columns_linear("self_attn.o_proj", hidden, *own(latent.value_dim), config.o_bias)
        assert config.attention_scale is not None
        self.spec = AttentionSpec(
            num_heads=heads,
            num_kv_heads=1,
            head_dim=latent.width,
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap,
            value_dim=latent.rank,
        )
        self._absorb: HeadProducts | None = None
        self._values: HeadProducts | None = None
        self._heads: list[HeadProducts] = []  # of expanded prompts: a second copy of the matrix, in its own order

    def __call__(
        self, x: torch.Tensor, kv_cache: torch.Tensor, plan: Any, backend: LayerAttention, rotary: Rotary | None
    ) -> torch.Tensor:
        """Map ``[num_tokens, hidden_size]`` to the same shape, summed over the ranks."""
        latent, heads, tokens = self.latent, self.num_heads, len(x)
        narrow = self.narrow(x)
        if self.query_norm is not None:
            x = self.build.ops.rms_norm(narrow[:, : latent.query_rank], self.query_norm, LATENT_EPS)
            narrow = narrow[:, latent.query_rank :]
        query = self.query(x).view(tokens, heads, latent.key_dim)
        if self._absorb is None:
            self._multiply_by_head(deterministic=False)
        parts = latent_parts(plan, latent) if self._heads else ()
        if parts:
            assert rotary is not None
            values = x.new_zeros(tokens, heads, latent.value_dim)
            for part in parts:
                own = part.tokens
                turned = Rotary(rotary.table, rotary.positions[own])
                if part.blocks is None:
                    values[own] = self._absorbed(query[own], narrow[own], kv_cache, part.plan, backend, turned)
                else:
                    values[own] = self._expanded(query[own], narrow[own], kv_cache, part, turned)
        else:
            values = self._absorbed(query, narrow, kv_cache, plan, backend, rotary)
        return self.build.parallel.all_reduce(self.o(values.reshape(tokens, -1)))

    def _absorbed(
        self,
        query: torch.Tensor,
        narrow: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: Any,
        backend: LayerAttention,
        rotary: Rotary | None,
    ) -> torch.Tensor:
        """Return the heads' results, ``[num_tokens, num_heads, value_dim]``, by attention to latents."""
        latent, heads = self.latent, self.num_heads
        assert self._absorb is not None and self._values is not None
        joined = query.new_empty(len(query), heads + 1, latent.width)
        self._put_rotated(joined[:, :heads], query[..., latent.nope_dim :])
        joined[:, :heads, latent.rope_dim :] = self._absorb(query[..., : latent.nope_dim])
        self._put_latents(joined[:, heads], narrow)
        return self._values(backend.attend(joined, kv_cache, plan, self.spec, rotary))

    def _expanded(
        self, query: torch.Tensor, narrow: torch.Tensor, kv_cache: torch.Tensor, part: LatentPart, rotary: Rotary
    ) -> torch.Tensor:
        """As ``_absorbed``, by attention to keys and values of each head."""
        latent = self.latent
        joined, latents = torch.empty_like(query), query.new_empty(len(query), 1, latent.width)
        self._put_rotated(joined, query[..., latent.nope_dim :])
        joined[..., latent.rope_dim :] = query[..., : latent.nope_dim]
        self._put_latents(latents[:, 0], narrow)
        return attend_expanded(part, joined, latents, kv_cache, self.spec, rotary, self._heads, latent.value_dim)

    def _put_latents(self, target: torch.Tensor, narrow: torch.Tensor) -> None:
        """Write the tokens' latents, ``[num_tokens, rope_dim + rank]``, from their projection."""
        rank = self.latent.rank
        self._put_rotated(target, narrow[:, rank:])
        target[:, self.latent.rope_dim :] = self.build.ops.rms_norm(narrow[:, :rank], self.latent_norm, LATENT_EPS)

    def _put_rotated(self, target: torch.Tensor, numbers: torch.Tensor) -> None:
        """Copy the numbers to rotate, ``[.., rope_dim]``; neighbours that rotate together go to two halves."""
        if not self.build.config.interleaved_rope:
            target[..., : self.latent.rope_dim] = numbers
            return
        half = self.latent.rope_dim // 2
        target[..., :half] = numbers[..., 0::2]
        target[..., half : 2 * half] = numbers[..., 1::2]

    def prepack(self, *, deterministic: bool) -> bool:
        """Convert the loaded projection of keys and values to products by head, and free it."""
        if self._absorb is None or self.wide is not None:
            self._multiply_by_head(deterministic=deterministic)
            self.wide = None
        assert self._absorb is not None
        return self._absorb.is_packed

    def _multiply_by_head(self, *, deterministic: bool) -> None:
        """Make the products by head from the projection, of any format, by its own product with the unit matrix."""
        assert self.wide is not None
        latent, build = self.latent, self.build
        unit = torch.eye(latent.rank, dtype=build.activation_dtype, device=self.latent_norm.device)
        wide = self.wide(unit).to(build.dtype).T.view(self.num_heads, latent.nope_dim + latent.value_dim, latent.rank)
        keys, values = wide[:, : latent.nope_dim].transpose(1, 2), wide[:, latent.nope_dim :]
        self._absorb = head_products(keys, build.activation_dtype, deterministic=deterministic)
        self._values = head_products(values, build.activation_dtype, deterministic=deterministic)
        if self._absorb.is_packed and not deterministic:
            self._heads = [head_products(head[None], build.activation_dtype, deterministic=False) for head in wide]

    def set_kv_scales(self, k_scale: torch.Tensor, v_scale: torch.Tensor) -> None:
        raise AssertionError("a cache of latents has no scales")

    def weight_slots(self) -> dict[str, WeightSlot]:
        assert self.wide is not None
        slots = self.narrow.weight_slots() | self.query.weight_slots() | self.wide.weight_slots()
        slots |= self.o.weight_slots()
        slots["self_attn.kv_a_layernorm.weight"] = WeightSlot(self.latent_norm.data, (self.latent.rank,))
        if self.query_norm is not None:
            slots["self_attn.q_a_layernorm.weight"] = WeightSlot(self.query_norm.data, (self.latent.query_rank,))
        return slots
