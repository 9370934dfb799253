"""The blocks of one KV group whose tokens read only some before them: a sliding window, or the beginning of a chunk."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from quire.protocol.block_hash import group_key
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import KVGroup
from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.single_type import Contents, SingleTypeKVCacheManager


class SlidingWindowManager(SingleTypeKVCacheManager):
    """A token reads the last ``window`` positions, its own included. Earlier blocks are null, in hits and in tables.

    Owns the number of leading entries of each request that were freed.
    """

    skips = True

    def __init__(self, group: KVGroup, group_id: int, pool: BlockPool) -> None:
        super().__init__(group, group_id, pool)
        self.window = group.window
        if self.window < 1:
            raise ConfigError(f"KV group kind {group.kind!r} needs a window of at least 1 (got {group.window})")
        self.num_skipped_blocks: dict[int, int] = {}

    def first_read(self, position: int) -> int:
        """Return the first position that the token at ``position`` reads, at most ``position`` itself."""
        return max(0, position - self.window + 1)

    def num_blocks_for(self, num_tokens: int, max_in_flight: int) -> int:
        """Count the blocks of the window before the first position in flight, and of the positions in flight."""
        whole = super().num_blocks_for(num_tokens, max_in_flight)
        span = self.window - 1 + max_in_flight
        return min(whole, -(-(span - 1) // self.block_size) + 1)

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_length: int, contents: Contents
    ) -> list[KVCacheBlock]:
        """Search from the right, looking at each block once: after a missing block only shorter prefixes remain."""
        # From the right, because a hit needs only the last blocks of the window. From the left every earlier block
        # would be looked up, although most of them have been freed long ago.
        index = end = min(max_length // self.block_size, len(block_hashes))
        first = self._first_block(end)
        blocks = self._blocks_backwards(block_hashes, end, contents)
        found: list[KVCacheBlock] = []
        while index > first:
            index -= 1
            block = next(blocks)
            if block is None:
                # A hole ends all longer hits: each would have to contain it. The next candidate ends before the hole,
                # and what was found behind the hole is useless for it.
                end = index
                first = self._first_block(end)
                found = []
            else:
                found.append(block)
        # Null blocks keep the index of a block equal to its position divided by the block size, in every group and in
        # the workers' tables.
        return [self.pool.null_block] * first + found[::-1]

    def num_held_blocks(self, handle: int) -> int:
        return super().num_held_blocks(handle) - self.num_skipped_blocks.get(handle, 0)

    def _first_block(self, end: int) -> int:
        """Return the first block that the token after ``end`` blocks reads."""
        return self.first_read(end * self.block_size) // self.block_size

    def _blocks_backwards(
        self, block_hashes: Sequence[bytes], end: int, contents: Contents
    ) -> Iterator[KVCacheBlock | None]:
        """Yield the cached block, or None, of blocks ``end - 1`` down to 0."""
        keys: Iterable[bytes] = block_hashes[end - 1 :: -1] if end else ()
        if self.group_id:
            keys = map(partial(group_key, group=self.group_id), keys)
        return map(contents.get_cached_block, keys)

    def remove_skipped_blocks(self, handle: int, num_acknowledged_tokens: int) -> None:
        """Free blocks by the acknowledged count, because steps in flight can still be rolled back."""
        held = self.req_to_blocks.get(handle)
        if held is None:
            return
        done = self.num_skipped_blocks.get(handle, 0)
        end = min(self.first_read(num_acknowledged_tokens) // self.block_size, len(held))
        if end <= done:
            return
        skipped = held[done:end]
        # Only this table forgets them. Workers are not sent the change: their tables keep the old ids left of the
        # window, where no kernel may read.
        held[done:end] = [self.pool.null_block] * len(skipped)
        self.num_skipped_blocks[handle] = end
        # The last block of a sequence is freed first everywhere, so that it is also evicted first: a prefix without its
        # end can be hit, an end without its prefix cannot.
        self.pool.free_blocks(reversed(skipped))

    def can_share(self, handle: int, num_tokens: int) -> bool:
        held, first = self.req_to_blocks[handle], self.first_read(num_tokens) // self.block_size
        # A fork of an older position needs blocks that the window of the parent may have passed already.
        return first >= len(held) or not held[first].is_null

    def share(self, parent: int, child: int, num_tokens: int) -> KVCacheBlock | None:
        self.num_skipped_blocks[child] = self.num_skipped_blocks.get(parent, 0)
        return super().share(parent, child, num_tokens)

    def free(self, handle: int) -> None:
        super().free(handle)
        self.num_skipped_blocks.pop(handle, None)

    def check_request(self, handle: int, held: list[KVCacheBlock], where: str) -> None:
        skipped = self.num_skipped_blocks.get(handle, 0)
        assert all(b.is_null for b in held[:skipped]), f"{where}: a skipped block is not null"
        real = [index for index, block in enumerate(held) if not block.is_null]
        assert not real or len(held) - real[0] == len(real), f"{where}: null block within the window"


class ChunkedLocalManager(SlidingWindowManager):
    """A token reads the positions of its chunk up to its own; blocks of earlier chunks are null.

    A hit that ends where a chunk begins needs no block here: with no other kind of group it needs none at all, because
    no layer then reads across that border. A request holds at most as many blocks as under a window of that length.
    """

    def first_read(self, position: int) -> int:
        return position // self.window * self.window
