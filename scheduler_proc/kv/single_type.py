"""Blocks of one KV group, by the rules of its kind of attention."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from quire.protocol.kv_layout import KVGroup
from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.block_hash import group_key
from quire.scheduler_proc.kv.block_pool import BlockPool


class SingleTypeKVCacheManager(ABC):
    """Which blocks each request holds in one group, in the order of its positions.

    Owns ``req_to_blocks`` (by handle) and how many of them are cached under a hash; the blocks belong to the pool.
    A request's list only grows, until it is freed whole.
    """

    def __init__(self, group: KVGroup, group_id: int, pool: BlockPool) -> None:
        self.block_size = group.block_size
        self.group_id = group_id
        self.pool = pool
        self.req_to_blocks: dict[int, list[KVCacheBlock]] = {}
        self.num_cached_block: dict[int, int] = {}

    def num_blocks_to_allocate(self, handle: int, num_tokens: int, computed: Sequence[KVCacheBlock]) -> int:
        """Free blocks that ``num_tokens`` positions would use up, hits that lie in the free queue included."""
        required = -(-num_tokens // self.block_size)
        new = required - len(computed) - len(self.req_to_blocks.get(handle, ()))
        return max(new, 0) + sum(b.ref_cnt == 0 and not b.is_null for b in computed)

    def add_computed_blocks(self, handle: int, computed: Sequence[KVCacheBlock]) -> None:
        """Begin a request with blocks that the prefix cache found."""
        assert handle not in self.req_to_blocks, "cache hits come before anything else"
        self.pool.touch(computed)
        self.req_to_blocks[handle] = list(computed)
        self.num_cached_block[handle] = len(computed)

    def allocate(self, handle: int, num_tokens: int) -> list[KVCacheBlock]:
        """New blocks so that positions up to ``num_tokens`` have a slot; the caller made sure there are enough."""
        held = self.req_to_blocks.setdefault(handle, [])
        missing = -(-num_tokens // self.block_size) - len(held)
        if missing <= 0:
            return []
        new = self.pool.get_new_blocks(missing)
        held += new
        return new

    def cache_blocks(self, handle: int, block_hashes: Sequence[bytes], num_tokens: int) -> None:
        """Make the blocks that ``num_tokens`` known and written positions fill findable."""
        cached = self.num_cached_block.get(handle, 0)
        full = min(num_tokens // self.block_size, len(block_hashes))
        if full <= cached:
            return
        held = self.req_to_blocks[handle]
        for index in range(cached, full):
            if not held[index].is_null:
                self.pool.cache_full_block(held[index], group_key(block_hashes[index], self.group_id))
        self.num_cached_block[handle] = full

    def free(self, handle: int) -> None:
        """Let go of all blocks; the last ones are reused first, for prefixes are what others share."""
        self.pool.free_blocks(reversed(self.req_to_blocks.pop(handle, [])))
        self.num_cached_block.pop(handle, None)

    @abstractmethod
    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_length: int) -> list[KVCacheBlock]:
        """Cached blocks of the longest usable prefix of at most ``max_length`` tokens."""

    @abstractmethod
    def remove_skipped_blocks(self, handle: int, num_computed_tokens: int) -> None:
        """Free blocks that no later token will read, leaving the null block in their place."""


class FullAttentionManager(SingleTypeKVCacheManager):
    """Every token attends to all before it: hits run from the left, and nothing is ever skipped."""

    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_length: int) -> list[KVCacheBlock]:
        hit: list[KVCacheBlock] = []
        for index in range(min(max_length // self.block_size, len(block_hashes))):
            block = self.pool.get_cached_block(group_key(block_hashes[index], self.group_id))
            if block is None:
                break
            hit.append(block)
        return hit

    def remove_skipped_blocks(self, handle: int, num_computed_tokens: int) -> None:
        """Full attention skips nothing."""


MANAGERS: dict[str, type[SingleTypeKVCacheManager]] = {"full_attention": FullAttentionManager}
