"""Head norms, rotation and scales around a layer's attention, with torch operators."""

from typing import Any, Protocol

import torch
import torch.nn.functional as F

from quire.kernels.cache.fused_cache_write import CacheWrite
from quire.worker_proc.attention.backend import AttentionSpec, Rotary
from quire.worker_proc.attention.rope import rotate


class CachedAttention(Protocol):
    """Cache write and attention, without norms and rotation."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        plan: Any,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Write this step's keys and values, then compute attention.

        Args:
            query: ``[num_tokens, num_heads, head_dim]``.
            key, value: ``[num_tokens, num_kv_heads, head_dim]``, same dtype; None if the layer reads the cache of an
                earlier layer. With latents there are keys only.

        Returns:
            ``[num_tokens, num_heads, head_dim]``, or with latents ``value_dim``, in the query's dtype.
        """
        ...


def attend_unfused(
    attention: CachedAttention,
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    plan: object,
    spec: AttentionSpec,
    rotary: Rotary | None,
) -> torch.Tensor:
    """Compute ``AttentionBackend.attend`` without fusion."""
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    has_keys = qkv.shape[1] > heads
    value = qkv[:, heads + kv_heads :] if has_keys and not spec.value_dim else None
    qk = normalise_and_rotate(qkv[:, : heads + kv_heads] if has_keys else qkv, spec, rotary)
    key = qk[:, heads:] if has_keys else None
    return attention.forward(qk[:, :heads], key, value, kv_cache, plan, spec)


def cache_write(
    qkv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, spec: AttentionSpec, rotary: Rotary | None
) -> CacheWrite:
    """Return what the fused cache write takes of a layer: queries alone write no cache."""
    has_keys = qkv.shape[1] > spec.num_heads
    return CacheWrite(
        qkv,
        spec.num_heads,
        kv_cache if has_keys else None,
        slot_mapping if has_keys else None,
        spec.q_norm,
        spec.k_norm,
        spec.norm_eps,
        rotary_table=None if rotary is None else rotary.table,
        positions=None if rotary is None else rotary.positions,
        k_scale=spec.k_scale if has_keys else None,
        v_scale=spec.v_scale if has_keys else None,
    )


def scale_heads(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Multiply heads ``[num_tokens, num_heads, head_dim]`` by the scale of their KV head, ``[num_kv_heads]`` or None.

    Attention over the stored keys of an fp8 cache needs queries times ``k_scale``, and its results times ``v_scale``.
    """
    if scale is None:
        return x
    return (x.float() * scale.repeat_interleave(x.shape[1] // len(scale))[:, None]).to(x.dtype)


def normalise_and_rotate(qk: torch.Tensor, spec: AttentionSpec, rotary: Rotary | None) -> torch.Tensor:
    """Normalise and rotate ``qk``: ``[num_tokens, num_heads (+ num_kv_heads), head_dim]``, queries first."""
    if spec.q_norm is not None:
        assert spec.k_norm is not None
        parts = [F.rms_norm(qk[:, : spec.num_heads], qk.shape[-1:], spec.q_norm, spec.norm_eps)]
        if qk.shape[1] > spec.num_heads:
            parts.append(F.rms_norm(qk[:, spec.num_heads :], qk.shape[-1:], spec.k_norm, spec.norm_eps))
        qk = torch.cat(parts, 1)
    if rotary is None:
        return qk
    cos, sin = rotary.cos_sin()
    return rotate(qk, cos, sin)
