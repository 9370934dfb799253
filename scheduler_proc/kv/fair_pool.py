"""A block pool that shares cached contents fairly: it evicts from the tenant with the most blocks."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.protocol.config import EngineConfig
from quire.scheduler_proc.kv.block import FreeKVCacheBlockQueue, KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.events import KVEventRecorder
from quire.scheduler_proc.kv.pinned_queue import PinnedFreeQueue

CHUNK = 16
"""Blocks that one tenant gives up before the tenants are compared again."""
INACTIVE_AFTER = 32
"""Pool turnovers without activity after which a tenant without held blocks is evicted first."""


@dataclass(slots=True)
class _TenantQueue:
    """The free cached blocks of one tenant.

    Attributes:
        blocks: in the order in which they are evicted.
        used_at: value of ``FairFreeQueue.num_taken`` when the tenant last released or found a block.
    """

    blocks: FreeKVCacheBlockQueue
    used_at: int = 0


class FairFreeQueue(FreeKVCacheBlockQueue):
    """Free blocks in reuse order: first those without cached content, then those of the tenant with the most blocks.

    A tenant's count is its held blocks plus its free cached blocks, pinned ones included. Its oldest content is evicted
    first, or that of the lowest rank; its pinned ones are evicted after its others, and not after those of other
    tenants. A tenant that floods the cache therefore evicts its own contents while it has the most blocks, and every
    tenant can keep an equal share. A tenant that holds no blocks, and has neither released nor found any during
    INACTIVE_AFTER turnovers of the pool, is evicted before the others.

    With one tenant it behaves like FreeKVCacheBlockQueue. Removing a block costs O(1); allocating costs O(1) per block
    and O(tenants) per CHUNK. Decisions depend only on block counts, so a replay repeats them.

    Attributes:
        tenant: the tenant of the request whose blocks are appended or removed.
        held: number of blocks that each tenant's requests hold, without zeros; shared ones count per holder.
        num_taken: blocks allocated since the start.
    """

    def __init__(
        self,
        blocks: Sequence[KVCacheBlock],
        make_line: Callable[[Sequence[KVCacheBlock]], FreeKVCacheBlockQueue] = FreeKVCacheBlockQueue,
    ) -> None:
        """``make_line``: makes the queue of one tenant."""
        self._make_line = make_line
        self.tenant = 0
        self.held: Counter[int] = Counter()
        self.num_taken = 0
        self._uncached = FreeKVCacheBlockQueue(())
        self._queues: dict[int, _TenantQueue] = {}
        self._owners: dict[int, int] = {}
        """Block id to the tenant whose queue contains it."""
        self._turnover = INACTIVE_AFTER * max(len(blocks), 1)
        self.num_free_blocks = 0
        self.append_n(blocks)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        if n > self.num_free_blocks:
            raise IndexError(f"cannot take {n} blocks: {self.num_free_blocks} are free")
        taken = self._uncached.popleft_n(min(n, self._uncached.num_free_blocks))
        while len(taken) < n:
            taken += self._take_from_largest(n - len(taken))
        self.num_free_blocks -= n
        self.num_taken += n
        return taken

    def _take_from_largest(self, n: int) -> list[KVCacheBlock]:
        """Take up to ``n`` blocks from the tenant that has the most."""
        # Tenants are compared once per CHUNK and not per block, because a comparison looks at all of them. A tenant
        # gives up at most CHUNK blocks more than it should.
        tenant = min(self._queues) if len(self._queues) == 1 else max(self._queues, key=self._weight)
        queue = self._queues[tenant]
        count = min(n, queue.blocks.num_free_blocks)
        taken = queue.blocks.popleft_n(count if len(self._queues) == 1 else min(count, CHUNK))
        for block in taken:
            del self._owners[block.block_id]
        self._remove_if_empty(tenant)
        return taken

    def _weight(self, tenant: int) -> tuple[int, int, int]:
        """Return the sort key of a tenant; the largest is evicted from."""
        queue, in_use = self._queues[tenant], self.held[tenant]
        age = self.num_taken - queue.used_at
        # Without this, contents of tenants that never return would keep their equal share of the pool for ever.
        inactive_for = age if not in_use and age > self._turnover else 0
        return (inactive_for, queue.blocks.num_free_blocks + in_use, -tenant)

    def remove_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            owner = self._owners.pop(block.block_id, None)
            if owner is None:
                self._uncached.remove_n((block,))
            else:
                self._queues[owner].blocks.remove_n((block,))
                self._remove_if_empty(owner)
            self.num_free_blocks -= 1
        # A hit counts as activity also if its blocks belong to others, because it shows that the tenant is there.
        if blocks and self.tenant in self._queues:
            self._queues[self.tenant].used_at = self.num_taken

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Append cached blocks to the tenant's queue, and the others to the queue of blocks without content."""
        cached = [block for block in blocks if block.block_hash is not None]
        if len(cached) < len(blocks):
            self._uncached.append_n([block for block in blocks if block.block_hash is None])
        if cached:
            self._append_to(self.tenant, cached, self.num_taken)
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Prepend blocks without cached content."""
        self._uncached.prepend_n(blocks)
        self.num_free_blocks += len(blocks)

    def owner_of(self, block: KVCacheBlock) -> int:
        """Return the tenant in whose queue a free cached block is."""
        return self._owners[block.block_id]

    def upcoming(self) -> Iterator[KVCacheBlock]:
        """Yield free blocks: those without cached content, then each tenant's, those of the largest tenant first."""
        yield from self._uncached.upcoming()
        for tenant in sorted(self._queues, key=self._weight, reverse=True):
            yield from self._queues[tenant].blocks.upcoming()

    def take_out(self, blocks: Sequence[KVCacheBlock]) -> list[tuple[int, int, Any]]:
        """Remove cached blocks, which still count for their tenants. Returns (tenant, used_at, place) of each block."""
        places: list[tuple[int, int, Any]] = []
        for block in blocks:
            owner = self._owners.pop(block.block_id)
            queue = self._queues[owner]
            (place,) = queue.blocks.take_out((block,))
            places.append((owner, queue.used_at, place))
            self._remove_if_empty(owner)
            self.held[owner] += 1
        self.num_free_blocks -= len(blocks)
        return places

    def put_back(self, blocks: Sequence[KVCacheBlock], places: list[tuple[int, int, Any]]) -> None:
        for block, (owner, used_at, place) in zip(reversed(blocks), reversed(places), strict=True):
            self.held[owner] -= 1
            if not self.held[owner]:
                del self.held[owner]
            if block.ref_cnt:
                continue
            if block.block_hash is None:
                self._uncached.prepend_n((block,))
            else:
                queue = self._queue_of(owner, used_at)
                # The block before the place may have left the queue, or belong to another tenant by now; then the place
                # says nothing, and the front is right: it was about to be evicted when the copy began.
                if isinstance(queue.blocks, PinnedFreeQueue) or self._owners.get(place[0].block_id) == owner:
                    queue.blocks.put_back((block,), (place,))
                else:
                    queue.blocks.prepend_n((block,))
                self._owners[block.block_id] = owner
            self.num_free_blocks += 1

    def blocks(self) -> list[KVCacheBlock]:
        """Return all free blocks: first those without cached content, then each tenant's by tenant number."""
        return self._uncached.blocks() + [b for _, queue in sorted(self._queues.items()) for b in queue.blocks.blocks()]

    def forget_contents(self) -> None:
        """Keep the order of all blocks, none of which has a content any more."""
        for queue in self._queues.values():
            if isinstance(queue.blocks, PinnedFreeQueue):
                queue.blocks.forget_contents()

    def _append_to(self, tenant: int, blocks: Sequence[KVCacheBlock], used_at: int) -> None:
        self._own(tenant, blocks, used_at).blocks.append_n(blocks)

    def _own(self, tenant: int, blocks: Sequence[KVCacheBlock], used_at: int) -> _TenantQueue:
        """Return the tenant's queue, to which the caller adds the blocks."""
        queue = self._queue_of(tenant, used_at)
        queue.used_at = used_at
        self._owners.update(dict.fromkeys([block.block_id for block in blocks], tenant))
        return queue

    def _queue_of(self, tenant: int, used_at: int) -> _TenantQueue:
        """Return the tenant's queue, a new one if it has none."""
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = _TenantQueue(self._make_line(()), used_at)
        return queue

    def _remove_if_empty(self, tenant: int) -> None:
        if not self._queues[tenant].blocks.num_free_blocks:
            del self._queues[tenant]

    def check(self) -> None:
        """Raise AssertionError unless each free block is in the queue that ``_owners`` names."""
        self._uncached.check()
        owners: dict[int, int] = {}
        for tenant, queue in self._queues.items():
            queue.blocks.check()
            owners |= {block.block_id: tenant for block in queue.blocks.blocks()}
            assert queue.blocks.num_free_blocks, f"empty queue of tenant {tenant}"
        assert owners == self._owners, "a block is not in the queue of its owner"
        assert self._uncached.num_free_blocks + len(owners) == self.num_free_blocks, "wrong number of free blocks"


class FairBlockPool(BlockPool):
    """A block pool for several tenants, with fair eviction."""

    is_fair = True
    free_block_queue: FairFreeQueue

    def _make_queue(self) -> FairFreeQueue:
        return FairFreeQueue(self.blocks, self._make_line)

    def act_for(self, tenant: int) -> None:
        self.free_block_queue.tenant = tenant

    def get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        taken = super().get_new_blocks(n)
        self._add_held(n)
        return taken

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        touched = list(blocks)
        super().touch(touched)
        self._add_held(sum(not block.is_null for block in touched))

    def share(self, blocks: Sequence[KVCacheBlock]) -> None:
        super().share(blocks)
        self._add_held(len(blocks))

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        freed = list(ordered_blocks)
        super().free_blocks(freed)
        self._add_held(-sum(not block.is_null for block in freed))

    def owner_of(self, block: KVCacheBlock) -> int:
        return self.free_block_queue.owner_of(block)

    def check(self, holders: Sequence[Sequence[KVCacheBlock]] | None = None) -> None:
        super().check(holders)
        held, counted = sum(block.ref_cnt for block in self.blocks), self.free_block_queue.held.total()
        assert held == counted, f"{held} blocks are held, {counted} counted for tenants"

    def _add_held(self, num_blocks: int) -> None:
        queue = self.free_block_queue
        queue.held[queue.tenant] += num_blocks
        if not queue.held[queue.tenant]:
            del queue.held[queue.tenant]

    def _forget_contents(self) -> None:
        self.free_block_queue.forget_contents()


class FairPages(FairBlockPool):
    """The pages of a tier for several tenants: each page belongs to the tenant for which it was allocated.

    A tenant that reads a page of another one does not take it over, as it would a block of the device.
    """

    def __init__(self, num_blocks: int, events: KVEventRecorder | None, medium: str) -> None:
        self._owner = [0] * num_blocks
        super().__init__(num_blocks, True, events, medium)

    def get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        taken = super().get_new_blocks(n)
        for page in taken:
            self._owner[page.block_id] = self.free_block_queue.tenant
        return taken

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        for pages in self._by_owner(blocks):
            super().touch(pages)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        for pages in self._by_owner(ordered_blocks):
            super().free_blocks(pages)

    def owner_of(self, block: KVCacheBlock) -> int:
        return self._owner[block.block_id]

    def _by_owner(self, pages: Iterable[KVCacheBlock]) -> Iterator[list[KVCacheBlock]]:
        """Yield the pages of each tenant, while the pool acts for it."""
        found: dict[int, list[KVCacheBlock]] = {}
        for page in pages:
            found.setdefault(self._owner[page.block_id], []).append(page)
        for tenant, owned in found.items():
            self.act_for(tenant)
            yield owned


def pool_class_for(config: EngineConfig) -> type[BlockPool]:
    """Return the pool class for the configuration."""
    return FairBlockPool if config.fair_admission and config.num_tenants > 1 else BlockPool


def pool_maker(
    config: EngineConfig, pool_class: type[BlockPool], events: KVEventRecorder | None
) -> Callable[..., BlockPool]:
    """Return what makes a pool of this class with what the configuration needs."""
    return partial(pool_class, events=events, has_pins=config.uses_programs)
