"""The block pool: reference counts, the free queue, and the cached contents."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from quire.scheduler_proc.kv.block import FreeKVCacheBlockQueue, KVCacheBlock
from quire.scheduler_proc.kv.block_map import BlockHashToBlockMap
from quire.scheduler_proc.kv.block_metrics import SAMPLE_MASK, BlockMetrics
from quire.scheduler_proc.kv.events import KVEventRecorder
from quire.scheduler_proc.kv.pinned_queue import PinnedFreeQueue
from quire.scheduler_proc.kv.releases import Releases


class BlockPool:
    """Allocates and frees blocks, and keeps cached contents until their block is reused.

    Owns all KVCacheBlock objects, the free queue and the hash map. Does not know requests.

    Invariants (``check``): a block is in the free queue exactly when its ref_cnt is 0 and it is not the null block. The
    null block's ref_cnt stays 0. A block has a hash exactly when the map contains it.

    Attributes:
        events: records each key that was added to or removed from the map, or None.
        medium: where the blocks are, in these events.
        now: seconds; the owner sets it once per step, for ``metrics``.
        num_evicted_blocks: contents evicted since the start.
        num_evictable_blocks: free blocks whose content can still be found.
        num_revived_blocks: free blocks that cache hits have taken from the free queue since the start.
        num_changes: grows with each allocation, release and change of cached contents. While it is unchanged, the pool
            gives the same answers.
        is_fair: whether the order of reuse depends on the accounts for which blocks were freed.
        releases: with pins, the releases in the free queue; otherwise None.
    """

    is_fair: ClassVar[bool] = False

    def __init__(
        self,
        num_blocks: int,
        enable_caching: bool,
        events: KVEventRecorder | None = None,
        medium: str = "device",
        has_pins: bool = False,
    ) -> None:
        """
        Args:
            num_blocks: includes the null block, which is block 0 and never allocated.
            has_pins: whether contents can be pinned; otherwise pins are ignored.
        """
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2, one of which is the null block (got {num_blocks})")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.events, self.medium = events, medium
        self.now = 0.0
        self.releases = Releases(num_blocks) if has_pins else None
        self.metrics = BlockMetrics(num_blocks)
        self.num_evicted_blocks = self.num_evictable_blocks = self.num_revived_blocks = self.num_changes = 0
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.free_block_queue = self._make_queue()
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        # The null block is the entry of a table where nothing may be read: left of a window, and where a block was
        # given back. It is block 0, so that tables which begin as zeros name it.
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True

    def _make_queue(self) -> FreeKVCacheBlockQueue:
        return self._make_line(self.blocks)

    def _make_line(self, blocks: Sequence[KVCacheBlock]) -> FreeKVCacheBlockQueue:
        """Return a queue of blocks among which only use and pins decide."""
        return FreeKVCacheBlockQueue(blocks) if self.releases is None else PinnedFreeQueue(blocks, self.releases)

    def act_for(self, account: int) -> None:
        """Set the account of the request for which the next calls are made. Used only by FairBlockPool."""

    def owner_of(self, block: KVCacheBlock) -> int:
        """Return the account to which a free cached block belongs; 0 unless this is a FairBlockPool."""
        return 0

    def begin_release(self, pin: int) -> None:
        """Set the pin, or 0, of the blocks that are freed until ``end_release``."""
        if self.releases is not None:
            self.releases.begin(pin)

    def end_release(self) -> None:
        if self.releases is not None:
            self.releases.end()

    def unpin(self, pin: int) -> None:
        """Let contents be evicted as if they had not been pinned. A pin that does not exist is ignored. O(releases)."""
        if self.releases is None:
            return
        self.num_changes += 1
        for freed in self.releases.unpin(pin):
            if freed.line is not None and freed.line.unpinned is not None:
                freed.line.unpinned.add(freed)

    @property
    def pins(self) -> Mapping[int, int]:
        """Number of free blocks that each pin still has."""
        return {} if self.releases is None else self.releases.pins

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now. Some of them hold cached content that would be evicted."""
        return self.free_block_queue.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks, held or free, whose content can be found."""
        return self.cached_block_hash_to_block.num_blocks

    def get_cached_block(self, key: bytes) -> KVCacheBlock | None:
        return self.cached_block_hash_to_block.get_one_block(key)

    def get_cached_blocks(self, keys: Iterable[bytes]) -> list[KVCacheBlock]:
        """Return one block per key, up to the first unknown key."""
        return self.cached_block_hash_to_block.get_cached_blocks(keys)

    def find_blocks(self, keys: Iterable[bytes]) -> list[KVCacheBlock | None]:
        """Return one block per key, or None."""
        return self.cached_block_hash_to_block.find_blocks(keys)

    def get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        """Allocate ``n`` blocks with ref_cnt 1 and evict their content. Raises IndexError when fewer are free."""
        self.num_changes += 1
        # The queue raises before it changes anything if too few blocks are free; the loops below cannot fail. So an
        # allocation either happens or leaves the pool as it was.
        taken = self.free_block_queue.popleft_n(n)
        evicted = [block for block in taken if block.block_hash is not None]
        if evicted:
            self._evict(evicted)
        for block in taken:
            block.ref_cnt = 1
            if not block.block_id & SAMPLE_MASK:
                self.metrics.allocated(block.block_id, self.now)
        return taken

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Increment each block's ref_cnt for a cache hit; free blocks leave the queue. The null block is skipped."""
        self.num_changes += 1
        free: list[KVCacheBlock] = []
        for block in blocks:
            if block.ref_cnt == 0:
                if block.is_null:
                    continue
                free.append(block)
            block.ref_cnt += 1
            if not block.block_id & SAMPLE_MASK:
                self.metrics.hit(block.block_id, self.now)
        # Collected and removed at once, because a queue with pins or accounts looks up a run of blocks cheaper than
        # each of them.
        self.free_block_queue.remove_n(free)
        self.num_evictable_blocks -= len(free)
        self.num_revived_blocks += len(free)

    def share(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add an owner of blocks that a request holds; none of them is the null block."""
        self.num_changes += 1
        for block in blocks:
            block.ref_cnt += 1

    def next_evicted(self) -> Iterator[KVCacheBlock]:
        """Yield free blocks with cached content, approximately in the order in which they will be evicted."""
        return (block for block in self.free_block_queue.upcoming() if block.block_hash is not None)

    def begin_copy(self, blocks: Sequence[KVCacheBlock]) -> Any:
        """Hold free cached blocks while their content is copied elsewhere. Returns an argument of ``end_copy``."""
        self.num_changes += 1
        # A source must not be reused while it is copied. Holding it as a hit would move it to the end of the queue, so
        # that storing a content would also protect it from eviction on the device; its place is remembered instead.
        places = self.free_block_queue.take_out(blocks)
        self.num_evictable_blocks -= len(blocks)
        for block in blocks:
            block.ref_cnt += 1
        return places

    def end_copy(self, blocks: Sequence[KVCacheBlock], places: Any) -> None:
        """Release copied blocks. Those that nothing else holds are reused when they would be without the copy."""
        self.num_changes += 1
        for block in blocks:
            block.ref_cnt -= 1
            self.num_evictable_blocks += block.ref_cnt == 0 and block.block_hash is not None
        # After the loop: the queue looks at ref_cnt to see which blocks a request has taken meanwhile.
        self.free_block_queue.put_back(blocks, places)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Decrement each block's ref_cnt. Blocks that reach 0 become free; the first in the list is reused first.

        Raises:
            ValueError: a block was not held. The blocks before it are released.
        """
        self.num_changes += 1
        freed: list[KVCacheBlock] = []
        for block in ordered_blocks:
            if block.ref_cnt == 1:
                block.ref_cnt = 0
                freed.append(block)
            elif block.ref_cnt > 1:
                block.ref_cnt -= 1
            elif block.is_null:
                continue
            else:
                self._return_freed(freed)
                raise ValueError(f"{block!r} is freed but not held")
            if not block.block_id & SAMPLE_MASK:
                self.metrics.released(block.block_id, self.now)
        self._return_freed(freed)

    def _return_freed(self, freed: Sequence[KVCacheBlock]) -> None:
        # Blocks without content go to the front even if they were used last: evicting a content while an empty block is
        # free would lose a hit for nothing.
        hashed = [block for block in freed if block.block_hash is not None]
        self.num_evictable_blocks += len(hashed)
        self._queue_freed(freed, hashed)

    def _queue_freed(self, freed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        """Put freed blocks into the queue: blocks without cached content in front, so that they are reused first.

        The only place that decides the order of reuse; a pool with another order overrides it.
        """
        self.free_block_queue.append_n(hashed)
        if len(hashed) < len(freed):
            self.free_block_queue.prepend_n([block for block in freed if block.block_hash is None])

    def cache_full_blocks(self, blocks: Sequence[KVCacheBlock], keys: Iterable[bytes]) -> None:
        """Make each block findable by its key. Its content must be complete."""
        self.num_changes += 1
        wanted = list(keys)
        for block, key in zip(blocks, wanted, strict=True):
            if block.block_hash is not None or block.is_null:
                raise ValueError(f"{block!r} cannot be cached: it is the null block or already has a hash")
            block.block_hash = key
        stored = self.cached_block_hash_to_block.insert_blocks(wanted, blocks)
        if stored and self.events is not None:
            self.events.stored(stored, self.medium)

    def evict_first(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Let free blocks be reused before all others, although they have contents; others are ignored."""
        self.num_changes += 1
        free = [block for block in blocks if block.ref_cnt == 0]
        self.free_block_queue.remove_n(free)
        self.free_block_queue.prepend_n(free)

    def invalidate(self, key: bytes) -> list[KVCacheBlock]:
        """Remove this key: its blocks may hold wrong content, which must not be found again. Returns the blocks."""
        self.num_changes += 1
        blocks = self.cached_block_hash_to_block.pop_all(key)
        for block in blocks:
            block.block_hash = None
            self.num_evictable_blocks -= block.ref_cnt == 0
            # The queue with pins finds the block by its release, and those have contents only. The plain queue may keep
            # the block where it is: it is reused a little later than it could be, which costs nothing.
            if self.releases is not None and block.ref_cnt == 0:  # a release has only blocks with a content
                self.free_block_queue.remove_n((block,))
                self.free_block_queue.prepend_n((block,))
        if blocks and self.events is not None:
            self.events.removed((key,), self.medium)
        return blocks

    def reset_prefix_cache(self) -> bool:
        """Drop all cached contents. Does nothing and returns False while any block is held."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        self.drop_contents()
        return True

    def drop_contents(self) -> None:
        """Drop all cached contents, also those of held blocks."""
        self.num_changes += 1
        for _, block in self.cached_block_hash_to_block.blocks():
            block.block_hash = None
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.num_evictable_blocks = 0
        if self.releases is not None:
            self._forget_contents()
        if self.events is not None:
            self.events.cleared(self.medium)

    def _forget_contents(self) -> None:
        """Let the free queue know that no block has a content."""
        assert isinstance(self.free_block_queue, PinnedFreeQueue)
        self.free_block_queue.forget_contents()

    def _evict(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Remove the keys of blocks that are being allocated. A key is reported as removed with its last block."""
        keys = [block.block_hash for block in blocks if block.block_hash is not None]
        for block in blocks:
            block.block_hash = None
            if not block.block_id & SAMPLE_MASK:
                self.metrics.evicted(block.block_id, self.now)
        # One call for all blocks of an allocation. Listeners of KV events are told of a key only when its last block is
        # gone, since any copy of the content can still be hit.
        removed = self.cached_block_hash_to_block.pop_blocks(keys, blocks)
        self.num_evicted_blocks += len(blocks)
        self.num_evictable_blocks -= len(blocks)
        if self.events is not None:
            self.events.removed(removed, self.medium)

    def check(self, holders: Sequence[Sequence[KVCacheBlock]] | None = None) -> None:
        """Raise AssertionError unless the invariants hold; with ``holders``, ref_cnt must also equal their number."""
        self.free_block_queue.check()
        free = {b.block_id for b in self.free_block_queue.blocks()}
        null = self.null_block
        assert null is self.blocks[0] and null.is_null, "null_block is not block 0"
        assert null.block_id not in free, "the null block is free"
        assert null.ref_cnt == 0 and null.block_hash is None, "the null block is held or cached"
        for index, block in enumerate(self.blocks[1:], 1):
            assert block.block_id == index and not block.is_null, f"{block!r} is at index {index}"
            assert block.ref_cnt >= 0, f"{block!r}: negative ref_cnt"
            assert (block.ref_cnt == 0) == (block.block_id in free), f"{block!r}: ref_cnt and the free queue disagree"
        if self.releases is not None:
            self.releases.check()
        self.cached_block_hash_to_block.check()
        cached = self.cached_block_hash_to_block.blocks()
        for key, block in cached:
            assert block.block_hash == key, f"{block!r} is stored under another hash"
        evictable = sum(block.ref_cnt == 0 for _, block in cached)
        assert evictable == self.num_evictable_blocks, (
            f"{evictable} blocks evictable, {self.num_evictable_blocks} counted"
        )
        assert len(cached) == sum(b.block_hash is not None for b in self.blocks), "a block's hash is not in the map"
        if holders is not None:
            counts = [0] * self.num_blocks
            for held in holders:
                for block in held:
                    counts[block.block_id] += 1
            for block in self.blocks[1:]:
                assert block.ref_cnt == counts[block.block_id], f"{block!r} has {counts[block.block_id]} holders"
