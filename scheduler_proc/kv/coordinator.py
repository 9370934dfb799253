"""The blocks of one request over all KV groups: allocation succeeds for all groups or for none."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import islice

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import KVLayout
from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.events import FilledRequest
from quire.scheduler_proc.kv.single_type import Contents, FullAttentionManager, SingleTypeKVCacheManager, num_free
from quire.scheduler_proc.kv.states import StateSlots
from quire.scheduler_proc.kv.windowed import ChunkedLocalManager, SlidingWindowManager

GroupBlocks = Sequence[Sequence[KVCacheBlock]]
"""Blocks per KV group."""

MANAGERS: dict[str, type[SingleTypeKVCacheManager]] = {
    "full_attention": FullAttentionManager,
    "latent_attention": FullAttentionManager,
    "sliding_window": SlidingWindowManager,
    "chunked_local": ChunkedLocalManager,
}


def require_equal_blocks(layout: KVLayout) -> None:
    """Raise ConfigError unless the blocks of all groups have the same number of tokens, at least 1.

    ``kv_layout`` makes no others, but a recorded trace may have them.
    """
    sizes = sorted({group.block_size for group in layout.groups})
    if len(sizes) > 1 or (sizes and sizes[0] < 1):
        raise ConfigError(
            f"block_size of all KV groups must be equal and at least 1 (got {', '.join(map(str, sizes))})"
        )


def check_layout_fits(config: EngineConfig, layout: KVLayout) -> None:
    """Raise ConfigError if a model that keeps no KV is to generate tokens, or to compute a part of a prompt."""
    if layout.groups:
        return
    if config.model.generates:
        raise ConfigError("a model without a KV cache cannot generate tokens")
    if config.enable_chunked_prefill or config.long_prefill_token_threshold:
        raise ConfigError(
            "a model without a KV cache computes whole prompts: it needs enable_chunked_prefill False and "
            f"long_prefill_token_threshold 0 (got {config.enable_chunked_prefill}, "
            f"{config.long_prefill_token_threshold})"
        )
    if config.max_num_batched_tokens < config.max_model_len:
        raise ConfigError(
            "a model without a KV cache computes whole prompts: max_num_batched_tokens must be at least "
            f"max_model_len, which is {config.max_model_len} (got {config.max_num_batched_tokens})"
        )


class KVCacheCoordinator(ABC):
    """Delegates to one SingleTypeKVCacheManager per group. Subclasses define how the groups agree on a cache hit.

    Attributes:
        alignment: tokens; the length of each hit is a multiple of it: the block size, or the grid of states.
        skips: whether some group frees blocks while a request runs.
    """

    def __init__(self, layout: KVLayout, pool: BlockPool) -> None:
        self.pool = pool
        self.managers: list[SingleTypeKVCacheManager] = []
        require_equal_blocks(layout)
        for group_id, group in enumerate(layout.groups):
            kind = MANAGERS.get(group.kind)
            if kind is None:
                raise ConfigError(f"KV group kind {group.kind!r} is not supported; supported: {', '.join(MANAGERS)}")
            self.managers.append(kind(group, group_id, pool))
        self.no_blocks: GroupBlocks = tuple(() for _ in self.managers)
        self.alignment = layout.state_grid or layout.block_size
        self.skips = any(m.skips for m in self.managers)

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_length: int, contents: Contents
    ) -> tuple[GroupBlocks, int]:
        """Return the blocks in ``contents`` per group and their number of tokens, at most ``max_length``.

        Every group's blocks hold the same number of tokens.
        """

    def needs_blocks(self, handle: int, num_tokens: int, computed: GroupBlocks) -> bool:
        for manager, blocks in zip(self.managers, computed, strict=True):
            if manager.needs_blocks(handle, num_tokens, len(blocks)):
                return True
        return False

    def num_blocks_to_allocate(self, handle: int, num_tokens: int, computed: GroupBlocks) -> int:
        total = 0
        for manager, blocks in zip(self.managers, computed, strict=True):
            total += manager.num_blocks_to_allocate(handle, num_tokens, blocks)
        return total

    def add_computed_blocks(self, handle: int, computed: GroupBlocks) -> None:
        for manager, blocks in zip(self.managers, computed, strict=True):
            manager.add_computed_blocks(handle, blocks)

    def allocate(self, handle: int, num_tokens: int) -> GroupBlocks:
        """Allocate blocks so that each of ``num_tokens`` positions has a slot. Enough blocks must be free."""
        # All groups are counted before any allocates, in one call to the pool: an allocation for some groups only would
        # have to be undone, with evictions that cannot be.
        missing = [manager.num_missing_blocks(handle, num_tokens) for manager in self.managers]
        new = iter(self.pool.get_new_blocks(sum(missing)))
        pairs = zip(self.managers, missing, strict=True)
        return [manager.append(handle, list(islice(new, count))) for manager, count in pairs]

    def cache_blocks(self, request: FilledRequest, num_tokens: int) -> None:
        """Cache the first ``num_tokens`` positions, as far as each group's blocks are full."""
        for manager in self.managers:
            manager.cache_blocks(request, num_tokens)

    def remove_skipped_blocks(self, handle: int, num_acknowledged_tokens: int) -> None:
        for manager in self.managers:
            manager.remove_skipped_blocks(handle, num_acknowledged_tokens)

    def invalidate(self, block_hashes: Sequence[bytes], num_kept_tokens: int, pool: BlockPool) -> None:
        for manager in self.managers:
            manager.invalidate(block_hashes, num_kept_tokens, pool)

    def free(self, handle: int) -> None:
        for manager in self.managers:
            manager.free(handle)

    def blocks(self, handle: int) -> GroupBlocks:
        """Return all entries of a request per group, null ones included."""
        return [manager.req_to_blocks.get(handle, ()) for manager in self.managers]

    def num_shared(self, computed: GroupBlocks) -> int:
        """Return the number of hit blocks that need no free block while the request runs.

        Other requests hold them, and their group frees no blocks while a request runs.
        """
        pairs = zip(self.managers, computed, strict=True)
        # Blocks of a window do not count, although others hold them now: the window frees them while the request runs,
        # and its later blocks are new ones.
        return sum(len(blocks) - num_free(blocks) for manager, blocks in pairs if not manager.skips)

    def check(self) -> None:
        for manager in self.managers:
            manager.check()


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Any number of groups, also none, without a prefix cache."""

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_length: int, contents: Contents
    ) -> tuple[GroupBlocks, int]:
        return self.no_blocks, 0

    def cache_blocks(self, request: FilledRequest, num_tokens: int) -> None:
        """Cache nothing."""


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """A single group: its hit is the result."""

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_length: int, contents: Contents
    ) -> tuple[GroupBlocks, int]:
        manager = self.managers[0]
        hit = manager.find_longest_cache_hit(block_hashes, max_length, contents)
        return (hit,), len(hit) * manager.block_size


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Several groups: each accepts the candidate length or shortens it, until all accept the same length.

    Each group returns its longest hit within the candidate, so no common length is skipped, and the first length that
    all accept is the longest. Slots of states accept the positions of their checkpoints.
    """

    def __init__(self, layout: KVLayout, pool: BlockPool, states: StateSlots | None = None) -> None:
        super().__init__(layout, pool)
        self._states = states
        # Full attention first: one pass finds its hit, later rounds only cut it, and it bounds the other groups'
        # search.
        self._order = sorted(range(len(self.managers)), key=lambda index: not self.managers[index].is_prefix_closed)

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_length: int, contents: Contents
    ) -> tuple[GroupBlocks, int]:
        hits: list[list[KVCacheBlock] | None] = [None] * len(self.managers)
        # A fixed point: the length only falls, so it ends after at most one round per block, and usually after two.
        # Intersecting the sets of lengths of all groups would look at every block of every group.
        length = max_length // self.alignment * self.alignment
        states = self._states
        if states is not None:
            states.offered = 0
        while length > 0:
            candidate = length
            for index in self._order:
                length = self._shorten(hits, index, block_hashes, length, contents)
            length = length // self.alignment * self.alignment
            if states is not None:
                states.offered = max(states.offered, length)  # of the first round: later ones are shorter
                length = states.longest(block_hashes, length, None if contents is self.pool else contents)
            if length == candidate:
                return tuple(hit or [] for hit in hits), length
        return self.no_blocks, 0

    def _shorten(
        self,
        hits: list[list[KVCacheBlock] | None],
        index: int,
        block_hashes: Sequence[bytes],
        length: int,
        contents: Contents,
    ) -> int:
        """Store the group's longest hit within ``length`` in ``hits``. Returns its length."""
        manager, known = self.managers[index], hits[index]
        num_blocks = length // manager.block_size
        # Any prefix of a hit under full attention is a hit, so cutting the list is enough. Under a window it is not: a
        # shorter length needs other blocks, which must be searched.
        if known is None or (len(known) > num_blocks and not manager.is_prefix_closed):
            known = manager.find_longest_cache_hit(block_hashes, length, contents)
        hits[index] = known = known[:num_blocks]
        return len(known) * manager.block_size


def make_coordinator(layout: KVLayout, pool: BlockPool, states: StateSlots | None = None) -> KVCacheCoordinator:
    """Return the coordinator for this layout.

    Raises:
        ConfigError: unsupported group kind, window or block sizes.
    """
    if not pool.enable_caching:
        return KVCacheCoordinatorNoPrefixCache(layout, pool)
    if len(layout.groups) == 1 and states is None:
        return UnitaryKVCacheCoordinator(layout, pool)
    return HybridKVCacheCoordinator(layout, pool, states)
