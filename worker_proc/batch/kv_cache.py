"""KV cache tensors, which the layers of all KV groups share."""

import mmap
from collections.abc import Mapping

import torch

from quire.protocol.model.kv_layout import DTYPE_BYTES, KVLayout
from quire.worker_proc.attention.backend import AttentionBackend


def allocate_kv_caches(
    layout: KVLayout, num_blocks: int, backend: AttentionBackend, device: torch.device
) -> Mapping[int, torch.Tensor]:
    """Allocate zeroed caches for all layers that own one; return them by layer index.

    A block id belongs to one group at a time. So the first layers of all groups share one tensor, the second layers
    another, and so on: the pool has as many blocks as if the largest group were the only one. If entries differ in
    size, all layers share one tensor instead (``KVLayout.is_packed``). Either way block b has the same bytes in every
    group.
    """
    if not layout.groups:
        return {}
    dtype: torch.dtype = getattr(torch, layout.dtype)
    kernels = kernel_block_size(layout.block_size, backend)
    num_kernel_blocks = num_blocks * (layout.block_size // kernels)
    caches: dict[int, torch.Tensor] = {}
    tensors: list[torch.Tensor] = []
    if layout.is_packed:
        tensors.append(zeroed_bytes(num_blocks * layout.block_bytes, device).view(dtype))
    for group in layout.groups:
        _, *block_shape = backend.kv_cache_shape(num_kernel_blocks, kernels, *layout.kv_shape(group))
        shape = torch.Size((group.parts, *block_shape))
        for place, layer in enumerate(group.layers):
            if layout.is_packed:
                stride, size = kernels * layout.packed_width, shape[2:].numel()
                within = shape[3] * shape[4], shape[4], 1
                strides = (num_kernel_blocks * stride, stride, *within)
                caches[layer] = tensors[0].as_strided(shape, strides, place * size)
                continue
            if place == len(tensors):
                # Allocated as bytes, because not every device can zero 8-bit floats.
                tensors.append(zeroed_bytes(shape.numel() * dtype.itemsize, device).view(dtype))
            caches[layer] = tensors[place].view(shape)
    return caches


def group_caches(layout: KVLayout, caches: Mapping[int, torch.Tensor], num_blocks: int) -> list[list[torch.Tensor]]:
    """Return the tensors in which each group's blocks lie, uint8 ``[parts, num_blocks, bytes]``.

    Args:
        caches: from ``allocate_kv_caches`` for this layout and number of blocks.
    """
    found = []
    for group in layout.groups:
        layers = group.layers[:1] if layout.is_packed else group.layers
        parts = layout.parts if layout.is_packed else group.parts
        width = layout.group_bytes(group) // (parts * len(layers) * DTYPE_BYTES[layout.dtype])
        shape, strides = (parts, num_blocks, width), (num_blocks * width, width, 1)
        found.append([caches[layer].as_strided(shape, strides).view(torch.uint8) for layer in layers])
    return found


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
