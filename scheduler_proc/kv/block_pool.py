"""All blocks: which are free, which are held, and which contents can be found again."""

from collections.abc import Iterable, Sequence

from quire.scheduler_proc.kv.block import FreeKVCacheBlockQueue, KVCacheBlock


class BlockHashToBlockMap:
    """Content hash to the block that holds it; rarely to several (the same prompt computed twice at once).

    Duplicates are kept rather than merged, so that a request's block ids never change. The usual single block is
    stored bare: a dict each would cost more than the block.
    """

    def __init__(self) -> None:
        self._found: dict[bytes, KVCacheBlock | dict[int, KVCacheBlock]] = {}

    def get_one_block(self, key: bytes) -> KVCacheBlock | None:
        """A block with this content, the one that was stored first."""
        found = self._found.get(key)
        if found is None or isinstance(found, KVCacheBlock):
            return found
        return next(iter(found.values()))

    def insert(self, key: bytes, block: KVCacheBlock) -> None:
        found = self._found.get(key)
        if found is None:
            self._found[key] = block
        elif isinstance(found, KVCacheBlock):
            self._found[key] = {found.block_id: found, block.block_id: block}
        else:
            found[block.block_id] = block

    def pop(self, key: bytes, block_id: int) -> KVCacheBlock | None:
        """Forget that ``block_id`` holds ``key``; None when it was not known to."""
        found = self._found.get(key)
        if isinstance(found, KVCacheBlock):
            return self._found.pop(key) if found.block_id == block_id else None  # type: ignore[return-value]
        if found is None:
            return None
        block = found.pop(block_id, None)
        if not found:
            del self._found[key]
        return block

    def __len__(self) -> int:
        return len(self._found)

    def blocks(self) -> list[tuple[bytes, KVCacheBlock]]:
        """Every (key, block): for checks, O(n)."""
        pairs: list[tuple[bytes, KVCacheBlock]] = []
        for key, found in self._found.items():
            pairs += [(key, b) for b in ([found] if isinstance(found, KVCacheBlock) else found.values())]
        return pairs


class BlockPool:
    """Hands blocks out, takes them back, and remembers contents until a block is reused.

    Owns all KVCacheBlock objects, the free queue and the hash map; knows nothing of requests.

    Invariants (``check``): a block is in the free queue exactly when its ref_cnt is 0 and it is not the null block;
    a block has a hash exactly when the map leads to it.
    """

    def __init__(self, num_blocks: int, enable_caching: bool) -> None:
        """``num_blocks`` counts the null block, which is block 0 and never handed out."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one is the null block), not {num_blocks}")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now; some of them still hold content that would be lost."""
        return self.free_block_queue.num_free_blocks

    def get_cached_block(self, key: bytes) -> KVCacheBlock | None:
        return self.cached_block_hash_to_block.get_one_block(key)

    def get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        """``n`` blocks, each held once; what they cached is forgotten. Raises IndexError when fewer are free."""
        taken = self.free_block_queue.popleft_n(n)
        for block in taken:
            self._forget(block)
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold each block once more; a free one leaves the queue with its content kept."""
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Let go of each block once; those that nobody holds any more become free, the first one reused first.

        A block whose content nobody could find is reused before any that still caches something.
        """
        hashed: list[KVCacheBlock] = []
        plain: list[KVCacheBlock] = []
        for block in ordered_blocks:
            if block.is_null:
                continue
            if block.ref_cnt <= 0:
                raise ValueError(f"{block!r} is freed more often than it was held")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (plain if block.block_hash is None else hashed).append(block)
        self.free_block_queue.append_n(hashed)
        self.free_block_queue.prepend_n(plain)

    def cache_full_block(self, block: KVCacheBlock, key: bytes) -> None:
        """From now on ``key`` finds ``block``, whose content is complete."""
        if block.is_null or block.block_hash is not None:
            raise ValueError(f"{block!r} cannot take a hash")
        block.block_hash = key
        self.cached_block_hash_to_block.insert(key, block)

    def forget_content(self, key: bytes) -> None:
        """What blocks with this key hold may not be what it should be: nobody may find it again."""
        while (block := self.get_cached_block(key)) is not None:
            self._forget(block)

    def reset_prefix_cache(self) -> bool:
        """Forget all content. Does nothing and returns False while any block is held."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        for block in self.blocks:
            block.block_hash = None
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        return True

    def _forget(self, block: KVCacheBlock) -> None:
        if block.block_hash is not None:
            self.cached_block_hash_to_block.pop(block.block_hash, block.block_id)
            block.block_hash = None

    def check(self, holders: Sequence[Sequence[KVCacheBlock]] | None = None) -> None:
        """Raise AssertionError unless the invariants hold; with ``holders`` also that ref_cnt counts them."""
        self.free_block_queue.check()
        free = {b.block_id for b in self.free_block_queue.blocks()}
        assert self.null_block.block_id not in free, "the null block is free"
        for block in self.blocks[1:]:
            assert block.ref_cnt >= 0, f"{block!r}: negative ref_cnt"
            assert (block.ref_cnt == 0) == (block.block_id in free), f"{block!r}: free and held do not agree"
        cached = self.cached_block_hash_to_block.blocks()
        for key, block in cached:
            assert block.block_hash == key, f"{block!r} is found under another hash"
        assert len(cached) == sum(b.block_hash is not None for b in self.blocks), "a hash leads nowhere"
        if holders is not None:
            counts = [0] * self.num_blocks
            for held in holders:
                for block in held:
                    counts[block.block_id] += 1
            for block in self.blocks[1:]:
                assert block.ref_cnt == counts[block.block_id], f"{block!r} has {counts[block.block_id]} holders"
