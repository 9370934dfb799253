"""Block staging: gather whole KV blocks of all layers of a KV group into one buffer, or scatter them from it.

A copy between the device and the host is fast only for long runs of memory, and a block has a short one in each layer.
So blocks are copied through a buffer on the device, whose lines each hold a block. One launch covers all layers.
"""

import torch

from quire.kernels.cache.block_copy import TILE_WORDS, CacheSet
from quire.kernels.common.checks import check_tensor
from quire.kernels.common.triton_runtime import require_launchable


def bytes_of_block(caches: CacheSet) -> int:
    """Return the bytes of a block in all parts of all caches."""
    return len(caches.caches) * caches.num_parts * caches.words()[0] * caches.word_bytes


def gather_blocks_reference(caches: CacheSet, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy blocks to lines like ``gather_blocks``, with torch.

    Raises:
        ValueError: as ``check_staging``, or an id is not smaller than the number of blocks.
    """
    check_staging(caches, block_ids, staging)
    for line, block in _valid(caches, block_ids):
        parts = [part.contiguous().view(-1).view(torch.uint8) for part in _parts(caches, block)]
        torch.cat(parts, out=staging[line])


def scatter_blocks_reference(caches: CacheSet, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy lines to blocks like ``scatter_blocks``, with torch.

    Raises:
        ValueError: as ``gather_blocks_reference``.
    """
    check_staging(caches, block_ids, staging)
    for line, block in _valid(caches, block_ids):
        parts = _parts(caches, block)
        for part, data in zip(parts, staging[line].chunk(len(parts)), strict=True):
            part.copy_(data.clone().view(part.dtype).view(part.shape))


def _valid(caches: CacheSet, block_ids: torch.Tensor) -> list[tuple[int, int]]:
    """Return lines and blocks, without the lines that are left out."""
    ids = block_ids.tolist()
    if ids and max(ids) >= caches.num_blocks:
        raise ValueError(f"block_ids: ids must be below {caches.num_blocks} (largest is {max(ids)})")
    return [(line, block) for line, block in enumerate(ids) if block >= 0]


def _parts(caches: CacheSet, block: int) -> list[torch.Tensor]:
    if caches.block_dim == 0:
        return [cache[block] for cache in caches.caches]
    return [half[block] for cache in caches.caches for half in cache]


def gather_blocks(caches: CacheSet, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy blocks to lines of ``staging``, with one launch of the Triton kernel on the current stream.

    A line has the parts of a block in order: those of the first cache, then those of the next one.

    Args:
        block_ids: int64 ``[num_lines]`` on the caches' device. Negative: the line is left out. An id that is too large
            leaves its line out too, because nothing is read on the host.
        staging: uint8 ``[num_lines, bytes_of_block]``, contiguous.

    Raises:
        ValueError: as ``check_staging``.
        RuntimeError: Triton cannot launch in this process.
    """
    _launch(caches, block_ids, staging, into_blocks=False)


def scatter_blocks(caches: CacheSet, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy lines of ``staging`` to blocks: the reverse of ``gather_blocks``, with the same arguments and errors.

    No block may occur twice.
    """
    _launch(caches, block_ids, staging, into_blocks=True)


def check_staging(caches: CacheSet, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Raise ValueError unless the tensors have the shapes, dtypes and places that ``gather_blocks`` names."""
    device = caches.pointers.device
    check_tensor("block_ids", block_ids, {"num_lines": None}, (torch.int64,), device)
    dims = {"num_lines": len(block_ids), "bytes_of_block": bytes_of_block(caches)}
    check_tensor("staging", staging, dims, (torch.uint8,), device)
    if not staging.is_contiguous() or staging.data_ptr() % caches.word_bytes:
        raise ValueError(f"staging: must be contiguous, at a multiple of {caches.word_bytes} bytes")


def launch_constants(into_blocks: bool, word_bytes: int) -> dict[str, int]:
    """Return the kernel's compile-time constants. The ahead-of-time compilation test uses them too."""
    return {"INTO_BLOCKS": into_blocks, "WORD_BYTES": word_bytes, "TILE_WORDS": TILE_WORDS}


def _launch(caches: CacheSet, block_ids: torch.Tensor, staging: torch.Tensor, *, into_blocks: bool) -> None:
    check_staging(caches, block_ids, staging)
    require_launchable(block_ids.device.type)
    from quire.kernels.cache.block_staging_triton import block_staging_kernel

    if not len(block_ids):
        return
    words, part_stride, block_stride = caches.words()
    block_staging_kernel[(len(block_ids), len(caches.caches) * caches.num_parts, -(-words // TILE_WORDS))](
        caches.pointers, block_ids, staging, caches.num_parts, caches.num_blocks, words, part_stride, block_stride,
        **launch_constants(into_blocks, caches.word_bytes),
    )  # fmt: skip
