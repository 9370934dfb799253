"""One more block for each of many decoding requests: the same as asking for each of them, in one go."""

from collections.abc import Sequence

from quire.protocol.model.kv_layout import KVLayout
from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.requests.request import Request


class SteadyBlocks:
    """The short way through the ladder while there is one group of full attention and blocks enough.

    Owns nothing: pool, tables and hashes stay with their owners. ``begin`` and ``cache`` do what ``allocate_slots``
    for one position and ``cache_blocks`` would do for requests whose next position opens a block.
    """

    def __init__(self, layout: KVLayout, kv: KVCacheManager) -> None:
        self._pool = kv.pool
        self._table = kv.coordinator.managers[0]
        self._applies = [group.kind for group in layout.groups] == ["full_attention"]

    def can_begin(self, count: int) -> bool:
        return self._applies and count <= self._pool.num_free_blocks

    def room(self, request: Request) -> int:
        """Positions after its computed ones that its blocks have; 0 where blocks are of several groups.

        A block and more where it was given some for drafts that came to nothing.
        """
        if not self._applies:
            return 0
        return len(self._table.req_to_blocks[request.handle]) * self._table.block_size - request.num_computed_tokens

    def begin(self, requests: Sequence[Request]) -> list[int]:
        """A block for each, in order; returns their ids."""
        held = self._table.req_to_blocks
        ids = []
        for request, block in zip(requests, self._pool.get_new_blocks(len(requests)), strict=True):
            held[request.handle].append(block)
            ids.append(block.block_id)
        return ids

    def cache(self, requests: Sequence[Request]) -> None:
        """What they filled before the block just begun becomes findable."""
        if not requests or not self._pool.enable_caching:
            return
        held, cached = self._table.req_to_blocks, self._table.num_cached_block
        full_blocks: list[KVCacheBlock] = []
        keys: list[bytes] = []
        for request in requests:
            handle = request.handle
            blocks, hashes = held[handle], request.tokens.block_hashes
            full = min(len(blocks), len(hashes))  # a block of one token is full as soon as it is begun
            for index in range(cached.get(handle, 0), full):  # one, mostly
                full_blocks.append(blocks[index])
                keys.append(hashes[index])
            cached[handle] = full
        self._pool.cache_full_blocks(full_blocks, keys)
