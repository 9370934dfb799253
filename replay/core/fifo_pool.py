"""A block pool that allocates free blocks strictly in the order in which they were freed, as some other engines do."""

from collections.abc import Sequence

from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool


class FifoBlockPool(BlockPool):
    """Queues freed blocks in order, with or without cached content: a cached block may be evicted before a free one."""

    def _queue_freed(self, freed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        self.free_block_queue.append_n(freed)
