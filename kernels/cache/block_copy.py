"""Block copy: copy or zero whole KV blocks in the caches of all layers, as bytes of any dtype.

Copies serve copy-on-write of forked requests and defragmentation; zeroing serves blocks that are allocated again for a
kind of layer that accumulates into its state. One launch covers all layers: a copy of a few blocks takes a few
microseconds, and a launch per layer of eighty layers would take most of a millisecond.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.triton_runtime import require_launchable

TILE_WORDS = 512
"""Words that a program copies: 4 for each of 128 threads."""

WORD_BYTES = (16, 8, 4, 2, 1)


@dataclass(frozen=True)
class CacheSet:
    """Caches of layers with equal shapes, such as those of a KV group.

    Build it once: construction copies to the device and waits. It holds the caches, so that their memory is not freed
    while a launch has the addresses.

    Attributes:
        caches: ``[num_blocks, ..]`` or ``[parts, num_blocks, ..]`` each (keys and values are two parts); the dimensions
            after ``num_blocks`` are contiguous.
        block_dim: 0 or 1, the dimension of blocks.
        pointers: int64 ``[num_caches]`` on the caches' device.
        word_bytes: bytes copied at a time: the largest of ``WORD_BYTES`` that divides a block, its strides and
            addresses.
    """

    caches: tuple[torch.Tensor, ...]
    block_dim: int
    pointers: torch.Tensor
    word_bytes: int

    @classmethod
    def of(cls, caches: Sequence[torch.Tensor], block_dim: int = 1) -> "CacheSet":
        """Describe ``caches``.

        Raises:
            ValueError: no cache, ``block_dim`` is not 0 or 1, the caches differ, or a block is not contiguous.
        """
        if not caches or block_dim not in (0, 1) or caches[0].dim() < block_dim + 2:
            raise ValueError(f"{len(caches)} caches with blocks in dimension {block_dim}")
        first = caches[0]
        for index, cache in enumerate(caches):
            for name in ("shape", "dtype", "device", "stride"):
                own, expected = (getattr(each, name) for each in (cache, first))
                if name == "stride":
                    own, expected = own(), expected()
                if own != expected:
                    raise ValueError(f"caches[{index}]: {name} is {own}, expected {expected} as caches[0]")
        if not first[(0,) * (block_dim + 1)].is_contiguous():
            raise ValueError(f"caches: a block is not contiguous, strides are {first.stride()}")
        sizes = [stride * first.element_size() for stride in first.stride()[: block_dim + 1]]
        sizes += [_block_elements(first, block_dim) * first.element_size(), *(cache.data_ptr() for cache in caches)]
        word_bytes = next(word for word in WORD_BYTES if all(size % word == 0 for size in sizes))
        pointers = torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=first.device)
        return cls(tuple(caches), block_dim, pointers, word_bytes)

    @property
    def num_blocks(self) -> int:
        return self.caches[0].shape[self.block_dim]

    @property
    def num_parts(self) -> int:
        return self.caches[0].shape[0] if self.block_dim else 1

    def words(self) -> tuple[int, int, int]:
        """Return in words: the size of a block in one part, the stride of parts, and the stride of blocks."""
        cache = self.caches[0]
        part_stride = cache.stride(0) if self.block_dim else 0
        elements = _block_elements(cache, self.block_dim)
        to_words = cache.element_size() / self.word_bytes  # a power of two, hence exact
        return int(elements * to_words), int(part_stride * to_words), int(cache.stride(self.block_dim) * to_words)


def _block_elements(cache: torch.Tensor, block_dim: int) -> int:
    return cache.shape[block_dim + 1 :].numel()


def check_copies(pairs: torch.Tensor, num_blocks: int) -> None:
    """Check that the result of copies does not depend on their order.

    Args:
        pairs: int64 ``[num_copies, 2]`` on the host: source and target block ids.

    Raises:
        ValueError: wrong shape or dtype, a block id out of range, a duplicate target, or a target that is also a
            source.
    """
    check_tensor("pairs", pairs, {"num_copies": None, "source and target": 2}, (torch.int64,), torch.device("cpu"))
    check_blocks(pairs[:, 1], num_blocks)
    sources = pairs[:, 0]
    if len(sources) and not 0 <= int(sources.min()) <= int(sources.max()) < num_blocks:
        raise ValueError(f"pairs: source block ids must be between 0 and {num_blocks - 1} ({_span(sources)})")
    if bool(torch.isin(sources, pairs[:, 1]).any()):
        both = next(block for block in pairs[:, 1].tolist() if block in sources.tolist())
        raise ValueError(f"pairs: block {both} is both source and target")


def check_blocks(block_ids: torch.Tensor, num_blocks: int) -> None:
    """Raise ValueError unless ``block_ids`` is int64 ``[n]`` on the host, with valid ids and no duplicates."""
    if block_ids.dim() != 1 or block_ids.dtype != torch.int64 or block_ids.device.type != "cpu":
        got = f"{block_ids.dtype} {tuple(block_ids.shape)} on {block_ids.device}"
        raise ValueError(f"block_ids: {got}, expected int64 [n] on the host")
    if not len(block_ids):
        return
    if not 0 <= int(block_ids.min()) <= int(block_ids.max()) < num_blocks:
        raise ValueError(f"block_ids: target block ids must be between 0 and {num_blocks - 1} ({_span(block_ids)})")
    if len(set(block_ids.tolist())) < len(block_ids):
        ids = block_ids.tolist()
        at = next(at for at, block in enumerate(ids) if block in ids[:at])
        raise ValueError(f"block_ids: block {ids[at]} at index {at} is a duplicate, expected each block once")


def _span(block_ids: torch.Tensor) -> str:
    return f"got {int(block_ids.min())} to {int(block_ids.max())}"


def copy_blocks_reference(caches: CacheSet, pairs: torch.Tensor) -> None:
    """Compute ``copy_blocks`` in plain torch. The two agree exactly.

    Raises:
        ValueError: as ``check_copies``.
    """
    check_copies(pairs, caches.num_blocks)
    for cache in caches.caches:
        sources, targets = pairs.to(cache.device).unbind(1)
        # As bytes: torch has few operators for 8-bit floats.
        as_bytes, dim = cache.view(torch.uint8), caches.block_dim
        as_bytes.index_copy_(dim, targets, as_bytes.index_select(dim, sources))


def zero_blocks_reference(caches: CacheSet, block_ids: torch.Tensor) -> None:
    """Compute ``zero_blocks`` in plain torch. The two agree exactly.

    Raises:
        ValueError: as ``check_blocks``.
    """
    check_blocks(block_ids, caches.num_blocks)
    for cache in caches.caches:
        cache.view(torch.uint8).index_fill_(caches.block_dim, block_ids.to(cache.device), 0)


def copy_blocks(caches: CacheSet, pairs: torch.Tensor) -> None:
    """Copy blocks in every cache, with one launch of the Triton kernel.

    Args:
        pairs: int64 ``[num_copies, 2]`` on the host: source and target block ids. A source may have several targets.

    Raises:
        ValueError: as ``check_copies``.
        RuntimeError: Triton cannot launch in this process.
    """
    check_copies(pairs, caches.num_blocks)
    _launch(caches, pairs)


def zero_blocks(caches: CacheSet, block_ids: torch.Tensor) -> None:
    """Zero blocks in every cache, with one launch of the Triton kernel.

    Args:
        block_ids: int64 ``[num_zeroed]`` on the host.

    Raises:
        ValueError: as ``check_blocks``.
        RuntimeError: Triton cannot launch in this process.
    """
    check_blocks(block_ids, caches.num_blocks)
    _launch(caches, block_ids[:, None])


def launch_constants(columns: int, word_bytes: int) -> dict[str, int]:
    """Return the kernel's compile-time constants (2 columns copy, 1 column zeroes).

    The ahead-of-time compilation test uses them too.
    """
    return {"COLUMNS": columns, "WORD_BYTES": word_bytes, "TILE_WORDS": TILE_WORDS}


def _launch(caches: CacheSet, work: torch.Tensor) -> None:
    device = caches.pointers.device
    kernel = _kernel(device)
    if not len(work):
        return
    # torch's host allocator does not reuse pinned memory before the copy from it has finished.
    work = work.contiguous() if device.type == "cpu" else work.pin_memory().to(device, non_blocking=True)
    words, part_stride, block_stride = caches.words()
    kernel[(len(work), len(caches.caches) * caches.num_parts, -(-words // TILE_WORDS))](
        caches.pointers, work, caches.num_parts, words, part_stride, block_stride,
        **launch_constants(work.shape[1], caches.word_bytes),
    )  # fmt: skip


def _kernel(device: torch.device) -> Any:
    require_launchable(device.type)
    from quire.kernels.cache.block_copy_triton import block_copy_kernel

    return block_copy_kernel
