"""Attention features: those that a model needs, those that a backend supports, and messages for missing ones."""

from dataclasses import dataclass

import torch

from quire.kernels.common.fp8 import FP8_DTYPES
from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import KVLayout

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Needs:
    """Attention features that a model and the settings need.

    Attributes:
        dtype, kv_dtype: dtypes of the activations and of the cache.
        head_scales: the scales of the fp8 cache differ between the heads of a layer.
        last_keys: tokens of images see later ones (``StepBatch.last_keys``).
    """

    head_dims: tuple[int, ...]
    dtype: torch.dtype
    kv_dtype: torch.dtype
    windows: bool = False
    chunks: bool = False
    soft_cap: bool = False
    sinks: bool = False
    latents: bool = False
    deterministic: bool = False
    head_scales: bool = False
    last_keys: bool = False

    @classmethod
    def of(cls, config: EngineConfig, layout: KVLayout, *, head_scales: bool = False) -> "Needs":
        model = config.model
        return cls(
            # Latents: their part that is the value, as wide as all but the rotated numbers of the keys.
            head_dims=tuple(sorted({layout.kv_shape(group)[1] for group in layout.groups}))
            if model.latent is None
            else (model.latent.rank,),
            dtype=getattr(torch, config.dtype),
            kv_dtype=getattr(torch, layout.dtype),
            windows=any(group.kind == "sliding_window" for group in layout.groups),
            # Of the model: the one group of a draft model's layout is of another kind.
            chunks=any(model.chunks),
            soft_cap=model.attention_soft_cap > 0,
            sinks=model.attention_sinks,
            latents=model.latent is not None,
            deterministic=config.deterministic,
            head_scales=head_scales,
            last_keys=model.vision is not None and not model.vision.is_causal and "image" in config.item_kinds,
        )


@dataclass(frozen=True, slots=True)
class Supports:
    """Attention features that a backend supports.

    Attributes:
        dtypes: dtypes of activations.
        fp8_cache: caches of 8-bit floats with scales.
        mixed_cache: caches of a 16-bit or 32-bit dtype other than the activations'.
        head_dims: supported head dimensions; empty: every multiple of ``head_dim_multiple``.
        max_head_dim: largest head dimension; 0: no limit.
        block_sizes: block sizes that the kernels read, best first. A larger block of the pool is several blocks of the
            first size that divides it.
        block_multiple: if none of ``block_sizes`` divides the pool's block, the kernels read it whole if it is a
            multiple of this; 0: not at all.
        deterministic: a request's result has the same bits in every batch and for any chunks of its prompt.
        head_scales: each head of an fp8 cache may have its own scales.
        capabilities: lowest and highest major compute capability; 0 as the highest: all later ones.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32, *HALVES)
    fp8_cache: bool = True
    mixed_cache: bool = True
    head_dims: tuple[int, ...] = ()
    head_dim_multiple: int = 1
    max_head_dim: int = 0
    block_sizes: tuple[int, ...] = ()
    block_multiple: int = 1
    windows: bool = True
    chunks: bool = True
    soft_cap: bool = True
    sinks: bool = True
    latents: bool = True
    deterministic: bool = True
    head_scales: bool = True
    last_keys: bool = True
    capabilities: tuple[int, int] = (0, 0)

    def kernel_block_size(self, block_size: int) -> int | None:
        """Return the kernels' block size for blocks of the pool of this size; None if they cannot read such blocks."""
        found = next((size for size in self.block_sizes if block_size % size == 0), None)
        if found is None and self.block_multiple and block_size % self.block_multiple == 0:
            return block_size
        return found

    def describe_block_sizes(self) -> str:
        named = [f"multiples of {size}" for size in (*self.block_sizes, self.block_multiple) if size > 1]
        return " or ".join(named)

    def lacks(self, needs: Needs, capability: tuple[int, int] | None = None) -> list[str]:
        """Return a phrase for each missing feature; empty if all are supported.

        Args:
            capability: compute capability of the CUDA device; None: not checked.
        """
        missing = [*self._lacks_device(capability), *self._lacks_sizes(needs), *self._lacks_dtypes(needs)]
        features = {
            "sliding windows": needs.windows and not self.windows,
            "chunked local attention": needs.chunks and not self.chunks,
            "a soft cap on scores (attn_logit_softcapping)": needs.soft_cap and not self.soft_cap,
            "attention sinks": needs.sinks and not self.sinks,
            "latent attention": needs.latents and not self.latents,
            "batch-independent results (--deterministic)": needs.deterministic and not self.deterministic,
            "KV scales per head": needs.head_scales and not self.head_scales,
            "attention in both directions inside images": needs.last_keys and not self.last_keys,
        }
        return missing + [name for name, is_missing in features.items() if is_missing]

    def _lacks_device(self, capability: tuple[int, int] | None) -> list[str]:
        lowest, highest = self.capabilities
        if capability is None or (lowest <= capability[0] and (not highest or capability[0] <= highest)):
            return []
        last = f" to {highest}.x" if highest else " and later"
        supported = f"{lowest}.x{last * (lowest != highest)}"
        return [f"compute capability {capability[0]}.{capability[1]} (supported: {supported})"]

    def _lacks_sizes(self, needs: Needs) -> list[str]:
        missing = []
        for dim in needs.head_dims:
            if self.head_dims and dim not in self.head_dims:
                missing.append(f"head_dim {dim} (supported: {', '.join(map(str, self.head_dims))})")
            elif dim % self.head_dim_multiple or (self.max_head_dim and dim > self.max_head_dim):
                limit = f" up to {self.max_head_dim}" if self.max_head_dim else ""
                missing.append(f"head_dim {dim} (supported: multiples of {self.head_dim_multiple}{limit})")
        return missing

    def _lacks_dtypes(self, needs: Needs) -> list[str]:
        missing = []
        if needs.dtype not in self.dtypes:
            names = ", ".join(map(dtype_name, self.dtypes))
            missing.append(f"--dtype {dtype_name(needs.dtype)} (supported: {names})")
        has_cache = self.fp8_cache if needs.kv_dtype in FP8_DTYPES else self.mixed_cache
        if needs.kv_dtype is not needs.dtype and not has_cache:
            missing.append(f"--kv-cache-dtype {dtype_name(needs.kv_dtype)} with {dtype_name(needs.dtype)} activations")
        return missing


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that flags and ``config.json`` use."""
    return str(dtype).removeprefix("torch.")
