"""The interface of the KV cache for the scheduler."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import numpy as np

from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.arrays import Int32
from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.cache_request import CacheRequest
from quire.scheduler_proc.kv.coordinator import GroupBlocks, make_coordinator
from quire.scheduler_proc.kv.forks import BlockForks
from quire.scheduler_proc.kv.holds import Holds
from quire.scheduler_proc.kv.states import StateSlots
from quire.scheduler_proc.kv.tiers import AnyTier, DiskTier, Tier, host_tier

_BLOCK_ID = attrgetter("block_id")
_MANY_TOKENS = 2**31 - 1
"""Upper bound for a request's positions, when no group needs more blocks for more positions."""


class KVCacheManager:
    """Looks up, allocates, caches and frees the blocks of requests.

    Owns the pool and the coordinator. Knows requests only as CacheRequest, and never changes one.

    Attributes:
        block_size: tokens per block and per hash; 1 without groups.
        holds: blocks that copies and waiting requests hold.
        forks: requests that share the blocks of others.
        states: the slots of recurrent states, or None.
        tiers: the books of host memory and of the disk, in this order, if configured.
        disk: the books of the disk, or None.
        watermark_blocks: blocks that admission should leave free for the growth of running requests.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        enable_caching: bool,
        *,
        watermark: float = 0.0,
        max_step_tokens: int = _MANY_TOKENS,
        min_step_tokens: int = _MANY_TOKENS,
        pipeline_depth: int = 2,
        pool_class: Callable[[int, bool], BlockPool] = BlockPool,
        num_host_pages: int = 0,
        num_disk_pages: int = 0,
        forgotten: int = 0,
        num_slots: int = 0,
    ) -> None:
        """
        Args:
            watermark: fraction of the pool.
            max_step_tokens: most positions of one request in one step. With it, ``num_blocks_for`` and ``max_tokens``
                count only the blocks that window groups hold at a time; without it, every position.
            min_step_tokens: the least to which ``step_tokens`` may lower it for one request; it stays by default.
            pipeline_depth: most steps without a result at a time, including the one being scheduled.
            pool_class: makes the pool, which decides the reuse order of free blocks.
            num_host_pages, num_disk_pages: pages of host memory and on disk, page 0 of each included; 0 without.
            forgotten: as in DiskTier.
            num_slots: slots of recurrent states, slot 0 included; not read for models without.
        """
        self.layout = layout
        self.block_size = layout.block_size
        self.pool = pool_class(num_blocks, enable_caching and bool(layout.groups))
        self.states: StateSlots | None = None
        if layout.states:
            takes_chunks = min_step_tokens < max_step_tokens
            self.states = StateSlots(layout, num_slots, enable_caching, takes_chunks=takes_chunks)
        self.coordinator = make_coordinator(layout, self.pool, self.states)
        self.holds = Holds(self.pool)
        self.forks = BlockForks(self.coordinator, self.pool)
        self.disk: DiskTier | None = None
        self.tiers: list[Tier] = []
        if num_host_pages:
            self.tiers.append(host_tier(num_host_pages, self.pool.events, is_fair=self.pool.is_fair))
        if num_disk_pages:
            self.disk = DiskTier(num_disk_pages, num_host_pages, forgotten, self.pool.events)
            self.tiers.append(self.disk)
        self.watermark_blocks = int(watermark * self.pool.num_usable_blocks)
        self._most, self._least = max_step_tokens, min(min_step_tokens, max_step_tokens)
        self._depth = pipeline_depth
        self._max_tokens = self._longest_request()

    @property
    def max_tokens(self) -> int:
        """Most positions of one request when it is alone; 2**31 - 1 when the number of its blocks is bounded."""
        return self._max_tokens

    @property
    def num_slots(self) -> int:
        """Slots of recurrent states, slot 0 included; 0 for models without."""
        return 0 if self.states is None else self.states.pool.num_blocks

    @property
    def can_split(self) -> bool:
        """Whether a cached prefix may come from two sources: with one group, which keeps all blocks, and no states."""
        return self.states is None and [group.keeps_all for group in self.layout.groups] == [True]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the most blocks over all groups that a request of this length holds at any time when it is alone."""
        return self._num_blocks(num_tokens, self.step_tokens(num_tokens))

    def step_tokens(self, num_tokens: int) -> int:
        """Return the most positions of one step of a prefill of this length: those with which it fits when it is alone.

        A window group keeps the positions in flight besides those that the window reaches, so smaller chunks need fewer
        blocks. Full attention keeps every position with chunks of any size.
        """
        usable = self.pool.num_usable_blocks
        if not self.coordinator.skips:
            return self._most
        # The last chunk is still in flight when the first tokens after the prompt need their blocks.
        end = max(num_tokens, min(num_tokens + self._depth, self._max_tokens))
        if self._num_blocks(end, self._most) <= usable:
            return self._most
        # Searched, not computed: the number of blocks of a chunk depends on every group's window and block size, and it
        # grows with the chunk, which is all that a bisection needs.
        larger = range(self._least + 1, self._most)
        return self._least + bisect_right(larger, usable, key=lambda chunk: self._num_blocks(end, chunk))

    def get_computed_blocks(self, request: CacheRequest) -> tuple[GroupBlocks, int]:
        """Return the cached blocks of the request's prefix, and the tokens in them.

        The last known token is never taken from the cache: it must be computed for its logits.
        """
        if not self.pool.enable_caching or request.skip_reading_prefix_cache:
            return self.coordinator.no_blocks, 0
        # Always the longest hit, not only as much as pays off: a step computes what follows the hit anyway, and blocks
        # that are shared cost no memory.
        return self.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1, self.pool)

    def find_in_all_tiers(self, request: CacheRequest) -> tuple[GroupBlocks, int]:
        """As ``get_computed_blocks``, with pages of other tiers for what the device does not have."""
        # The device is looked up apart (``get_computed_blocks``), so that an engine whose tiers are empty pays nothing
        # here.
        pools = [tier.pages for tier in self.tiers if tier.pages.num_cached_blocks]
        if not pools or request.skip_reading_prefix_cache:
            return self.coordinator.no_blocks, 0
        contents = AnyTier([self.pool, *pools])
        return self.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1, contents)

    def find_state(self, request: CacheRequest, position: int) -> tuple[KVCacheBlock | None, Sequence[bytes]]:
        """Return the slot with the state at the end of a prefix that all tiers have, or None and the keys of its pages.

        Neither for models without states.
        """
        if self.states is None or not position:
            return None, ()
        key = self.states.key(request.block_hashes, position)
        slot = self.states.pool.get_cached_block(key)
        return slot, list(self.states.page_keys(key)) if slot is None else ()

    def find_pages(self, keys: Sequence[bytes]) -> list[tuple[Tier, KVCacheBlock]]:
        """Return the first page with each content, up to a content that no tier has."""
        pages = AnyTier([tier.pages for tier in self.tiers]).get_cached_blocks(keys)
        return [(tier, page) for page in pages if (tier := self.tier_of(page)) is not None]

    def tier_of(self, block: KVCacheBlock) -> Tier | None:
        """Return the tier of which this is a page, or None for a block of the device."""
        for tier in self.tiers:
            if tier.owns(block):
                return tier
        return None

    def can_fit_full_sequence(
        self,
        request: CacheRequest,
        max_total_tokens: int,
        computed: GroupBlocks | None = None,
        *,
        keep_free: int = 0,
    ) -> bool:
        """Return whether the free blocks suffice for a waiting request to reach ``max_total_tokens``.

        Args:
            computed: its cache hits, when already looked up.
            keep_free: blocks that must remain free.
        """
        hits = self.get_computed_blocks(request)[0] if computed is None else computed
        needed = self.num_blocks_for(max_total_tokens)
        if self.coordinator.skips:  # the large chunks of a short prompt can need more than the small ones of a long one
            needed = max(needed, self.num_blocks_for(request.num_tokens))
        needed -= self.coordinator.num_shared(hits)
        return needed <= self.pool.num_free_blocks - keep_free and self._has_slot(request.handle)

    def allocate_slots(
        self,
        request: CacheRequest,
        num_new_tokens: int,
        computed: GroupBlocks | None = None,
        num_new_computed_tokens: int = 0,
        *,
        keep_free: int = 0,
    ) -> GroupBlocks | None:
        """Allocate blocks for the next ``num_new_tokens`` positions, after the hits in ``computed``.

        Counts the blocks needed, compares them with the free blocks, and only then changes state. The exception: blocks
        that no later token reads are freed first.

        Args:
            keep_free: blocks that must remain free, when any are allocated.

        Returns:
            The new entries per group; or None when too few blocks are free, with holders and cached contents unchanged.
        """
        coordinator, handle = self.coordinator, request.handle
        num_computed = request.num_computed_tokens + num_new_computed_tokens
        num_tokens = num_computed + num_new_tokens
        hits = coordinator.no_blocks if computed is None else computed
        if not coordinator.needs_blocks(handle, num_tokens, hits):
            return coordinator.no_blocks
        self.act_for(request)
        if coordinator.skips:
            acknowledged = request.num_acknowledged_tokens
            assert acknowledged <= num_computed, (
                f"handle {handle}: {acknowledged} tokens acknowledged, {num_computed} computed"
            )
            # Before counting: the blocks that the window has passed may be just those that the request needs. By the
            # acknowledged position, not the planned one: a step in flight may still be rolled back, and its tokens
            # would then read these blocks again.
            coordinator.remove_skipped_blocks(handle, acknowledged)
        if coordinator.num_blocks_to_allocate(handle, num_tokens, hits) > self.pool.num_free_blocks - keep_free:
            return None
        if not self._has_slot(handle):
            return None
        if computed is not None:
            # Hits are held before new blocks are taken. In the other order the allocation could evict the very blocks
            # that were found.
            coordinator.add_computed_blocks(handle, computed)
            if self.states is not None:
                self.states.begin(request, num_computed)
        return coordinator.allocate(handle, num_tokens)

    def _has_slot(self, handle: int) -> bool:
        return self.states is None or self.states.has_room(handle)

    def can_fork(self, parent: CacheRequest, num_shared_tokens: int, *, is_written: bool) -> bool:
        """Return whether the parent has all that a token after its first ``num_shared_tokens`` reads.

        ``is_written``: as of ``BlockForks.fork``.
        """
        # A state that has gone on cannot be cut back.
        if self.states is not None and is_written and parent.num_computed_tokens != num_shared_tokens:
            return False
        return self.forks.can_fork(parent.handle, num_shared_tokens)

    def awaits_copy(self, handle: int) -> bool:
        """Whether a request has no complete contents before the next step, because they are copied from its parent."""
        return handle in self.forks or (self.states is not None and self.states.awaits_copy(handle))

    def fork(
        self, parent: CacheRequest, child: CacheRequest, num_shared_tokens: int, keep_free: int, *, is_written: bool
    ) -> bool:
        """Give a child its parent's blocks, and room for one more position. Arguments as of ``BlockForks.fork``."""
        # First, so that the child's share of the parent's blocks is findable too: only full blocks with a hash may have
        # two owners without a copy.
        self.cache_blocks(parent, num_shared_tokens)
        if not self._has_slot(child.handle):
            return False
        self.act_for(child)
        has_forked = self.forks.fork(
            parent.handle, child.handle, num_shared_tokens, num_shared_tokens + 1, keep_free, is_written=is_written
        )
        if has_forked and self.states is not None:
            self.states.fork(parent.handle, child.handle, is_written=is_written)
        return has_forked

    def cache_blocks(self, request: CacheRequest, num_tokens: int) -> None:
        """Cache the blocks that the first ``num_tokens`` positions fill: known tokens whose write is in a sent step."""
        self.coordinator.cache_blocks(request, num_tokens)
        if self.states is not None:
            self.states.keep(request)

    def cache_loaded(self, request: CacheRequest | None, blocks: Sequence[KVCacheBlock], keys: Sequence[bytes]) -> None:
        """Make blocks findable that were loaded from a tier. ``request``: the one that waits for them, or None."""
        if request is not None and self.pool.events is not None and self.pool.events.describes:
            self.pool.events.describe_keys(request, keys)
        self.pool.cache_full_blocks(blocks, keys)

    def invalidate(self, request: CacheRequest, num_kept_tokens: int) -> None:
        """Invalidate the contents that this request wrote after its first ``num_kept_tokens`` positions.

        Blocks are found by hash, because a request that was preempted in the meantime has freed them, but they stay
        cached.
        """
        self.coordinator.invalidate(request.block_hashes, num_kept_tokens, self.pool)
        for tier in self.tiers:
            self.coordinator.invalidate(request.block_hashes, num_kept_tokens, tier.pages)
        if self.states is not None:
            self.states.invalidate(request, num_kept_tokens, [tier.pages for tier in self.tiers])

    def act_for(self, request: CacheRequest) -> None:
        """Count what is allocated and freed next for the request's account."""
        self.pool.act_for(request.account)
        if self.states is not None:
            self.states.pool.act_for(request.account)

    def free(self, request: CacheRequest, pin: int = 0) -> None:
        """Free all blocks of a request.

        Args:
            pin: number under which the contents that become free are pinned: they are evicted after all others. They
                join those that it has already. 0 pins nothing.
        """
        self.act_for(request)
        # A pending copy to the request is dropped with it: its target is about to be free.
        self.forks.forget(request.handle)
        self.pool.begin_release(pin)
        self.coordinator.free(request.handle)
        self.pool.end_release()
        if self.states is not None:
            self.states.free(request)

    def unpin(self, pin: int) -> None:
        """Let what is left of a pin be evicted as if it had not been pinned. Unknown numbers are ignored."""
        self.pool.unpin(pin)

    @property
    def pins(self) -> Mapping[int, int]:
        """Number of blocks that each pin still has in the free queue, by its number. O(pins)."""
        return self.pool.pins

    def num_held_blocks(self, request: CacheRequest) -> int:
        return sum(manager.num_held_blocks(request.handle) for manager in self.coordinator.managers)

    def num_shared_tokens(self, request: CacheRequest) -> int:
        """Return how many tokens at the beginning of a running request are in blocks that others hold too. O(log n)."""
        manager = next((m for m in self.coordinator.managers if m.is_prefix_closed), None)
        if manager is None or not self.pool.enable_caching:
            return 0
        blocks = manager.req_to_blocks[request.handle]
        return manager.block_size * bisect_left(blocks, True, key=lambda block: block.ref_cnt == 1)

    def block_ids(self, request: CacheRequest, like: Sequence[Int32] = (), num_tokens: int = 0) -> list[Int32]:
        """Return the ids of all entries per group; 0, the null block, where an entry is skipped.

        ``like``: the result for another request that shares its first ``num_tokens``, or empty.
        """
        found: list[Int32] = []
        for index, manager in enumerate(self.coordinator.managers):
            blocks, known = manager.req_to_blocks.get(request.handle, []), num_tokens // manager.block_size
            ids = np.fromiter(map(_BLOCK_ID, blocks[known:] if known else blocks), np.int32, len(blocks) - known)
            found.append(np.concatenate((like[index][:known], ids)) if known else ids)
        return found

    def drop_device_contents(self) -> None:
        """Drop the device's cached contents, which were lost. Raises AssertionError while a request holds blocks."""
        # The contents died with the workers. Requests must have been preempted before: a block that is still held would
        # count as computed in memory that is gone.
        assert not any(manager.req_to_blocks for manager in self.coordinator.managers), "a request holds blocks"
        self.pool.drop_contents()
        if self.states is not None:
            self.states.drop_contents()

    def open_host(self, is_open: bool) -> None:
        """Let contents be stored in host memory, or not."""
        for tier in self.tiers:
            if tier is not self.disk:
                tier.is_open = is_open

    def reset_prefix_cache(self) -> bool:
        """Drop all cached contents of all tiers. Does nothing and returns False while a request holds a block."""
        if any(manager.req_to_blocks for manager in self.coordinator.managers):
            return False
        self.pool.drop_contents()
        for tier in self.tiers:
            tier.pages.drop_contents()
        if self.states is not None:
            self.states.drop_contents()
        return True

    def check(self) -> None:
        """Raise AssertionError unless the ref_cnt of each block is the number of its holders."""
        held = [held for m in self.coordinator.managers for held in m.req_to_blocks.values()]
        # Every holder must be listed here: one that is missing shows as a count that is too high, a stale one as a
        # count that is too low.
        self.pool.check([*held, *self.holds.holders(), *self.forks.holders()])
        self.coordinator.check()
        self.forks.check()
        for tier in self.tiers:
            tier.pages.check()
        if self.states is not None:
            self.states.check()

    def _longest_request(self) -> int:
        lengths = range(_MANY_TOKENS + 1)
        return bisect_right(lengths, self.pool.num_usable_blocks, key=lambda n: self._num_blocks(n, self._least)) - 1

    def _num_blocks(self, num_tokens: int, step_tokens: int) -> int:
        in_flight = step_tokens * self._depth
        return sum(manager.num_blocks_for(num_tokens, in_flight) for manager in self.coordinator.managers)
