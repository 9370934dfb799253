"""KV cache tensors: one tensor per layer of the largest KV group, which layers of the other groups share."""

import mmap
from collections.abc import Mapping

import torch

from quire.protocol.model.kv_layout import KVLayout
from quire.worker_proc.attention.backend import AttentionBackend


def allocate_kv_caches(
    layout: KVLayout, num_blocks: int, backend: AttentionBackend, device: torch.device
) -> Mapping[int, torch.Tensor]:
    """Allocate zeroed caches for all layers that own one; return them by layer index.

    A block id belongs to one group at a time. So the first layers of all groups share one tensor, the second layers
    another, and so on: the pool has as many blocks as if the largest group were the only one. Block b occupies the same
    bytes in every group that shares a tensor, in any shape; groups whose blocks differ in bytes share none.
    """
    dtype: torch.dtype = getattr(torch, layout.dtype)
    caches: dict[int, torch.Tensor] = {}
    by_place: dict[tuple[int, int], torch.Tensor] = {}
    for group in layout.groups:
        kernels = kernel_block_size(group.block_size, backend)
        ratio = group.block_size // kernels
        _, *shape = backend.kv_cache_shape(num_blocks * ratio, kernels, *layout.kv_shape(group))
        shape = [group.parts, *shape]
        # Allocated as bytes, because not every device can zero 8-bit floats.
        size = torch.Size(shape).numel() * dtype.itemsize
        for place, layer in enumerate(group.layers):
            if (place, size) not in by_place:
                by_place[place, size] = zeroed_bytes(size, device)
            caches[layer] = by_place[place, size].view(dtype).view(shape)
    return caches


def kernel_block_size(block_size: int, backend: AttentionBackend) -> int:
    """Return the backend's block size for the pool's blocks; entries of block tables and caches have this size.

    Raises:
        ValueError: the backend cannot read such blocks (``fit_block_size`` chooses others).
    """
    found = backend.supports.kernel_block_size(block_size)
    if found is None:
        raise ValueError(f"the kernels of {backend.name} cannot read blocks of {block_size} tokens")
    return found


def zeroed_bytes(size: int, device: torch.device) -> torch.Tensor:
    """Return zeros, uint8 ``[size]``. On a CPU the operating system provides zero pages when they are first used.

    Writing zeros would take a second per gigabyte, and freeing the touched pages of a process that died as long again;
    a restart would wait for both.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)  # blocks are read in any order: small pages would need a page walk each
    return torch.frombuffer(pages, dtype=torch.uint8)
