"""A pool that reuses blocks strictly in the order in which they were freed: what some other engines do."""

from collections.abc import Sequence

from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool


class FifoBlockPool(BlockPool):
    """Keeps a freed block without a findable content in line, although one with a content is lost for it meanwhile."""

    def _line_up(self, freed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        self.free_block_queue.append_n(freed)
