"""Block copy: whole KV blocks copied or zeroed in the caches of all layers, as bytes whatever their dtype.

Copies are for a fork that is about to write (copy-on-write) and for defragmentation; zeroes for blocks that come back
to a kind of layer that adds to what it finds. One launch for all layers: a copy of a few blocks is a few microseconds
of work, and a launch for each of eighty layers would be most of a millisecond.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.triton_runtime import require_launchable

TILE_WORDS = 1024
"""Words that a program moves; 128 threads then move 8 each."""

WORD_BYTES = (8, 4, 2, 1)


@dataclass(frozen=True)
class CacheSet:
    """The caches of layers whose blocks are alike, such as those of a KV group.

    Built once, for it copies to the device and waits for that. It holds the caches, so that their memory cannot be
    given away while a launch has the addresses.

    Attributes:
        caches: ``[num_blocks, ..]`` or ``[parts, num_blocks, ..]`` each (keys and values are two parts); what lies
            behind ``num_blocks`` is contiguous.
        block_dim: 0 or 1, the dimension of blocks.
        pointers: int64 ``[num_caches]`` beside the caches.
        word_bytes: bytes that are moved at a time: the most that divide a block, its strides and its addresses.
    """

    caches: tuple[torch.Tensor, ...]
    block_dim: int
    pointers: torch.Tensor
    word_bytes: int

    @classmethod
    def of(cls, caches: Sequence[torch.Tensor], block_dim: int = 1) -> "CacheSet":
        """Raises ValueError: no cache, a block dimension other than 0 or 1, caches not alike, a block in pieces."""
        if not caches or block_dim not in (0, 1) or caches[0].dim() < block_dim + 2:
            raise ValueError(f"{len(caches)} caches with blocks in dimension {block_dim}")
        first = caches[0]
        for cache in caches:
            like = (cache.shape, cache.dtype, cache.device, cache.stride())
            if like != (first.shape, first.dtype, first.device, first.stride()):
                raise ValueError(f"caches: {like}, expected {(first.shape, first.dtype, first.device, first.stride())}")
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
        """Words of a block in one part, and from one part and one block to the next."""
        cache = self.caches[0]
        part_stride = cache.stride(0) if self.block_dim else 0
        elements = _block_elements(cache, self.block_dim)
        to_words = cache.element_size() / self.word_bytes  # a power of two, and so exact
        return int(elements * to_words), int(part_stride * to_words), int(cache.stride(self.block_dim) * to_words)


def _block_elements(cache: torch.Tensor, block_dim: int) -> int:
    return cache.shape[block_dim + 1 :].numel()


def check_copies(pairs: torch.Tensor, num_blocks: int) -> None:
    """Refuse copies whose outcome would depend on their order.

    Args:
        pairs: int64 ``[num_copies, 2]`` on the host: source and target block ids.

    Raises:
        ValueError: not such a tensor, an id that is no block, a target twice, or a target that is also a source.
    """
    check_tensor("pairs", pairs, {"num_copies": None, "source and target": 2}, (torch.int64,), torch.device("cpu"))
    check_blocks(pairs[:, 1], num_blocks)
    sources = pairs[:, 0]
    if len(sources) and not 0 <= int(sources.min()) <= int(sources.max()) < num_blocks:
        raise ValueError(f"pairs: a source is not from 0 to {num_blocks - 1}")
    if bool(torch.isin(sources, pairs[:, 1]).any()):
        raise ValueError("pairs: a block is both source and target")


def check_blocks(block_ids: torch.Tensor, num_blocks: int) -> None:
    """Raises ValueError: not int64 ``[n]`` on the host, an id that is no block, or one that comes twice."""
    if block_ids.dim() != 1 or block_ids.dtype != torch.int64 or block_ids.device.type != "cpu":
        got = f"{block_ids.dtype} {tuple(block_ids.shape)} on {block_ids.device}"
        raise ValueError(f"block_ids: {got}, expected int64 [n] on the host")
    if not len(block_ids):
        return
    if not 0 <= int(block_ids.min()) <= int(block_ids.max()) < num_blocks:
        raise ValueError(f"block_ids: a target is not from 0 to {num_blocks - 1}")
    if len(set(block_ids.tolist())) < len(block_ids):
        raise ValueError("block_ids: a block is a target twice")


def copy_blocks_reference(caches: CacheSet, pairs: torch.Tensor) -> None:
    """What ``copy_blocks`` does, in plain torch. The two agree exactly.

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
    """What ``zero_blocks`` does, in plain torch. The two agree exactly.

    Raises:
        ValueError: as ``check_blocks``.
    """
    check_blocks(block_ids, caches.num_blocks)
    for cache in caches.caches:
        cache.view(torch.uint8).index_fill_(caches.block_dim, block_ids.to(cache.device), 0)


def copy_blocks(caches: CacheSet, pairs: torch.Tensor) -> None:
    """Copy blocks in every cache, by one launch of the Triton kernel.

    Args:
        pairs: int64 ``[num_copies, 2]`` on the host: source and target block ids. A source may have several targets.

    Raises:
        ValueError: as ``check_copies``.
        RuntimeError: Triton cannot launch here.
    """
    check_copies(pairs, caches.num_blocks)
    _launch(caches, pairs)


def zero_blocks(caches: CacheSet, block_ids: torch.Tensor) -> None:
    """Zero blocks in every cache, by one launch of the Triton kernel.

    Args:
        block_ids: int64 ``[num_zeroed]`` on the host.

    Raises:
        ValueError: as ``check_blocks``.
        RuntimeError: Triton cannot launch here.
    """
    check_blocks(block_ids, caches.num_blocks)
    _launch(caches, block_ids[:, None])


def launch_constants(columns: int, word_bytes: int) -> dict[str, int]:
    """What the kernel is compiled for: 2 columns copy, 1 zeroes. Shared with the test that compiles it ahead."""
    return {"COLUMNS": columns, "WORD_BYTES": word_bytes, "TILE_WORDS": TILE_WORDS}


def _launch(caches: CacheSet, work: torch.Tensor) -> None:
    device = caches.pointers.device
    kernel = _kernel(device)
    if not len(work):
        return
    # Pinned memory is not handed out again before the copy out of it is done: torch's host allocator sees to that.
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
