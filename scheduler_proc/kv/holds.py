"""Blocks that are not held by a running request but by a copy in flight, or for a waiting request."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool


@dataclass(slots=True)
class BlockHold:
    """Blocks with one holder.

    Attributes:
        account: whose blocks they count as.
        places: for ``BlockPool.end_copy``, if the blocks are the sources of a copy; None for others.
        handle: the waiting request for which they are kept, or -1 while a copy needs them.
    """

    blocks: list[KVCacheBlock]
    account: int
    is_source: bool = False
    places: Any = None
    handle: int = -1


class Holds:
    """Owns the holds of a pool, by number. A number is used once, so that it may outlive handles of requests.

    *Kept* holds are soft: they save a waiting request from loading again, and end when another request needs blocks.
    The others end when their copy is answered.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._holds: dict[int, BlockHold] = {}
        self._kept: dict[int, int] = {}
        """Handle to the number of what is kept for it."""
        self._last = 0

    def __len__(self) -> int:
        return len(self._holds)

    @property
    def num_kept(self) -> int:
        """Number of waiting requests for which blocks are kept."""
        return len(self._kept)

    def hold_sources(self, blocks: Sequence[KVCacheBlock]) -> int:
        """Hold free cached blocks, which will be copied. Returns the hold's number."""
        places = self._pool.begin_copy(blocks)
        return self._add(BlockHold(list(blocks), 0, is_source=True, places=places))

    def hold_targets(
        self, cached: Sequence[KVCacheBlock], num_new: int, account: int
    ) -> tuple[int, list[KVCacheBlock]]:
        """Hold cached blocks, and allocate ``num_new`` to copy to; enough must be free.

        Returns:
            The hold's number, and the new blocks.
        """
        self._pool.act_for(account)
        # Hits are held before the new blocks are taken, which could evict them otherwise.
        self._pool.touch(cached)
        new = self._pool.get_new_blocks(num_new)
        return self._add(BlockHold([*cached, *new], account)), new

    def end(self, number: int) -> None:
        """Release the blocks of a hold."""
        hold = self._holds.pop(number)
        self._kept.pop(hold.handle, None)
        if hold.is_source:
            self._pool.end_copy(hold.blocks, hold.places)
        else:
            self._pool.act_for(hold.account)
            self._pool.free_blocks(reversed(hold.blocks))

    def keep_for(self, number: int, handle: int) -> None:
        """Keep what was loaded for a waiting request, instead of what was kept for it before."""
        self.end_kept(handle)
        self._holds[number].handle = handle
        self._kept[handle] = number

    def end_kept(self, handle: int) -> None:
        """Release what is kept for a request, if anything is."""
        if handle in self._kept:
            self.end(self._kept[handle])

    def end_one_kept(self, last: int = -1) -> bool:
        """Release what is kept for one request, and return whether there was one: the newest, but ``last`` at the end.

        A request that lacks blocks may be unable to use all that is kept for it, because a copy has failed.
        """
        # The newest first, as with preemptions: requests that have waited longest keep what they have.
        others = (handle for handle in reversed(self._kept) if handle != last)
        handle = next(others, last)
        found = handle in self._kept
        self.end_kept(handle)
        return found

    def holders(self) -> list[list[KVCacheBlock]]:
        """Return the blocks of each hold."""
        return [hold.blocks for hold in self._holds.values()]

    def check(self, handles: set[int]) -> None:
        """Raise AssertionError unless blocks are kept for ``handles``, the waiting requests, only."""
        kept = {hold.handle: number for number, hold in self._holds.items() if hold.handle >= 0}
        assert kept == self._kept, "wrong index of kept blocks"
        assert self._kept.keys() <= handles, "blocks are kept for requests that do not wait"

    def _add(self, hold: BlockHold) -> int:
        self._last += 1
        self._holds[self._last] = hold
        return self._last
