"""One request's blocks over all KV groups: all groups get what they need, or none does."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from quire.protocol.errors import ConfigError
from quire.protocol.kv_layout import KVLayout
from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.single_type import MANAGERS, SingleTypeKVCacheManager

GroupBlocks = Sequence[Sequence[KVCacheBlock]]
"""Blocks per KV group."""


class KVCacheCoordinator(ABC):
    """Fans out to one SingleTypeKVCacheManager per group; how groups agree on a cache hit is the subclass's."""

    def __init__(self, layout: KVLayout, pool: BlockPool) -> None:
        self.pool = pool
        self.managers: list[SingleTypeKVCacheManager] = []
        for group_id, group in enumerate(layout.groups):
            kind = MANAGERS.get(group.kind)
            if kind is None:
                raise ConfigError(
                    f"KV groups of kind {group.kind!r} are not supported; supported: {', '.join(MANAGERS)}"
                )
            self.managers.append(kind(group, group_id, pool))
        self.no_blocks: GroupBlocks = tuple(() for _ in self.managers)

    @abstractmethod
    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_length: int) -> tuple[GroupBlocks, int]:
        """Cached blocks per group, and how many tokens they hold: at most ``max_length``, the same in each group."""

    def num_blocks_to_allocate(self, handle: int, num_tokens: int, computed: GroupBlocks) -> int:
        return sum(m.num_blocks_to_allocate(handle, num_tokens, computed[i]) for i, m in enumerate(self.managers))

    def add_computed_blocks(self, handle: int, computed: GroupBlocks) -> None:
        for manager, blocks in zip(self.managers, computed, strict=True):
            manager.add_computed_blocks(handle, blocks)

    def allocate(self, handle: int, num_tokens: int) -> GroupBlocks:
        return [manager.allocate(handle, num_tokens) for manager in self.managers]

    def cache_blocks(self, handle: int, block_hashes: Sequence[bytes], num_tokens: int) -> None:
        for manager in self.managers:
            manager.cache_blocks(handle, block_hashes, num_tokens)

    def remove_skipped_blocks(self, handle: int, num_computed_tokens: int) -> None:
        for manager in self.managers:
            manager.remove_skipped_blocks(handle, num_computed_tokens)

    def free(self, handle: int) -> None:
        for manager in self.managers:
            manager.free(handle)

    def blocks(self, handle: int) -> GroupBlocks:
        """All blocks that a request holds, per group."""
        return [manager.req_to_blocks.get(handle, ()) for manager in self.managers]


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Any number of groups; nothing is ever found again."""

    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_length: int) -> tuple[GroupBlocks, int]:
        return self.no_blocks, 0

    def cache_blocks(self, handle: int, block_hashes: Sequence[bytes], num_tokens: int) -> None:
        """Nothing is remembered."""


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group: its hit is the hit."""

    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_length: int) -> tuple[GroupBlocks, int]:
        manager = self.managers[0]
        hit = manager.find_longest_cache_hit(block_hashes, max_length)
        return (hit,), len(hit) * manager.block_size


def make_coordinator(layout: KVLayout, pool: BlockPool) -> KVCacheCoordinator:
    """The coordinator for this layout.

    Raises:
        ConfigError: several groups together with prefix caching, which needs groups that agree on hits.
    """
    if not pool.enable_caching:
        return KVCacheCoordinatorNoPrefixCache(layout, pool)
    if len(layout.groups) == 1:
        return UnitaryKVCacheCoordinator(layout, pool)
    raise ConfigError("prefix caching over several KV groups is not supported yet; use --no-enable-prefix-caching")
