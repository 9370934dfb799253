"""Block allocation for steady decode: one block for each of many requests in one call."""

from collections.abc import Sequence

from quire.protocol.model.kv_layout import KVLayout
from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.requests.request import Request


class SteadyBlockAllocator:
    """Fast path of block allocation, for layouts with one KV group of full attention and while enough blocks are free.

    Owns nothing: pool, tables and hashes stay with their owners. ``allocate`` and ``cache`` have the same effect as
    ``allocate_slots`` for one position and ``cache_blocks``, for requests whose next position starts a block.
    """

    def __init__(self, layout: KVLayout, kv: KVCacheManager) -> None:
        self._pool = kv.pool
        self._table = kv.coordinator.managers[0]
        self._applies = [group.kind for group in layout.groups] == ["full_attention"]

    def can_allocate(self, count: int) -> bool:
        return self._applies and count <= self._pool.num_free_blocks

    def room(self, request: Request) -> int:
        """Return the number of positions left in the request's blocks; 0 for layouts without the fast path.

        It can exceed one block, after allocations for drafts that were rejected.
        """
        if not self._applies:
            return 0
        return len(self._table.req_to_blocks[request.handle]) * self._table.block_size - request.num_computed_tokens

    def allocate(self, requests: Sequence[Request]) -> list[int]:
        """Allocate one block for each request, in order, and return the block ids."""
        held = self._table.req_to_blocks
        ids = []
        for request, block in zip(requests, self._pool.get_new_blocks(len(requests)), strict=True):
            held[request.handle].append(block)
            ids.append(block.block_id)
        return ids

    def cache(self, requests: Sequence[Request]) -> None:
        """Publish the hashes of the blocks that were filled before the newly allocated ones."""
        if not requests or not self._pool.enable_caching:
            return
        held, cached = self._table.req_to_blocks, self._table.num_cached_block
        full_blocks: list[KVCacheBlock] = []
        keys: list[bytes] = []
        for request in requests:
            handle = request.handle
            blocks, hashes = held[handle], request.tokens.block_hashes
            full = min(len(blocks), len(hashes))  # with block size 1, the new block is full already
            for index in range(cached.get(handle, 0), full):  # usually one block
                full_blocks.append(blocks[index])
                keys.append(hashes[index])
            cached[handle] = full
        self._pool.cache_full_blocks(full_blocks, keys)
