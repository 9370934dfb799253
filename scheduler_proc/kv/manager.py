"""The scheduler's one door to KV memory."""

from quire.protocol.kv_layout import KVLayout
from quire.scheduler_proc.kv.block_hash import group_key
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.coordinator import GroupBlocks, make_coordinator
from quire.scheduler_proc.request import Request


class KVCacheManager:
    """Looks up, allocates, caches and frees blocks for requests.

    Owns pool and coordinator; knows requests only as handle, hashes and counts, and never changes one.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, enable_caching: bool) -> None:
        self.layout = layout
        self.pool = BlockPool(num_blocks, enable_caching)
        self.coordinator = make_coordinator(layout, self.pool)
        self.block_size = layout.groups[0].block_size

    @property
    def max_tokens(self) -> int:
        """Positions that one request alone could have."""
        return self.pool.num_usable_blocks // len(self.layout.groups) * self.block_size

    def get_computed_blocks(self, request: Request) -> tuple[GroupBlocks, int]:
        """Cached blocks for the request's prefix, and the tokens in them.

        The last known token is never taken from the cache: it must be computed, for its logits.
        """
        return self.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        computed: GroupBlocks | None = None,
        num_new_computed_tokens: int = 0,
    ) -> GroupBlocks | None:
        """Blocks for the next ``num_new_tokens`` positions, after ``computed`` ones from the cache.

        Three phases: how many blocks it takes; whether there are so many; only then anything changes.

        Returns:
            The new blocks per group, or None (and nothing changed) when the pool has too few.
        """
        handle = request.handle
        num_computed = request.num_computed_tokens + num_new_computed_tokens
        num_tokens = num_computed + num_new_tokens
        self.coordinator.remove_skipped_blocks(handle, num_computed)
        hits = self.coordinator.no_blocks if computed is None else computed
        if self.coordinator.num_blocks_to_allocate(handle, num_tokens, hits) > self.pool.num_free_blocks:
            return None
        if computed is not None:
            self.coordinator.add_computed_blocks(handle, computed)
        return self.coordinator.allocate(handle, num_tokens)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make findable what the first ``num_tokens`` positions fill: known tokens whose write is in a step sent."""
        self.coordinator.cache_blocks(request.handle, request.block_hashes, num_tokens)

    def forget_content(self, request: Request, num_kept_tokens: int) -> None:
        """Nobody may find what this request wrote itself, after its first ``num_kept_tokens`` positions.

        Looked up by hash: the blocks of a request that was preempted since are free by now, and can still be found.
        """
        for index, group in enumerate(self.layout.groups):
            for block_hash in request.block_hashes[num_kept_tokens // group.block_size :]:
                self.pool.forget_content(group_key(block_hash, index))

    def free(self, request: Request) -> None:
        self.coordinator.free(request.handle)

    def block_ids(self, request: Request) -> list[list[int]]:
        """Ids of all blocks that the request holds, per group."""
        return [[b.block_id for b in blocks] for blocks in self.coordinator.blocks(request.handle)]

    def reset_prefix_cache(self) -> bool:
        return self.pool.reset_prefix_cache()

    def check(self) -> None:
        """Raise AssertionError unless every block is free or held exactly as often as requests hold it."""
        self.pool.check([held for m in self.coordinator.managers for held in m.req_to_blocks.values()])
        for manager in self.coordinator.managers:
            for handle, held in manager.req_to_blocks.items():
                assert manager.num_cached_block.get(handle, 0) <= len(held), f"handle {handle}: cached beyond held"
