"""What the tiers have of the prefix of a waiting request."""

from dataclasses import dataclass, field

from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.cache_request import CacheRequest
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.kv.tiers import Tier


@dataclass(slots=True)
class FoundContents:
    """The longest prefix that all tiers together have.

    Attributes:
        num_tokens: its length.
        cached: the part on the device.
        pages: the part that must be loaded, with the tier of each.
        keys: content of each page.
        indices: of the block of each page in the table of its group; of a state's, of the last block before it.
        states: the slot with the state at the end of the prefix, if the device has it and the model has states.
        num_parts: how many of the last pages are parts of that state otherwise.
    """

    num_tokens: int = 0
    cached: list[KVCacheBlock] = field(default_factory=list)
    pages: list[tuple[Tier, KVCacheBlock]] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    states: list[KVCacheBlock] = field(default_factory=list)
    num_parts: int = 0

    @property
    def num_blocks(self) -> int:
        """Number of the pages of blocks."""
        return len(self.pages) - self.num_parts

    def last(self, count: int) -> "FoundContents":
        """Return only the last pages of blocks."""
        some = slice(max(self.num_blocks - count, 0), self.num_blocks)
        return FoundContents(self.num_tokens, [], self.pages[some], self.keys[some], self.indices[some])

    def by_tier(self) -> dict[str, list[int]]:
        """Return the indices by the name of the tier."""
        found: dict[str, list[int]] = {}
        for (tier, _), index in zip(self.pages, self.indices, strict=True):
            found.setdefault(tier.name, []).append(index)
        return found

    def fits(self, kv: KVCacheManager) -> bool:
        """Whether there are pages, and the pool has free blocks for them besides the cached ones.

        The watermark is not kept free: computing keeps it free for its first chunk only, so that a request would be
        computed where its load does not fit.
        """
        revived = sum(block.ref_cnt == 0 for block in self.cached)
        num_slots = sum(slot.ref_cnt == 0 for slot in self.states) + (self.num_parts > 0)
        # One slot stays free, in which the request is computed if the load never ends.
        if num_slots and (kv.states is None or kv.states.pool.num_free_blocks <= num_slots):
            return False
        return bool(self.pages) and self.num_blocks <= kv.pool.num_free_blocks - revived


def find_contents(kv: KVCacheManager, request: CacheRequest, first: int = 0) -> FoundContents:
    """Return what there is of a request's prefix, without the blocks before index ``first`` of each group."""
    blocks_by_group, num_tokens = kv.find_in_all_tiers(request)
    found = FoundContents(num_tokens)
    for manager, blocks in zip(kv.coordinator.managers, blocks_by_group, strict=True):
        keys = manager.keys(request.block_hashes, 0, len(blocks))
        for index, (block, key) in enumerate(zip(blocks, keys, strict=True)):
            if index < first or block.is_null:
                continue
            if (tier := kv.tier_of(block)) is None:
                found.cached.append(block)
            else:
                found.pages.append((tier, block))
                found.keys.append(key)
                found.indices.append(index)
    slot, keys = kv.find_state(request, num_tokens)
    if slot is not None:
        found.states.append(slot)
    elif keys:
        pages = kv.find_pages(keys)
        found.num_parts, found.pages, found.keys = len(pages), found.pages + pages, [*found.keys, *keys]
        found.indices += [num_tokens // kv.block_size - 1] * len(pages)
    return found
