"""The scheduler's one door to KV memory."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol

from quire.protocol.model.kv_layout import KVLayout
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.coordinator import GroupBlocks, hash_granularity, make_coordinator

_MANY_TOKENS = 2**31 - 1
"""More positions than any request has: a bound where no group needs more blocks with more positions."""


class CacheRequest(Protocol):
    """What is known here of a request.

    Attributes:
        block_hashes: of its known tokens, in units of ``KVCacheManager.block_size``.
        num_tokens: known tokens.
        num_computed_tokens: positions of every step sent; 0 again once it is preempted.
        num_acknowledged_tokens: positions whose computing was answered, cache hits included; never more than the
            computed ones, and 0 again with them.
        skip_reading_prefix_cache: it must compute everything itself.
        tenant: its tenant; 0: none is known.
    """

    @property
    def handle(self) -> int: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_acknowledged_tokens(self) -> int: ...
    @property
    def skip_reading_prefix_cache(self) -> bool: ...
    @property
    def tenant(self) -> int: ...


class KVCacheManager:
    """Looks up, allocates, caches and frees blocks for requests.

    Owns pool and coordinator; knows requests only as a CacheRequest, and never changes one.

    Attributes:
        block_size: tokens under one hash: the smallest block size of the groups.
        watermark_blocks: blocks that admission should leave free, so that running requests find some.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        enable_caching: bool,
        *,
        watermark: float = 0.0,
        max_step_tokens: int | None = None,
        pipeline_depth: int = 2,
        pool_class: Callable[[int, bool], BlockPool] = BlockPool,
    ) -> None:
        """
        Args:
            watermark: share of the pool.
            max_step_tokens: positions that one step computes of one request at most. With it, window groups count
                only what they hold at a time in ``num_blocks_for`` and ``max_tokens``; without, every position.
            pipeline_depth: steps that can be unanswered at a time, the one being decided included.
            pool_class: makes the pool, which decides in which order free blocks are reused.
        """
        self.layout = layout
        self.block_size = hash_granularity(layout)
        self.pool = pool_class(num_blocks, enable_caching)
        self.coordinator = make_coordinator(layout, self.pool)
        self.watermark_blocks = int(watermark * self.pool.num_usable_blocks)
        self._max_in_flight = None if max_step_tokens is None else max_step_tokens * pipeline_depth
        self._max_tokens = self._longest_request()

    @property
    def max_tokens(self) -> int:
        """Positions that one request alone could have; 2**31 - 1 where no group needs more with more positions."""
        return self._max_tokens

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks, over all groups, that a request of this length holds at worst when it is alone."""
        return sum(manager.num_blocks_for(num_tokens, self._max_in_flight) for manager in self.coordinator.managers)

    def get_computed_blocks(self, request: CacheRequest) -> tuple[GroupBlocks, int]:
        """Cached blocks for the request's prefix, and the tokens in them.

        The last known token is never taken from the cache: it must be computed, for its logits.
        """
        if not self.pool.enable_caching or request.skip_reading_prefix_cache:
            return self.coordinator.no_blocks, 0
        return self.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)

    def can_fit_full_sequence(
        self,
        request: CacheRequest,
        max_total_tokens: int,
        computed: GroupBlocks | None = None,
    ) -> bool:
        """Whether a waiting request could run to ``max_total_tokens`` on what is free now.

        Args:
            computed: its hits, if they are known already.
        """
        hits = self.get_computed_blocks(request)[0] if computed is None else computed
        needed = self.num_blocks_for(max_total_tokens) - self.coordinator.num_shared(hits)
        return needed <= self.pool.num_free_blocks

    def allocate_slots(
        self,
        request: CacheRequest,
        num_new_tokens: int,
        computed: GroupBlocks | None = None,
        num_new_computed_tokens: int = 0,
        *,
        keep_free: int = 0,
    ) -> GroupBlocks | None:
        """Blocks for the next ``num_new_tokens`` positions, after ``computed`` ones from the cache.

        Three phases: how many blocks it takes; whether there are so many; only then anything changes, except that
        blocks which no later token reads are let go of first.

        Args:
            keep_free: blocks that must be free afterwards, if any are taken.

        Returns:
            The new entries per group, or None (and nothing held or found has changed) when the pool has too few.
        """
        coordinator, handle = self.coordinator, request.handle
        num_computed = request.num_computed_tokens + num_new_computed_tokens
        num_tokens = num_computed + num_new_tokens
        hits = coordinator.no_blocks if computed is None else computed
        if not coordinator.begins_block(handle, num_tokens, hits):
            return coordinator.no_blocks
        self.pool.act_for(request.tenant)
        if coordinator.skips:
            acknowledged = request.num_acknowledged_tokens
            assert acknowledged <= num_computed, f"handle {handle}: more acknowledged than computed"
            coordinator.remove_skipped_blocks(handle, acknowledged)
        if coordinator.num_blocks_to_allocate(handle, num_tokens, hits) > self.pool.num_free_blocks - keep_free:
            return None
        if computed is not None:
            coordinator.add_computed_blocks(handle, computed)
        return coordinator.allocate(handle, num_tokens)

    def cache_blocks(self, request: CacheRequest, num_tokens: int) -> None:
        """Make findable what the first ``num_tokens`` positions fill: known tokens whose write is in a step sent."""
        self.coordinator.cache_blocks(request.handle, request.block_hashes, num_tokens)

    def invalidate(self, request: CacheRequest, num_kept_tokens: int) -> None:
        """Invalidate what this request wrote itself, after its first ``num_kept_tokens`` positions.

        Looked up by hash: the blocks of a request that was preempted since are free by now, and can still be found.
        """
        self.coordinator.invalidate(request.block_hashes, num_kept_tokens)

    def free(self, request: CacheRequest) -> None:
        self.pool.act_for(request.tenant)
        self.coordinator.free(request.handle)

    def num_held_blocks(self, request: CacheRequest) -> int:
        return sum(manager.num_held_blocks(request.handle) for manager in self.coordinator.managers)

    def block_ids(self, request: CacheRequest) -> list[list[int]]:
        """Ids of all the request's entries, per group; the null block's id where an entry is skipped."""
        return [[b.block_id for b in blocks] for blocks in self.coordinator.blocks(request.handle)]

    def reset_prefix_cache(self) -> bool:
        """Forget all content. Does nothing and returns False while any block is held."""
        return self.pool.reset_prefix_cache()

    def check(self) -> None:
        """Raise AssertionError unless every block is free or held exactly as often as requests hold it."""
        self.pool.check([held for m in self.coordinator.managers for held in m.req_to_blocks.values()])
        self.coordinator.check()

    def _longest_request(self) -> int:
        lengths = range(_MANY_TOKENS + 1)
        return bisect_right(lengths, self.pool.num_usable_blocks, key=self.num_blocks_for) - 1
