"""Code shared by backends that use external attention libraries: the cache write, and the blocks that queries see.

The libraries compute attention only; head norms, rotation and the cache write use Quire's kernels, which also write
8-bit caches.
"""

import torch

from quire.kernels.cache.fused_cache_write import fused_cache_write, fused_cache_write_reference
from quire.worker_proc.attention.backend import AttentionSpec, Rotary, StepBatch
from quire.worker_proc.attention.prologue import cache_write


def nhd_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Return the cache shape of both libraries: keys and values separate, the heads of a token adjacent (NHD)."""
    return (2, num_blocks, block_size, num_kv_heads, head_dim)


def write_cache(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    spec: AttentionSpec,
    rotary: Rotary | None,
) -> torch.Tensor:
    """Apply the head norms, rotation and cache write of ``AttentionBackend.attend`` in one launch.

    On a CPU (tests with a fake library) it uses the kernel's reference.

    Returns:
        The queries, ``[num_tokens, num_heads, head_dim]``, contiguous.
    """
    launch = fused_cache_write if qkv.is_cuda else fused_cache_write_reference
    query: torch.Tensor = launch(cache_write(qkv, kv_cache, slot_mapping, spec, rotary))
    return query.contiguous()


def first_visible_block(batch: StepBatch) -> torch.Tensor:
    """Return the index of the block with each row's first visible position, int32 ``[num_rows]``, from device lengths.

    Blocks left of it may belong to other rows. Attention without them gives the same result, because the window and the
    causal mask both count from the row's end.
    """
    if not batch.window:
        return torch.zeros_like(batch.seq_lens)
    starts = batch.query_start_loc
    context = batch.seq_lens - (starts[1:] - starts[:-1])
    return (context - (batch.window - 1)).clamp_(min=0).div_(batch.block_size, rounding_mode="floor")


def refuse_sinks(name: str, spec: AttentionSpec) -> None:
    """Raise ValueError if the layer has attention sinks, which neither library supports.

    ``Supports`` rejects such models at start; this guards against callers that skipped it.
    """
    if spec.sinks is not None:
        raise ValueError(f"attention backend {name} does not support sinks")
