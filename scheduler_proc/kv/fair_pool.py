"""A pool that shares cached contents fairly: the tenant with the most blocks that no request holds loses its first."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from quire.protocol.config import EngineConfig
from quire.scheduler_proc.kv.block import FreeKVCacheBlockQueue, KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool

CHUNK = 16
"""Blocks that one tenant gives up before the tenants are compared again."""
FORGOTTEN_AFTER = 32
"""Times that the pool may be given away, all of it, before a tenant that does nothing is no match for the others."""


@dataclass(slots=True)
class _Left:
    """What one tenant's requests left in free blocks.

    Attributes:
        used_at: when it last left or found something, by ``FairFreeQueue.num_taken``.
    """

    blocks: FreeKVCacheBlockQueue = field(default_factory=lambda: FreeKVCacheBlockQueue(()))
    used_at: int = 0


class FairFreeQueue(FreeKVCacheBlockQueue):
    """Free blocks: first those that cache nothing, then, of the tenant with the most blocks, what it left longest ago.

    The most: of what it left and what its requests hold, together. So a tenant that floods evicts its own contents for
    as long as it has more than the others, and each keeps an equal part if it has a use for it. A tenant that has no
    blocks in use, and left and found nothing while the pool was given away FORGOTTEN_AFTER times, gives up its first.

    With one tenant it is the queue that it replaces. Leaving the middle costs O(1); taking O(1) per block and
    O(tenants) per CHUNK. Nothing here counts but blocks: a replay decides the same.

    Attributes:
        tenant: the one with the request that lets go of the blocks that are appended, or finds those that are removed.
        count_held: blocks that each tenant's requests hold.
        num_taken: blocks given away since the start.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.tenant = 0
        self.count_held: Callable[[], Mapping[int, int]] = dict
        self.num_taken = 0
        self._plain = FreeKVCacheBlockQueue(())
        self._left: dict[int, _Left] = {}
        self._owners: dict[int, int] = {}
        """By block, the tenant in whose queue it is."""
        self._turnover = FORGOTTEN_AFTER * max(len(blocks), 1)
        self.num_free_blocks = 0
        self.append_n(blocks)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        if n > self.num_free_blocks:
            raise IndexError(f"{n} blocks wanted, {self.num_free_blocks} free")
        taken = self._plain.popleft_n(min(n, self._plain.num_free_blocks))
        if len(taken) < n:
            held = self.count_held() if len(self._left) > 1 else {}
            while len(taken) < n:
                taken += self._give_up(n - len(taken), held)
        self.num_free_blocks -= n
        self.num_taken += n
        return taken

    def _give_up(self, n: int, held: Mapping[int, int]) -> list[KVCacheBlock]:
        """Up to ``n`` blocks of the one tenant that has to lose some."""
        tenant = min(self._left) if len(self._left) == 1 else max(self._left, key=lambda t: self._weight(t, held))
        left = self._left[tenant]
        count = min(n, left.blocks.num_free_blocks)
        taken = left.blocks.popleft_n(count if len(self._left) == 1 else min(count, CHUNK))
        for block in taken:
            del self._owners[block.block_id]
        self._forget_if_empty(tenant)
        return taken

    def _weight(self, tenant: int, held: Mapping[int, int]) -> tuple[int, int, int]:
        """The largest loses."""
        left, in_use = self._left[tenant], held.get(tenant, 0)
        age = self.num_taken - left.used_at
        forgotten = age if not in_use and age > self._turnover else 0
        return (forgotten, left.blocks.num_free_blocks + in_use, -tenant)

    def remove_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            owner = self._owners.pop(block.block_id, None)
            if owner is None:
                self._plain.remove_n((block,))
            else:
                self._left[owner].blocks.remove_n((block,))
                self._forget_if_empty(owner)
            self.num_free_blocks -= 1
        if blocks and self.tenant in self._left:
            self._left[self.tenant].used_at = self.num_taken

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Those that cache something go to the end of the tenant's, others to the end of those that cache nothing."""
        cached = [block for block in blocks if block.block_hash is not None]
        if len(cached) < len(blocks):
            self._plain.append_n([block for block in blocks if block.block_hash is None])
        if cached:
            self._leave(self.tenant, cached, self.num_taken)
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Of blocks that cache nothing."""
        self._plain.prepend_n(blocks)
        self.num_free_blocks += len(blocks)

    def blocks(self) -> list[KVCacheBlock]:
        """All: those that cache nothing, then those of each tenant, by its number."""
        return self._plain.blocks() + [b for _, left in sorted(self._left.items()) for b in left.blocks.blocks()]

    def tenants(self) -> list[tuple[int, int, int]]:
        """(tenant, blocks given away since it did something, its blocks), as they stand at the end of ``blocks``."""
        ages = [(tenant, self.num_taken - left.used_at, left) for tenant, left in sorted(self._left.items())]
        return [(tenant, age, left.blocks.num_free_blocks) for tenant, age, left in ages]

    def restore(self, blocks: Sequence[KVCacheBlock], tenants: Sequence[tuple[int, int, int]]) -> None:
        """For an empty queue: what ``blocks`` and ``tenants`` said of another one. Raises ValueError if they cannot."""
        counts = [count for _, _, count in tenants]
        numbers = [tenant for tenant, _, _ in tenants]
        at = len(blocks) - sum(counts)
        if at < 0 or min(counts, default=1) < 1 or len(set(numbers)) < len(numbers):
            raise ValueError("blocks of tenants that cannot be")
        self._plain.append_n(blocks[:at])
        for tenant, age, count in tenants:
            self._leave(tenant, blocks[at : at + count], self.num_taken - age)
            at += count
        self.num_free_blocks = len(blocks)

    def _leave(self, tenant: int, blocks: Sequence[KVCacheBlock], used_at: int) -> None:
        left = self._left.setdefault(tenant, _Left())
        left.blocks.append_n(blocks)
        left.used_at = used_at
        self._owners.update(dict.fromkeys([block.block_id for block in blocks], tenant))

    def _forget_if_empty(self, tenant: int) -> None:
        if not self._left[tenant].blocks.num_free_blocks:
            del self._left[tenant]

    def check(self) -> None:
        """Raise AssertionError unless each free block is in the one queue that it is said to be in."""
        self._plain.check()
        owners: dict[int, int] = {}
        for tenant, left in self._left.items():
            left.blocks.check()
            owners |= {block.block_id: tenant for block in left.blocks.blocks()}
            assert left.blocks.num_free_blocks, f"tenant {tenant} has left nothing"
        assert owners == self._owners, "a block is in another queue than it is said to be"
        assert self._plain.num_free_blocks + len(owners) == self.num_free_blocks, "free blocks are miscounted"


class FairBlockPool(BlockPool):
    """A pool for several tenants: what is evicted depends on the tenant that it belongs to."""

    free_block_queue: FairFreeQueue

    def _make_queue(self) -> FairFreeQueue:
        return FairFreeQueue(self.blocks)

    def act_for(self, tenant: int) -> None:
        self.free_block_queue.tenant = tenant

    def count_held_by(self, count_held: Callable[[], Mapping[int, int]]) -> None:
        self.free_block_queue.count_held = count_held

    def left_by_tenant(self) -> list[tuple[int, int, int]]:
        return self.free_block_queue.tenants()

    def _restore_free(self, free: Sequence[KVCacheBlock], tenants: Sequence[tuple[int, int, int]]) -> None:
        self.free_block_queue.restore(free, tenants)


def pool_class_for(config: EngineConfig) -> type[BlockPool]:
    """The pool that the configuration asks for."""
    return FairBlockPool if config.fair_admission and config.num_tenants > 1 else BlockPool
