"""What a model asks of attention, what a backend has, and what is missing, in words: known before weights load."""

from dataclasses import dataclass

import torch

from quire.kernels.common.fp8 import FP8_DTYPES
from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import KVLayout

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model and the settings ask of attention.

    Attributes:
        dtype, kv_dtype: of the activations and of the cache.
        block_sizes: of all KV groups, without repetitions.
    """

    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_sizes: tuple[int, ...] = (16,)
    windows: bool = False
    soft_cap: bool = False
    sinks: bool = False
    deterministic: bool = False

    @classmethod
    def of(cls, config: EngineConfig, layout: KVLayout) -> "Needs":
        model = config.model
        return cls(
            head_dim=layout.head_dim,
            dtype=getattr(torch, config.dtype),
            kv_dtype=getattr(torch, layout.dtype),
            block_sizes=tuple(sorted({group.block_size for group in layout.groups})),
            windows=any(group.kind == "sliding_window" for group in layout.groups),
            soft_cap=model.attention_soft_cap > 0,
            sinks=model.attention_sinks,
            deterministic=config.deterministic,
        )


@dataclass(frozen=True, slots=True)
class Supports:
    """What a backend has.

    Attributes:
        dtypes: of activations.
        fp8_cache: caches of 8-bit floats with scales, besides those of the activations' dtype.
        mixed_cache: caches of another dtype of 16 or 32 bits than the activations'.
        head_dims: the ones there are kernels for; empty: every multiple of ``head_dim_multiple``.
        most_head_dim: 0: any.
        block_multiple: KV blocks have a multiple of this many tokens.
        deterministic: equal bits for a request whatever else runs and however its prompt is cut.
        capabilities: lowest and highest major compute capability; 0 for the highest: all later ones.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32, *HALVES)
    fp8_cache: bool = True
    mixed_cache: bool = True
    head_dims: tuple[int, ...] = ()
    head_dim_multiple: int = 1
    max_head_dim: int = 0
    block_multiple: int = 1
    windows: bool = True
    soft_cap: bool = True
    sinks: bool = True
    deterministic: bool = True
    capabilities: tuple[int, int] = (0, 0)

    def lacks(self, needs: Needs, capability: tuple[int, int] | None = None) -> list[str]:
        """What is asked for and not there, a phrase for each; empty: it fits.

        Args:
            capability: of the CUDA device; None: there is none, or it does not matter.
        """
        missing = [*self._lacks_device(capability), *self._lacks_sizes(needs), *self._lacks_dtypes(needs)]
        features = {
            "sliding windows": needs.windows and not self.windows,
            "a soft cap on scores (attn_logit_softcapping)": needs.soft_cap and not self.soft_cap,
            "attention sinks": needs.sinks and not self.sinks,
            "equal bits whatever else runs (--deterministic)": needs.deterministic and not self.deterministic,
        }
        return missing + [name for name, is_missing in features.items() if is_missing]

    def _lacks_device(self, capability: tuple[int, int] | None) -> list[str]:
        lowest, highest = self.capabilities
        if capability is None or (lowest <= capability[0] and (not highest or capability[0] <= highest)):
            return []
        last = f" to {highest}.x" if highest else " and later"
        return [f"compute capability {capability[0]}.{capability[1]} (it has {lowest}.x{last * (lowest != highest)})"]

    def _lacks_sizes(self, needs: Needs) -> list[str]:
        missing = []
        dim = needs.head_dim
        if self.head_dims and dim not in self.head_dims:
            missing.append(f"head_dim {dim} (it has {', '.join(map(str, self.head_dims))})")
        elif dim % self.head_dim_multiple or (self.max_head_dim and dim > self.max_head_dim):
            most = f" up to {self.max_head_dim}" if self.max_head_dim else ""
            missing.append(f"head_dim {dim} (it has multiples of {self.head_dim_multiple}{most})")
        for size in needs.block_sizes:
            if size % self.block_multiple:
                missing.append(f"KV blocks of {size} tokens (it has multiples: --block-size {self.block_multiple})")
        return missing

    def _lacks_dtypes(self, needs: Needs) -> list[str]:
        missing = []
        if needs.dtype not in self.dtypes:
            missing.append(f"--dtype {dtype_name(needs.dtype)} (it has {', '.join(map(dtype_name, self.dtypes))})")
        has_cache = self.fp8_cache if needs.kv_dtype in FP8_DTYPES else self.mixed_cache
        if needs.kv_dtype is not needs.dtype and not has_cache:
            missing.append(f"--kv-cache-dtype {dtype_name(needs.kv_dtype)} under {dtype_name(needs.dtype)} activations")
        return missing


def dtype_name(dtype: torch.dtype) -> str:
    """As flags and ``config.json`` write it."""
    return str(dtype).removeprefix("torch.")
