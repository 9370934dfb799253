"""All blocks: which are free, which are held, and which contents can be found again."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from operator import itemgetter

from quire.scheduler_proc.kv.block import FreeKVCacheBlockQueue, KVCacheBlock
from quire.scheduler_proc.kv.block_metrics import SAMPLE_MASK, BlockMetrics
from quire.scheduler_proc.kv.events import KVEventRecorder


class BlockHashToBlockMap:
    """Content hash to the block that holds it; rarely to several (the same prompt computed twice at once).

    Duplicates are kept rather than merged, so that a request's block ids never change. The usual single block is
    stored bare: a dict each would cost more than the block.

    Invariants (``check``): a dict has at least two blocks; ``num_blocks`` counts all.
    """

    def __init__(self) -> None:
        self._found: dict[bytes, KVCacheBlock | dict[int, KVCacheBlock]] = {}
        self.num_blocks = 0

    def get_one_block(self, key: bytes) -> KVCacheBlock | None:
        """A block with this content, the one that was stored first."""
        found = self._found.get(key)
        if found is None or isinstance(found, KVCacheBlock):
            return found
        return next(iter(found.values()))

    def get_cached_blocks(self, keys: Iterable[bytes]) -> list[KVCacheBlock]:
        """A block for each key (the one that was stored first), up to the first key that nothing is known of.

        Neither a block nor a dict of several is ever false, so the pass needs no Python code of its own.
        """
        run = list(takewhile(bool, map(self._found.get, keys)))
        if self.num_blocks == len(self._found):
            return run  # type: ignore[return-value]  # no dict among the values
        return [b if isinstance(b, KVCacheBlock) else next(iter(b.values())) for b in run if b is not None]

    def insert(self, key: bytes, block: KVCacheBlock) -> bool:
        """Whether the key is new."""
        self.num_blocks += 1
        found = self._found.setdefault(key, block)
        if found is block:
            return True
        if isinstance(found, KVCacheBlock):
            self._found[key] = {found.block_id: found, block.block_id: block}
        else:
            found[block.block_id] = block
        return False

    def pop(self, key: bytes, block_id: int) -> KVCacheBlock | None:
        """Forget that ``block_id`` holds ``key``; None when it was not known to."""
        found = self._found.get(key)
        if found is None:
            return None
        if isinstance(found, KVCacheBlock):
            if found.block_id != block_id:
                return None
            del self._found[key]
            self.num_blocks -= 1
            return found
        block = found.pop(block_id, None)
        if block is not None:
            self.num_blocks -= 1
        if len(found) == 1:
            self._found[key] = next(iter(found.values()))
        return block

    def pop_blocks(self, keys: Sequence[bytes], blocks: Sequence[KVCacheBlock]) -> list[bytes]:
        """Forget that these blocks hold these keys, pair by pair; the keys, in order, that no block has any more."""
        found = self._found
        if self.num_blocks == len(found):  # no duplicates: the usual case
            for key in keys:
                del found[key]
            self.num_blocks -= len(keys)
            return list(keys)
        for key, block in zip(keys, blocks, strict=True):
            self.pop(key, block.block_id)
        return [key for key in dict.fromkeys(keys) if key not in found]  # two blocks of one key may go together

    def pop_all(self, key: bytes) -> list[KVCacheBlock]:
        """Forget the key; the blocks that held it."""
        found = self._found.pop(key, {})
        blocks = [found] if isinstance(found, KVCacheBlock) else list(found.values())
        self.num_blocks -= len(blocks)
        return blocks

    def __len__(self) -> int:
        """Keys; ``num_blocks`` may be more."""
        return len(self._found)

    def blocks(self) -> list[tuple[bytes, KVCacheBlock]]:
        """Every (key, block): for checks and resets, O(n)."""
        pairs: list[tuple[bytes, KVCacheBlock]] = []
        for key, found in self._found.items():
            pairs += [(key, b) for b in ([found] if isinstance(found, KVCacheBlock) else found.values())]
        return pairs

    def duplicates(self) -> list[tuple[int, bytes]]:
        """(block id, key) where several blocks have one key: by key, and then in the order in which they are found."""
        if self.num_blocks == len(self._found):
            return []
        several = [(key, found) for key, found in self._found.items() if not isinstance(found, KVCacheBlock)]
        return [(block_id, key) for key, found in sorted(several, key=itemgetter(0)) for block_id in found]

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        pairs = self.blocks()
        assert len(pairs) == self.num_blocks, f"{len(pairs)} blocks cached, {self.num_blocks} counted"
        for key, found in self._found.items():
            blocks = {found.block_id: found} if isinstance(found, KVCacheBlock) else found
            assert len(blocks) > 1 or blocks is not found, f"a dict of {len(blocks)} for {key.hex()}"
            assert all(b.block_id == i for i, b in blocks.items()), f"a wrong id for {key.hex()}"


class BlockPool:
    """Hands blocks out, takes them back, and remembers contents until a block is reused.

    Owns all KVCacheBlock objects, the free queue and the hash map; knows nothing of requests.

    Invariants (``check``): a block is in the free queue exactly when its ref_cnt is 0 and it is not the null block,
    whose ref_cnt stays 0; a block has a hash exactly when the map leads to it.

    Attributes:
        events: told of each content that can newly be found, or not any more; None: they are not wanted.
        now: seconds; the owner sets it once per step, for ``metrics``.
        num_evicted_blocks: contents forgotten, since the start, because their block was needed.
        num_evictable_blocks: free blocks whose content can still be found.
        num_changes: grows whenever a block changes hands, or a content its block: while it stands still, the pool
            answers everything as before.
    """

    def __init__(self, num_blocks: int, enable_caching: bool, events: KVEventRecorder | None = None) -> None:
        """``num_blocks`` counts the null block, which is block 0 and never handed out."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one is the null block), not {num_blocks}")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.events = events
        self.now = 0.0
        self.metrics = BlockMetrics(num_blocks)
        self.num_evicted_blocks = self.num_evictable_blocks = self.num_changes = 0
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.free_block_queue = self._make_queue()
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True

    def _make_queue(self) -> FreeKVCacheBlockQueue:
        return FreeKVCacheBlockQueue(self.blocks)

    def act_for(self, tenant: int) -> None:
        """The next calls are for a request of this tenant. Only a pool that is shared fairly needs it."""

    def count_held_by(self, count_held: Callable[[], Mapping[int, int]]) -> None:
        """How to learn what each tenant's requests hold, for a pool that is shared fairly."""

    def left_by_tenant(self) -> list[tuple[int, int, int]]:
        """What a pool that is shared fairly has to be told to be ``restore``d, besides its contents; else nothing."""
        return []

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now; some of them still hold content that would be lost."""
        return self.free_block_queue.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks, held or free, whose content can be found."""
        return self.cached_block_hash_to_block.num_blocks

    def get_cached_block(self, key: bytes) -> KVCacheBlock | None:
        return self.cached_block_hash_to_block.get_one_block(key)

    def get_cached_blocks(self, keys: Iterable[bytes]) -> list[KVCacheBlock]:
        """A block for each key, up to the first that nothing is known of."""
        return self.cached_block_hash_to_block.get_cached_blocks(keys)

    def get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        """``n`` blocks, each held once; what they cached is forgotten. Raises IndexError when fewer are free."""
        self.num_changes += 1
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
        """Hold each block once more, for its content; a free one leaves the queue. The null block stays as it is."""
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
        self.free_block_queue.remove_n(free)
        self.num_evictable_blocks -= len(free)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Let go of each block once; those that no request holds any more become free, the first one reused first.

        Raises:
            ValueError: a block that was not held; those before it were let go of.
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
                self._put_back(freed)
                raise ValueError(f"{block!r} is freed more often than it was held")
            if not block.block_id & SAMPLE_MASK:
                self.metrics.released(block.block_id, self.now)
        self._put_back(freed)

    def _put_back(self, freed: Sequence[KVCacheBlock]) -> None:
        hashed = [block for block in freed if block.block_hash is not None]
        self.num_evictable_blocks += len(hashed)
        self._line_up(freed, hashed)

    def _line_up(self, freed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        """Where freed blocks stand in line: one without a content that can be found is reused before any that caches.

        The one place that decides it; a pool that is to reuse in another order overrides this.
        """
        self.free_block_queue.append_n(hashed)
        if len(hashed) < len(freed):
            self.free_block_queue.prepend_n([block for block in freed if block.block_hash is None])

    def cache_full_blocks(self, blocks: Sequence[KVCacheBlock], keys: Iterable[bytes]) -> None:
        """From now on each key finds its block, whose content is complete."""
        self.num_changes += 1
        insert = self.cached_block_hash_to_block.insert
        stored: list[bytes] = []
        for block, key in zip(blocks, keys, strict=True):
            if block.block_hash is not None or block.is_null:
                raise ValueError(f"{block!r} cannot take a hash")
            block.block_hash = key
            if insert(key, block):
                stored.append(key)
        if stored and self.events is not None:
            self.events.stored(stored)

    def invalidate(self, key: bytes) -> None:
        """Invalidate this key: the blocks with it may hold wrong content, which must not be found again."""
        self.num_changes += 1
        blocks = self.cached_block_hash_to_block.pop_all(key)
        for block in blocks:
            block.block_hash = None
            self.num_evictable_blocks -= block.ref_cnt == 0
        if blocks and self.events is not None:
            self.events.removed((key,))

    def reset_prefix_cache(self) -> bool:
        """Forget all content. Does nothing and returns False while any block is held."""
        self.num_changes += 1
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        for _, block in self.cached_block_hash_to_block.blocks():
            block.block_hash = None
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.num_evictable_blocks = 0
        if self.events is not None:
            self.events.cleared()
        return True

    def contents(self) -> list[tuple[int, bytes]]:
        """(block id, key) of each content that can be found; of equal keys the block that is found first, first.

        In the order of the blocks, for that of the keys is all over the memory, and five times as slow.
        """
        pairs = [(block.block_id, block.block_hash) for block in self.blocks if block.block_hash is not None]
        if several := self.cached_block_hash_to_block.duplicates():
            ids = {block_id for block_id, _ in several}
            pairs = [pair for pair in pairs if pair[0] not in ids] + several
        return pairs

    def restore(
        self, free: Sequence[int], cached: Sequence[tuple[int, bytes]], tenants: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        """For a pool of which nothing is held: other contents, and another order of reuse.

        Args:
            free: every block but the null block, the next to be reused first.
            cached: (block, key) of each content; of equal keys the block that is to be found first, first.
            tenants: what ``left_by_tenant`` said.

        Raises:
            ValueError: they are no blocks of this pool, or something is held.
        """
        if sorted(free) != list(range(1, self.num_blocks)) or not self.reset_prefix_cache():
            raise ValueError("not every block of the pool is free")
        if (cached and not self.enable_caching) or any(not 0 < block < self.num_blocks for block, _ in cached):
            raise ValueError("contents of blocks that can have none")
        self.free_block_queue.popleft_n(self.num_usable_blocks)
        self._restore_free([self.blocks[block] for block in free], tenants)
        self.cache_full_blocks([self.blocks[block] for block, _ in cached], [key for _, key in cached])
        self.num_evictable_blocks = len(cached)

    def _restore_free(self, free: Sequence[KVCacheBlock], tenants: Sequence[tuple[int, int, int]]) -> None:
        """The queue is empty. Raises ValueError where ``tenants`` cannot be."""
        if tenants:
            raise ValueError("blocks of tenants in a pool that does not know any")
        self.free_block_queue.append_n(free)

    def _evict(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Forget what these blocks cache, for they are needed. A key is gone only with its last block."""
        keys: list[bytes] = []
        for block in blocks:
            assert block.block_hash is not None
            keys.append(block.block_hash)
            block.block_hash = None
            if not block.block_id & SAMPLE_MASK:
                self.metrics.evicted(block.block_id, self.now)
        gone = self.cached_block_hash_to_block.pop_blocks(keys, blocks)
        self.num_evicted_blocks += len(blocks)
        self.num_evictable_blocks -= len(blocks)
        if self.events is not None:
            self.events.removed(gone)

    def check(self, holders: Sequence[Sequence[KVCacheBlock]] | None = None) -> None:
        """Raise AssertionError unless the invariants hold; with ``holders`` also that ref_cnt counts them."""
        self.free_block_queue.check()
        free = {b.block_id for b in self.free_block_queue.blocks()}
        null = self.null_block
        assert null is self.blocks[0] and null.is_null, "the null block is another one"
        assert null.block_id not in free, "the null block is free"
        assert null.ref_cnt == 0 and null.block_hash is None, "the null block is held or cached"
        for index, block in enumerate(self.blocks[1:], 1):
            assert block.block_id == index and not block.is_null, f"{block!r} stands at {index}"
            assert block.ref_cnt >= 0, f"{block!r}: negative ref_cnt"
            assert (block.ref_cnt == 0) == (block.block_id in free), f"{block!r}: free and held do not agree"
        self.cached_block_hash_to_block.check()
        cached = self.cached_block_hash_to_block.blocks()
        for key, block in cached:
            assert block.block_hash == key, f"{block!r} is found under another hash"
        evictable = sum(block.ref_cnt == 0 for _, block in cached)
        assert evictable == self.num_evictable_blocks, f"{evictable} can be evicted, not {self.num_evictable_blocks}"
        assert len(cached) == sum(b.block_hash is not None for b in self.blocks), "a hash leads nowhere"
        if holders is not None:
            counts = [0] * self.num_blocks
            for held in holders:
                for block in held:
                    counts[block.block_id] += 1
            for block in self.blocks[1:]:
                assert block.ref_cnt == counts[block.block_id], f"{block!r} has {counts[block.block_id]} holders"
