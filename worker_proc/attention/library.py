"""What backends over other people's attention kernels share: our own cache write, and which blocks a row's queries see.

Those libraries attend; head norms, rotation and the cache write stay our kernels, which also write 8-bit caches.
"""

import torch

from quire.kernels.cache.cache_write import write_cache, write_cache_reference
from quire.kernels.cache.fused_cache_write import fused_cache_write, fused_cache_write_reference
from quire.kernels.common.fp8 import FP8_DTYPES
from quire.worker_proc.attention.backend import AttentionSpec, Rotary, StepBatch


def nhd_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Keys and values apart, each as both libraries take pages: a token's heads lie together."""
    return (2, num_blocks, block_size, num_kv_heads, head_dim)


class CacheWriter:
    """From a layer's projection to queries, keys and values in the cache. Owns the scales of fp8 caches.

    On a CPU (tests of a backend whose library is a fake) the kernels' references do the same.
    """

    def __init__(self) -> None:
        self._scales: dict[tuple[float, torch.device], torch.Tensor] = {}

    def prologue(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        spec: AttentionSpec,
        rotary: Rotary | None,
    ) -> torch.Tensor:
        """Head norms, rotation and the cache write of ``AttentionBackend.attend``, in one launch.

        Returns:
            Queries, ``[num_tokens, num_heads, head_dim]``, contiguous.
        """
        launch = fused_cache_write if qkv.is_cuda else fused_cache_write_reference
        has_keys = qkv.shape[1] > spec.num_heads
        query: torch.Tensor = launch(
            qkv,
            spec.num_heads,
            kv_cache if has_keys else None,
            slot_mapping if has_keys else None,
            q_norm=spec.q_norm,
            k_norm=spec.k_norm,
            norm_eps=spec.norm_eps,
            rotary_table=None if rotary is None else rotary.table,
            positions=None if rotary is None else rotary.positions,
            k_scale=self._scale(spec.k_scale, kv_cache) if has_keys else None,
            v_scale=self._scale(spec.v_scale, kv_cache) if has_keys else None,
        )
        return query.contiguous()

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        spec: AttentionSpec,
    ) -> None:
        """The cache write of ``AttentionBackend.forward``."""
        launch = write_cache if key.is_cuda else write_cache_reference
        launch(
            key,
            value,
            kv_cache,
            slot_mapping,
            k_scale=self._scale(spec.k_scale, kv_cache),
            v_scale=self._scale(spec.v_scale, kv_cache),
        )

    def _scale(self, scale: float, kv_cache: torch.Tensor) -> torch.Tensor | None:
        """On the device, where kernels read it; made once: a captured graph must not copy from the host."""
        if kv_cache.dtype not in FP8_DTYPES or scale == 1.0:
            return None
        place = (scale, kv_cache.device)
        if place not in self._scales:
            self._scales[place] = torch.tensor([scale], dtype=torch.float32, device=kv_cache.device)
        return self._scales[place]


def first_visible_block(batch: StepBatch) -> torch.Tensor:
    """int32 ``[num_rows]`` on the device, from lengths on the device: the block of a row's first visible position.

    What lies left of it may be anybody's by now. Attention over the rest is the same as over all: a window and the
    causal mask both count from the row's end.
    """
    if not batch.window:
        return torch.zeros_like(batch.seq_lens)
    starts = batch.query_start_loc
    context = batch.seq_lens - (starts[1:] - starts[:-1])
    return (context - (batch.window - 1)).clamp_(min=0).div_(batch.block_size, rounding_mode="floor")


def refuse_sinks(name: str, spec: AttentionSpec) -> None:
    """Guard against a caller that did not ask ``Supports``: a wrong answer is worse than an error.

    Raises:
        ValueError: the layer has attention sinks, which neither library has.
    """
    if spec.sinks is not None:
        raise ValueError(f"attention backend {name} has no sinks")
