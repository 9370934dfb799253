"""The blocks of one KV group by kind of attention: the base class, and full attention."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import ClassVar, Protocol

from quire.protocol.block_hash import group_key
from quire.protocol.model.kv_layout import KVGroup
from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.events import FilledRequest


class Contents(Protocol):
    """Cached contents by key: those of a BlockPool, or of several."""

    def get_cached_block(self, key: bytes) -> KVCacheBlock | None:
        """Return a block with this content, or None."""
        ...

    def get_cached_blocks(self, keys: Iterable[bytes]) -> list[KVCacheBlock]:
        """Return one block per key, up to the first unknown key."""
        ...


class SingleTypeKVCacheManager(ABC):
    """The blocks that each request holds in one group, in the order of its positions.

    Owns ``req_to_blocks`` (by handle) and the number of its entries that were offered to the cache; the pool owns the
    blocks. A request's list only grows until it is freed whole, because workers append to their tables and never
    rewrite them.

    Attributes:
        skips: whether some blocks are freed while the request runs.
        is_prefix_closed: whether each shorter prefix of a hit is a hit too.
    """

    skips: ClassVar[bool] = False
    is_prefix_closed: ClassVar[bool] = False

    def __init__(self, group: KVGroup, group_id: int, pool: BlockPool) -> None:
        self.block_size = group.block_size
        self.group_id = group_id
        self.pool = pool
        self.req_to_blocks: dict[int, list[KVCacheBlock]] = {}
        self.num_cached_block: dict[int, int] = {}

    def needs_blocks(self, handle: int, num_tokens: int, num_hit_blocks: int) -> bool:
        """Return whether ``num_tokens`` positions need more blocks than the request holds here."""
        held = self.req_to_blocks.get(handle)
        num_held = num_hit_blocks if held is None else num_hit_blocks + len(held)
        return num_tokens > num_held * self.block_size

    def num_missing_blocks(self, handle: int, num_tokens: int) -> int:
        """Return how many blocks ``num_tokens`` positions need in addition to those that the request holds."""
        return max(-(-num_tokens // self.block_size) - len(self.req_to_blocks.get(handle, ())), 0)

    def num_blocks_to_allocate(self, handle: int, num_tokens: int, computed: Sequence[KVCacheBlock]) -> int:
        """Return the free blocks that ``num_tokens`` positions need, including hits that are in the free queue."""
        return max(self.num_missing_blocks(handle, num_tokens) - len(computed), 0) + num_free(computed)

    def add_computed_blocks(self, handle: int, computed: Sequence[KVCacheBlock]) -> None:
        """Start a request with blocks found in the prefix cache."""
        assert handle not in self.req_to_blocks, f"handle {handle} already holds blocks: cache hits must be added first"
        self.pool.touch(computed)
        self.req_to_blocks[handle] = list(computed)
        # Hits have their keys already, and a block cannot be cached twice.
        self.num_cached_block[handle] = len(computed)

    def can_share(self, handle: int, num_tokens: int) -> bool:
        """Return whether a request still has all blocks that a token after the first ``num_tokens`` reads."""
        return True

    def share(self, parent: int, child: int, num_tokens: int) -> KVCacheBlock | None:
        """Start a child with the full blocks of its parent's first ``num_tokens``. Returns the block of the rest.

        Returns None if there is no rest.
        """
        held, full = self.req_to_blocks[parent], num_tokens // self.block_size
        self.req_to_blocks[child] = shared = held[:full]
        # Under a window some of the shared entries are null blocks, which ``touch`` skips and ``share`` does not look
        # for.
        own = self.pool.touch if self.skips else self.pool.share
        own(shared)
        # Not the parent's count as it is: it may have cached blocks that end after the shared tokens.
        self.num_cached_block[child] = min(full, self.num_cached_block.get(parent, 0))
        return held[full] if num_tokens % self.block_size else None

    def append(self, handle: int, blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """Add newly allocated blocks to a request. Returns them."""
        self.req_to_blocks.setdefault(handle, []).extend(blocks)
        return blocks

    def cache_blocks(self, request: FilledRequest, num_tokens: int) -> None:
        """Make the blocks findable that ``num_tokens`` known and written positions fill."""
        handle, block_hashes = request.handle, request.block_hashes
        cached = self.num_cached_block.get(handle, 0)
        full = min(num_tokens // self.block_size, len(block_hashes))
        if full <= cached:
            return
        filled = self.req_to_blocks[handle][cached:full]
        keys = self.keys(block_hashes, cached, full)
        # A window may have passed blocks before they were filled by the acknowledged count; a null block must never get
        # a key.
        if self.pool.null_block in filled:
            kept = [(block, key) for block, key in zip(filled, keys, strict=True) if not block.is_null]
            filled, keys = [block for block, _ in kept], [key for _, key in kept]
        if self.pool.events is not None and self.pool.events.describes:
            self.pool.events.describe(request, self.group_id, cached, full)
        self.pool.cache_full_blocks(filled, keys)
        self.num_cached_block[handle] = full

    def keys(self, block_hashes: Sequence[bytes], first: int, end: int) -> Iterable[bytes]:
        """Return the keys of blocks ``[first, end)`` as far as hashes exist; no Python code per block in group 0."""
        wanted = block_hashes[first:end]
        return wanted if self.group_id == 0 else map(partial(group_key, group=self.group_id), wanted)

    def invalidate(self, block_hashes: Sequence[bytes], num_kept_tokens: int, pool: BlockPool) -> None:
        """Invalidate these contents of a pool, except the blocks within ``num_kept_tokens``."""
        for key in self.keys(block_hashes, num_kept_tokens // self.block_size, len(block_hashes)):
            pool.invalidate(key)

    def num_held_blocks(self, handle: int) -> int:
        """Return the number of held blocks, without null ones where that is known at no cost."""
        return len(self.req_to_blocks.get(handle, ()))

    def free(self, handle: int) -> None:
        """Free all blocks. The last ones are reused first, because beginnings are more likely to be shared."""
        self.pool.free_blocks(reversed(self.req_to_blocks.pop(handle, [])))
        self.num_cached_block.pop(handle, None)

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_length: int, contents: Contents
    ) -> list[KVCacheBlock]:
        """Return the blocks in ``contents`` of the longest usable prefix of at most ``max_length`` tokens.

        One entry per block of the prefix: null where later tokens do not read it.
        """

    @abstractmethod
    def remove_skipped_blocks(self, handle: int, num_acknowledged_tokens: int) -> None:
        """Replace blocks that no token after the acknowledged ones will read by the null block, and free them."""

    def num_blocks_for(self, num_tokens: int, max_in_flight: int) -> int:
        """Return the most blocks that a request of this length holds at any time when it is alone.

        ``max_in_flight``: the most unacknowledged positions at a time.
        """
        return -(-num_tokens // self.block_size)

    def check(self) -> None:
        """Raise AssertionError unless the blocks of each request are valid.

        No block may occur twice, only the full blocks may have a hash, and null blocks may only be where this kind of
        attention reads nothing (``check_request``): nowhere for full attention, left of the window for others.
        """
        for handle, held in self.req_to_blocks.items():
            where = f"group {self.group_id}, handle {handle}"
            assert self.num_cached_block.get(handle, 0) <= len(held), f"{where}: more blocks cached than held"
            real = [b.block_id for b in held if not b.is_null]
            assert len(set(real)) == len(real), f"{where}: a block is held twice"
            not_full = held[self.num_cached_block.get(handle, 0) :]
            assert all(b.block_hash is None for b in not_full), f"{where}: a partial block has a hash"
            self.check_request(handle, held, where)
        assert self.num_cached_block.keys() <= self.req_to_blocks.keys(), (
            f"group {self.group_id}: a handle with cached blocks holds none"
        )

    @abstractmethod
    def check_request(self, handle: int, held: list[KVCacheBlock], where: str) -> None:
        """Check the invariants of this kind of attention; ``where`` is the prefix of the messages."""


def num_free(blocks: Sequence[KVCacheBlock]) -> int:
    """Return how many of these blocks are in the free queue."""
    return sum(b.ref_cnt == 0 and not b.is_null for b in blocks)


class FullAttentionManager(SingleTypeKVCacheManager):
    """Every token attends to all tokens before it: hits are prefixes, and no block is skipped."""

    is_prefix_closed = True

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_length: int, contents: Contents
    ) -> list[KVCacheBlock]:
        return contents.get_cached_blocks(self.keys(block_hashes, 0, max_length // self.block_size))

    def remove_skipped_blocks(self, handle: int, num_acknowledged_tokens: int) -> None:
        """Do nothing: full attention reads all blocks."""

    def check_request(self, handle: int, held: list[KVCacheBlock], where: str) -> None:
        assert not any(b.is_null for b in held), f"{where}: null block under full attention"
