"""A block pool that allocates free blocks strictly in the order in which they were freed, as some other engines do."""

from collections.abc import Sequence

from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool


class FifoBlockPool(BlockPool):
    """Queues freed blocks without cached content last, so that cached blocks may be evicted before them."""

    def _line_up(self, freed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        self.free_block_queue.append_n(freed)
