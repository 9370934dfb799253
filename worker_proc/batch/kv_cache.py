"""The memory behind the block ids: one tensor per layer of the largest KV group, which the groups' layers share."""

import mmap
from collections.abc import Mapping

import torch

from quire.protocol.model.kv_layout import KVLayout
from quire.worker_proc.attention.backend import AttentionBackend


def allocate_kv_caches(
    layout: KVLayout, num_blocks: int, num_kv_heads: int, backend: AttentionBackend, device: torch.device
) -> Mapping[int, torch.Tensor]:
    """A cache for each layer that has one, by the layer's index; zeroed.

    A block id belongs to one group at a time, so that the first layers of all groups can live in one tensor, the
    second ones in another: a pool holds as many blocks as the largest group alone would have.

    Args:
        num_kv_heads: of this rank.
    """
    dtype: torch.dtype = getattr(torch, layout.dtype)
    caches: dict[int, torch.Tensor] = {}
    by_place: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
    for group in layout.groups:
        shape = backend.kv_cache_shape(num_blocks, group.block_size, num_kv_heads, layout.head_dim)
        for place, layer in enumerate(group.layers):
            if (place, shape) not in by_place:
                # Through bytes: not every device fills 8-bit floats.
                size = torch.Size(shape).numel() * dtype.itemsize
                by_place[place, shape] = _zeros(size, device).view(dtype).view(shape)
            caches[layer] = by_place[place, shape]
    return caches


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    """uint8 ``[size]``. A CPU's comes from the kernel as zeros, page by page when first used.

    To write them would take a second per gigabyte here, and as long again to take them back from a process that died:
    a restart would wait for both.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)
