"""The choice of contents to store in the next tier: those that a pool is about to evict."""

from itertools import chain, islice

from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.states import StateSlots
from quire.scheduler_proc.kv.tiers import Tier


class StoreChoice:
    """Chooses free cached blocks of a pool that will be reused soon, and whose content the next tier does not have.

    Usually a step costs a few comparisons: the blocks that are evicted next are *safe*, because they were stored ahead.

    Attributes:
        num_unsaved: contents that were evicted before they were stored, since start.
    """

    def __init__(
        self,
        pool: BlockPool,
        target: Tier,
        blocks_of_a_step: int,
        pipeline_depth: int,
        most_held: float,
        states: StateSlots | None = None,
    ) -> None:
        """
        Args:
            blocks_of_a_step: the most that a step may allocate.
            most_held: the part of the pool that copies may hold.
            states: the owner of the pool if its blocks are slots of states.
        """
        self._pool = pool
        self._target = target
        self._states = states
        num_pages = 1 if states is None else states.num_parts
        usable = pool.num_usable_blocks
        # Sources are held while they are copied, so a store of all free blocks would leave none for the next step, and
        # a running request would be preempted for the sake of a cache.
        self._reserve = max(1, min(blocks_of_a_step, usable // 8))
        """Free blocks that stores leave to the next step."""
        most = min(int(usable * most_held), target.pages.num_usable_blocks // (2 * num_pages))
        self._ahead = max(1, min((pipeline_depth + 1) * blocks_of_a_step, most))
        """Blocks to be allocated next that should be safe: those that steps may need until a store has ended."""
        self._num_safe = 0
        """The first free cached blocks in the order of eviction whose content is stored (an estimate)."""
        self._seen = (0, 0)
        self.num_unsaved = 0

    def stored(self, count: int) -> None:
        """Count stored blocks, which are the first in the free queue."""
        self._num_safe += count

    def forget(self) -> None:
        """No block of the pool has cached content."""
        self._num_safe = 0

    def choose(self, num_storing: int) -> list[tuple[KVCacheBlock, bytes]]:
        """Return the blocks to store now with their keys. ``num_storing``: blocks of stores in flight."""
        evicted, revived = self._changes()
        if evicted or revived:
            self._note_changes()
            # An estimate is enough: the order of eviction is approximate with accounts and pins, and exact books would
            # cost a lookup for each eviction. A wrong estimate stores a content late, or looks once more.
            self.num_unsaved += max(evicted - self._num_safe, 0)
            self._num_safe = max(self._num_safe - evicted - revived, 0)
        wanted = self._num_wanted(num_storing)
        return self._first_unsafe(wanted) if wanted > 0 else []

    def is_settled(self, num_storing: int) -> bool:
        """Whether ``choose`` returns nothing, now and until a block is allocated, freed or stored."""
        return not any(self._changes()) and self._num_wanted(num_storing) <= 0

    def _num_wanted(self, num_storing: int) -> int:
        """Return how many blocks to look for; none if it is not above 0."""
        pool = self._pool
        unnamed = pool.num_free_blocks - pool.num_evictable_blocks
        ahead = self._num_safe + num_storing + unnamed
        if ahead >= self._ahead or pool.num_evictable_blocks <= self._num_safe:
            return 0
        # More than is missing: rather few large stores than many small ones.
        return min(self._ahead * 3 // 2 - ahead, pool.num_free_blocks - self._reserve)

    def _first_unsafe(self, wanted: int) -> list[tuple[KVCacheBlock, bytes]]:
        """Return the first contents that are not safe. Pages of safe ones are used, so that this store evicts others.

        After a large allocation there are many safe ones, which take no Python code per lookup.
        """
        # Looked up as one list: the map answers a list of keys without Python code per key.
        blocks = list(islice(self._pool.next_evicted(), self._ahead * 3 // 2))
        keys = [block.block_hash for block in blocks if block.block_hash is not None]
        states = self._states
        # Of a state only the first page is looked up, because a tier evicts it before the others.
        firsts = keys if states is None else [next(states.page_keys(key)) for key in keys]
        pages = self._target.pages.find_blocks(firsts)
        missing = (at for at, page in enumerate(pages) if page is None)
        unsafe = [at for at in missing if states is None or states.is_kept(blocks[at])][:wanted]
        end = unsafe[-1] + 1 if len(unsafe) == wanted else len(keys)
        chosen = {keys[at]: blocks[at] for at in unsafe}
        self._num_safe = end - len(chosen)
        safe = pages[:end]
        if states is not None:
            named = [key for key, page in zip(keys, safe, strict=False) if page is not None]
            safe = self._target.pages.find_blocks(chain.from_iterable(map(states.page_keys, named)))
        self._target.use([page for page in safe if page is not None])
        return [(block, key) for key, block in chosen.items()]

    def _changes(self) -> tuple[int, int]:
        """Return the number of blocks evicted and revived since ``_note_changes``."""
        return self._pool.num_evicted_blocks - self._seen[0], self._pool.num_revived_blocks - self._seen[1]

    def _note_changes(self) -> None:
        self._seen = (self._pool.num_evicted_blocks, self._pool.num_revived_blocks)
