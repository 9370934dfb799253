"""Copies of whole KV blocks within the device: the last block of a forked request, which it writes on."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch

from quire.kernels.cache.block_copy import CacheSet, copy_blocks, copy_blocks_reference


class BlockCopies:
    """Copies blocks in all tensors of the KV cache, whichever KV group has them: ids mean the same in all."""

    def __init__(self, caches: Iterable[torch.Tensor], num_blocks: int, by_slot: torch.Tensor | None = None) -> None:
        """
        Args:
            caches: from ``group_caches``, of all groups.
            num_blocks: size of the pool, the null block included.
            by_slot: what is kept beside the caches, ``[slots, ...]``; None: nothing.
        """
        tensors = {cache.data_ptr(): cache for cache in caches}
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.shape)
        self._sets = [CacheSet.of(list(same)) for _, same in groupby(ordered, key=lambda tensor: tensor.shape)]
        if by_slot is not None:
            self._sets.append(CacheSet.of([by_slot.view(num_blocks, -1)], block_dim=0))

    def run(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy each source block to its target, on the device's current stream."""
        if not copies:
            return
        pairs = torch.tensor(copies, dtype=torch.int64)
        for caches in self._sets:
            copy = copy_blocks if caches.pointers.is_cuda else copy_blocks_reference
            copy(caches, pairs)
