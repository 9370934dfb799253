"""Blocks of one KV group, by the rules of its kind of attention: what all kinds share, and full attention."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import ClassVar

from quire.protocol.model.kv_layout import KVGroup
from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.block_hash import group_key
from quire.scheduler_proc.kv.block_pool import BlockPool


class SingleTypeKVCacheManager(ABC):
    """Which blocks each request holds in one group, in the order of its positions.

    Owns ``req_to_blocks`` (by handle) and how many of its entries were offered to the cache; the blocks belong to the
    pool. A request's list only grows, until it is freed whole: the workers' tables are appended to, never rewritten.

    Attributes:
        granules: hashes per block: requests are hashed in units of the smallest block size of all groups.
        skips: whether some blocks are let go of while the request runs.
        is_prefix_closed: whether each shorter prefix of a hit is a hit too.
    """

    skips: ClassVar[bool] = False
    is_prefix_closed: ClassVar[bool] = False

    def __init__(self, group: KVGroup, group_id: int, granules: int, pool: BlockPool) -> None:
        self.block_size = group.block_size
        self.group_id = group_id
        self.granules = granules
        self.pool = pool
        self.req_to_blocks: dict[int, list[KVCacheBlock]] = {}
        self.num_cached_block: dict[int, int] = {}

    def begins_block(self, handle: int, num_tokens: int, num_hit_blocks: int) -> bool:
        """Whether the request needs more blocks here than it holds, to have ``num_tokens`` positions."""
        held = self.req_to_blocks.get(handle)
        num_held = num_hit_blocks if held is None else num_hit_blocks + len(held)
        return num_tokens > num_held * self.block_size

    def num_blocks_to_allocate(self, handle: int, num_tokens: int, computed: Sequence[KVCacheBlock]) -> int:
        """Free blocks that ``num_tokens`` positions would use up, hits that lie in the free queue included."""
        new = -(-num_tokens // self.block_size) - len(computed) - len(self.req_to_blocks.get(handle, ()))
        return max(new, 0) + num_free(computed)

    def add_computed_blocks(self, handle: int, computed: Sequence[KVCacheBlock]) -> None:
        """Begin a request with blocks that the prefix cache found."""
        assert handle not in self.req_to_blocks, "cache hits come before anything else"
        self.pool.touch(computed)
        self.req_to_blocks[handle] = list(computed)
        self.num_cached_block[handle] = len(computed)

    def allocate(self, handle: int, num_tokens: int) -> list[KVCacheBlock]:
        """New entries, so that each of ``num_tokens`` positions has a slot; the caller made sure there are enough."""
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
        full = min(num_tokens // self.block_size, len(block_hashes) // self.granules)
        if full <= cached:
            return
        filled = self.req_to_blocks[handle][cached:full]
        keys = self.keys(block_hashes, cached, full)
        if self.pool.null_block in filled:
            kept = [(block, key) for block, key in zip(filled, keys, strict=True) if not block.is_null]
            filled, keys = [block for block, _ in kept], [key for _, key in kept]
        self.pool.cache_full_blocks(filled, keys)
        self.num_cached_block[handle] = full

    def keys(self, block_hashes: Sequence[bytes], first: int, end: int) -> Iterable[bytes]:
        """Keys of the blocks ``[first, end)``, as far as there are hashes; no Python code per block in group 0.

        Hashes are chained, so that of a block's last granule stands for the whole block.
        """
        wanted = block_hashes[(first + 1) * self.granules - 1 : end * self.granules : self.granules]
        return wanted if self.group_id == 0 else map(partial(group_key, group=self.group_id), wanted)

    def invalidate(self, block_hashes: Sequence[bytes], num_kept_tokens: int) -> None:
        """Invalidate these contents, after the blocks that lie within ``num_kept_tokens``."""
        end = len(block_hashes) // self.granules
        for key in self.keys(block_hashes, num_kept_tokens // self.block_size, end):
            self.pool.invalidate(key)

    def num_held_blocks(self, handle: int) -> int:
        """Without null ones, as far as that costs nothing to know."""
        return len(self.req_to_blocks.get(handle, ()))

    def free(self, handle: int) -> None:
        """Let go of all blocks; the last ones are reused first, for prefixes are what others share."""
        self.pool.free_blocks(reversed(self.req_to_blocks.pop(handle, [])))
        self.num_cached_block.pop(handle, None)

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_length: int, alignment: int
    ) -> list[KVCacheBlock]:
        """Cached blocks of the longest usable prefix of at most ``max_length`` tokens, a multiple of ``alignment``.

        One entry for each block of the prefix: null where the next token does not read any more.
        """

    @abstractmethod
    def remove_skipped_blocks(self, handle: int, num_acknowledged_tokens: int) -> None:
        """Free blocks that no token after the acknowledged ones will read; the null block takes their place."""

    def num_blocks_for(self, num_tokens: int, max_in_flight: int | None) -> int:
        """Blocks that a request of this length, alone, holds at worst on its way.

        ``max_in_flight``: positions of it that can be unacknowledged at a time; None: no bound is known.
        """
        return -(-num_tokens // self.block_size)

    def check(self) -> None:
        """Raise AssertionError unless what each request holds has the shape that this kind of attention gives it."""
        for handle, held in self.req_to_blocks.items():
            where = f"group {self.group_id}, handle {handle}"
            assert self.num_cached_block.get(handle, 0) <= len(held), f"{where}: cached beyond held"
            real = [b.block_id for b in held if not b.is_null]
            assert len(set(real)) == len(real), f"{where}: a block is held twice"
            not_full = held[self.num_cached_block.get(handle, 0) :]
            assert all(b.block_hash is None for b in not_full), f"{where}: a block that is not full can be found"
            self.check_request(handle, held, where)
        assert self.num_cached_block.keys() <= self.req_to_blocks.keys(), f"group {self.group_id}: cached, not held"

    @abstractmethod
    def check_request(self, handle: int, held: list[KVCacheBlock], where: str) -> None:
        """The part of ``check`` that is this kind's; ``where`` begins its messages."""


def num_free(blocks: Sequence[KVCacheBlock]) -> int:
    """How many of these lie in the free queue."""
    return sum(b.ref_cnt == 0 and not b.is_null for b in blocks)


class FullAttentionManager(SingleTypeKVCacheManager):
    """Every token attends to all before it: hits run from the left, and nothing is ever skipped."""

    is_prefix_closed = True

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_length: int, alignment: int
    ) -> list[KVCacheBlock]:
        keys = self.keys(block_hashes, 0, max_length // self.block_size)
        hit = self.pool.cached_block_hash_to_block.get_cached_blocks(keys)
        surplus = len(hit) % (alignment // self.block_size)
        if surplus:
            del hit[-surplus:]
        return hit

    def remove_skipped_blocks(self, handle: int, num_acknowledged_tokens: int) -> None:
        """Full attention skips nothing."""

    def check_request(self, handle: int, held: list[KVCacheBlock], where: str) -> None:
        assert not any(b.is_null for b in held), f"{where}: the null block under full attention"
