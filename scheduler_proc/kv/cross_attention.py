"""Cross attention: keys and values of an encoder's output, which grow with nothing."""

from collections.abc import Sequence

from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.single_type import Extent, SingleTypeKVCacheManager, Unacknowledged


class CrossAttentionManager(SingleTypeKVCacheManager):
    """Blocks for all encoder positions, given at once; private to the request, for token hashes do not name them."""

    has_hits = False

    def begins_block(self, extent: Extent, num_hit_blocks: int) -> bool:
        return extent.num_encoder_tokens > 0 and not self.req_to_blocks.get(extent.handle)

    def num_blocks_to_allocate(self, extent: Extent, computed: Sequence[KVCacheBlock]) -> int:
        return self._num_blocks(extent) if self.begins_block(extent, 0) else 0

    def add_computed_blocks(self, handle: int, computed: Sequence[KVCacheBlock]) -> None:
        """Nothing of this is ever found."""
        assert not computed, "cross attention has no hits"

    def allocate(self, extent: Extent) -> list[KVCacheBlock]:
        if not self.begins_block(extent, 0):
            return []
        new = self.pool.get_new_blocks(self._num_blocks(extent))
        self.req_to_blocks[extent.handle] = list(new)
        return new

    def cache_blocks(self, handle: int, block_hashes: Sequence[bytes], num_tokens: int) -> None:
        """Nothing of this is ever found."""

    def forget_content(self, block_hashes: Sequence[bytes], num_kept_tokens: int) -> None:
        """Nothing of this is ever found."""

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_length: int, alignment: int
    ) -> list[KVCacheBlock]:
        return []

    def remove_skipped_blocks(self, handle: int, num_acknowledged_tokens: int) -> None:
        """Every token reads all of it."""

    def num_blocks_for(self, num_tokens: int, num_encoder_tokens: int, unacknowledged: Unacknowledged) -> int:
        return -(-num_encoder_tokens // self.block_size)

    def check_request(self, handle: int, held: list[KVCacheBlock], where: str) -> None:
        for block in held:
            assert not block.is_null and block.ref_cnt == 1 and block.block_hash is None, f"{where}: {block!r}"

    def _num_blocks(self, extent: Extent) -> int:
        return -(-extent.num_encoder_tokens // self.block_size)
