"""Recurrent layers (mamba): a state instead of keys and values, kept at block boundaries for prefix caching."""

import sys
from collections.abc import Sequence

from quire.protocol.model.kv_layout import KVGroup
from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.single_type import Extent, Unacknowledged, num_free
from quire.scheduler_proc.kv.windowed import SkippingManager


class MambaManager(SkippingManager):
    """A block holds one state: that after the last position computed in the block's span of positions.

    A chunk reads the entry that its predecessor's last position lies in and writes the entry that its own last
    position lies in; entries that it runs across are null. So with prefix caching a request holds the state that
    it goes on from, and one more for each step in flight that crossed a boundary; an entry whose boundary was the
    end of a chunk keeps that boundary's state, and its hash finds it. Without prefix caching there is one entry,
    rewritten in place.

    All requests of a step run through a layer together, so a state of this step would be read before it is written:
    states are found only once they are acknowledged.

    Owns ``crossed``: entries, by handle, that a chunk ran across: they hold a state from inside their span for good.
    """

    needs_acknowledgement = True

    def __init__(self, group: KVGroup, group_id: int, granules: int, pool: BlockPool) -> None:
        super().__init__(group, group_id, granules, pool)
        self.crossed: dict[int, set[int]] = {}
        if not pool.enable_caching:
            self.block_size = sys.maxsize  # one block for all positions

    def first_read(self, position: int) -> int:
        """The state after the position before it."""
        return max(0, position - 1)

    def begins_block(self, extent: Extent, num_hit_blocks: int) -> bool:
        """Also where the entries exist already and a boundary is run across again, after drafts were rejected."""
        if extent.num_computed_tokens // self.block_size < (extent.num_tokens - 1) // self.block_size:
            return True
        return extent.num_tokens > (num_hit_blocks + len(self.req_to_blocks.get(extent.handle, ()))) * self.block_size

    def num_blocks_to_allocate(self, extent: Extent, computed: Sequence[KVCacheBlock]) -> int:
        num_held = len(computed) + len(self.req_to_blocks.get(extent.handle, ()))
        return len(self._new_states(extent, num_held)) + num_free(computed)

    def allocate(self, extent: Extent) -> list[KVCacheBlock]:
        held = self.req_to_blocks.setdefault(extent.handle, [])
        last = (extent.num_tokens - 1) // self.block_size
        states = self._new_states(extent, len(held))
        new = [self.pool.null_block] * (last + 1 - len(held))
        for index, block in zip(states, self.pool.get_new_blocks(len(states)), strict=True):
            new[index - len(held)] = block
        held += new
        assert not held[last].is_null, f"handle {extent.handle} was set back to where it has no state"
        begun = extent.num_computed_tokens // self.block_size
        crossed = [index for index in range(begun, last) if not held[index].is_null]
        if crossed:
            skipped = self.num_skipped_blocks.get(extent.handle, 0)
            before = self.crossed.get(extent.handle, ())
            self.crossed[extent.handle] = {*crossed, *(index for index in before if index >= skipped)}
        return new

    def filled_blocks(self, handle: int, first: int, end: int) -> list[KVCacheBlock]:
        filled = super().filled_blocks(handle, first, end)
        for index in self.crossed.get(handle, ()):
            if first <= index < end:
                filled[index - first] = self.pool.null_block
        return filled

    def free(self, handle: int) -> None:
        super().free(handle)
        self.crossed.pop(handle, None)

    def num_blocks_for(self, num_tokens: int, num_encoder_tokens: int, unacknowledged: Unacknowledged) -> int:
        return min(-(-num_tokens // self.block_size), 1 + unacknowledged.max_steps)

    def check_request(self, handle: int, held: list[KVCacheBlock], where: str) -> None:
        super().check_request(handle, held, where)
        assert not held or not held[-1].is_null, f"{where}: the last state is missing"
        wrong = [i for i in self.crossed.get(handle, ()) if held[i].block_hash is not None]
        assert not wrong, f"{where}: a state from inside a block can be found, at {wrong}"
        end = self.num_cached_block.get(handle, 0)
        assert all(b.block_hash is None for b in held[end:]), f"{where}: a state can be found before its time"

    def _new_states(self, extent: Extent, num_held: int) -> list[int]:
        """Entries that need a block: that of the last position, and of the last one whose state came from elsewhere."""
        before = (extent.num_computed_tokens - 1) // self.block_size
        last = (extent.num_tokens - 1) // self.block_size
        return [index for index in sorted({before, last}) if index >= num_held]
