"""The books of the tiers behind the device: which content each page has. The bytes are where workers find them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import numpy as np

from quire.protocol.block_hash import group_key
from quire.protocol.wire.transfer_messages import DiskContents
from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.events import KVEventRecorder
from quire.scheduler_proc.kv.fair_pool import FairPages


class Tier:
    """Pages of one tier, each with room for the content of one block of any KV group.

    Owns the pages as a BlockPool of its own: a page is a block, with the same keys, and the least recently used content
    is evicted first. A page is named only when its content is known to be complete on every rank. Contents outlive the
    workers.

    Attributes:
        first_id: id of the first page in messages, in which the pages of all tiers have one sequence of ids.
        generations: by page, the number of the transfer that first stored its content; part of what a worker checks.
        is_open: whether contents can be stored here.
        is_slow: whether copies to these pages may take so long that no request waits for them.
    """

    is_slow: ClassVar[bool] = False

    def __init__(self, pages: BlockPool, first_id: int = 0) -> None:
        self.pages = pages
        self.first_id = first_id
        self.generations = np.zeros(pages.num_blocks, np.int64)
        self.is_open = True

    @property
    def name(self) -> str:
        return self.pages.medium

    def owns(self, block: KVCacheBlock) -> bool:
        """Whether this is one of the pages, and not a block of the device or of another tier."""
        return block.block_id < len(self.pages.blocks) and self.pages.blocks[block.block_id] is block

    def use(self, pages: Sequence[KVCacheBlock]) -> None:
        """Let the contents of these pages be evicted after all others."""
        self.pages.touch(pages)
        self.pages.free_blocks(pages)

    def take(self, owners: Sequence[int]) -> list[KVCacheBlock]:
        """Return a page to fill for each of these accounts, fewer if fewer are free. Their contents are evicted."""
        # Fewer pages are no error: what is not stored is merely evicted, as it would be without a tier.
        owners = owners[: self.pages.num_free_blocks]
        taken: dict[int, Iterator[KVCacheBlock]] = {}
        for account, count in Counter(owners).items():
            self.pages.act_for(account)
            taken[account] = iter(self.pages.get_new_blocks(count))
        return [next(taken[account]) for account in owners]

    def publish(self, pages: Sequence[KVCacheBlock], keys: Sequence[bytes]) -> None:
        """Name complete pages and release them."""
        self.pages.cache_full_blocks(pages, keys)
        self.pages.free_blocks(pages)

    def release(self, pages: Iterable[KVCacheBlock]) -> None:
        """Release pages that were read, or that were not filled."""
        self.pages.free_blocks(pages)

    def discard(self, pages: Sequence[KVCacheBlock]) -> None:
        """Release pages that may be filled with what must not be found."""
        self.pages.free_blocks(pages)


def host_tier(num_pages: int, events: KVEventRecorder | None, *, is_fair: bool = False) -> Tier:
    """Return host memory. Contents are evicted from the account that has the most if ``is_fair``.

    ``num_pages`` includes page 0, which is not used. ``events``: as in BlockPool.
    """
    return Tier(FairPages(num_pages, events, "host") if is_fair else BlockPool(num_pages, True, events, "host"))


class _DiskPool(BlockPool):
    """Pages whose contents would be found again by the next engine. ``invalid``: those that it must not find."""

    def __init__(self, num_pages: int, events: KVEventRecorder | None) -> None:
        super().__init__(num_pages, True, events, "disk")
        self.invalid: list[int] = []

    def invalidate(self, key: bytes) -> list[KVCacheBlock]:
        # Forgetting a key in this process is not enough for a disk: the header in the file still names the content, and
        # the next engine would believe it.
        pages = super().invalidate(key)
        self.invalid += [page.block_id for page in pages]
        return pages

    def hold(self, pages: Sequence[KVCacheBlock]) -> None:
        """Hold free pages without content."""
        self.num_changes += 1
        self.free_block_queue.remove_n(pages)
        for page in pages:
            page.ref_cnt = 1


class DiskTier(Tier):
    """Pages on disk, whose contents outlive the engine.

    It is open as soon as all contents of the file are known.

    Attributes:
        forgotten: contents up to this generation must not be found, now and by later engines.
    """

    is_slow: ClassVar[bool] = True

    def __init__(self, num_pages: int, first_id: int, forgotten: int, events: KVEventRecorder | None) -> None:
        """``num_pages`` includes page 0, which describes the file. ``first_id``: as in Tier."""
        self._pool = _DiskPool(num_pages, events)
        super().__init__(self._pool, first_id)
        # Nothing is stored before all contents of the file are known: a page that seems free might be the one of a
        # content that the workers have not read yet.
        self.is_open = False
        self.forgotten = forgotten

    def discard(self, pages: Sequence[KVCacheBlock]) -> None:
        self._pool.invalid += [page.block_id for page in pages]
        super().discard(pages)

    def take_invalid(self) -> list[int]:
        """Return and clear the pages whose headers must be overwritten before they are filled again."""
        invalid, self._pool.invalid = self._pool.invalid, []
        return invalid

    def open(self, contents: DiskContents) -> bool:
        """Name a part of the contents of the file, which can then be found; with the last part, open.

        Parts that begin with the oldest contents let contents be evicted in the order in which they were stored.
        Returns False, without any effect, if it is open already or these cannot be its contents.
        """
        count, num_pages = len(contents.page_ids), self.pages.num_blocks
        ids = contents.page_ids - self.first_id
        groups = np.zeros(count, np.int32) if contents.groups is None else contents.groups
        fits = len(contents.generations) == len(groups) == count and len(contents.keys) % max(count, 1) == 0
        # The message comes from another process, so that everything is checked before anything changes. Refused
        # contents cost hits; contents of a wrong page would cost answers.
        if self.is_open or not fits or len(np.unique(ids)) < count or not ((ids > 0) & (ids < num_pages)).all():
            return False
        named = [self.pages.blocks[page] for page in ids.tolist()]
        if any(page.block_hash is not None for page in named):
            return False
        size = len(contents.keys) // max(count, 1)
        found = [
            at
            # Generations are numbers of transfers, which grow over restarts too, so their order is the order in which
            # contents were stored: the best known replacement for the times of their last use.
            for at in np.argsort(contents.generations, kind="stable").tolist()
            if contents.generations[at] > self.forgotten
        ]
        self.generations[ids] = contents.generations
        pages = [named[at] for at in found]
        # Held and published like pages that were just filled, so that they enter the queue of evictable pages in this
        # order.
        self._pool.hold(pages)
        self.publish(pages, [group_key(contents.keys[at * size : (at + 1) * size], int(groups[at])) for at in found])
        self.is_open = contents.is_last
        return True


class AnyTier:
    """The contents of the device and of the tiers behind it; the first that has a content counts."""

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self._pools = pools

    def get_cached_block(self, key: bytes) -> KVCacheBlock | None:
        for pool in self._pools:
            if (block := pool.get_cached_block(key)) is not None:
                return block
        return None

    def get_cached_blocks(self, keys: Iterable[bytes]) -> list[KVCacheBlock]:
        found: list[KVCacheBlock] = []
        for key in keys:
            block = self.get_cached_block(key)
            if block is None:
                break
            found.append(block)
        return found
