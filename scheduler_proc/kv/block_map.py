"""The map from content hash to cached block."""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from operator import itemgetter

from quire.scheduler_proc.kv.block import KVCacheBlock


class BlockHashToBlockMap:
    """Map from content hash to the block with that content, or to several (one prompt computed twice concurrently).

    Duplicates are kept rather than merged, so that a request's block ids never change. A single block is stored without
    a dict, because one dict per block would use more memory than the block itself.

    Invariants (``check``): a dict has at least two blocks; ``num_blocks`` counts all blocks.
    """

    def __init__(self) -> None:
        self._found: dict[bytes, KVCacheBlock | dict[int, KVCacheBlock]] = {}
        self.num_blocks = 0

    def get_one_block(self, key: bytes) -> KVCacheBlock | None:
        """Return the block with this content that was stored first, or None."""
        found = self._found.get(key)
        if found is None or isinstance(found, KVCacheBlock):
            return found
        return next(iter(found.values()))

    def get_cached_blocks(self, keys: Iterable[bytes]) -> list[KVCacheBlock]:
        """Return the first stored block of each key, up to the first unknown key.

        Blocks and dicts of blocks are never false, so ``takewhile(bool, ...)`` runs without Python code per key.
        """
        run = list(takewhile(bool, map(self._found.get, keys)))
        if self.num_blocks == len(self._found):
            return run  # type: ignore[return-value]  # no dict among the values
        return [b if isinstance(b, KVCacheBlock) else next(iter(b.values())) for b in run if b is not None]

    def find_blocks(self, keys: Iterable[bytes]) -> list[KVCacheBlock | None]:
        """Return the first stored block of each key, or None for an unknown key."""
        found = list(map(self._found.get, keys))
        if self.num_blocks == len(self._found):
            return found  # type: ignore[return-value]  # no dict among the values
        return [next(iter(each.values())) if isinstance(each, dict) else each for each in found]

    def insert_blocks(self, keys: Sequence[bytes], blocks: Sequence[KVCacheBlock]) -> Sequence[bytes]:
        """Add each block under its key. Returns, in order, the keys that are new."""
        self.num_blocks += len(blocks)
        firsts = list(map(self._found.setdefault, keys, blocks))  # no Python code per block
        if firsts == blocks:
            return keys
        new: list[bytes] = []
        for key, block, first in zip(keys, blocks, firsts, strict=True):
            if first is block:
                new.append(key)
                continue
            found = self._found[key]
            if isinstance(found, KVCacheBlock):
                self._found[key] = {found.block_id: found, block.block_id: block}
            else:
                found[block.block_id] = block
        return new

    def pop(self, key: bytes, block_id: int) -> KVCacheBlock | None:
        """Remove ``block_id`` from ``key``. Returns the block, or None when it was not stored under ``key``."""
        found = self._found.get(key)
        if found is None:
            return None
        if isinstance(found, KVCacheBlock):
            if found.block_id != block_id:
                return None
            del self._found[key]
            self.num_blocks -= 1
            return found
        block = found.pop(block_id, None)
        if block is not None:
            self.num_blocks -= 1
        if len(found) == 1:
            self._found[key] = next(iter(found.values()))
        return block

    def pop_blocks(self, keys: Sequence[bytes], blocks: Sequence[KVCacheBlock]) -> list[bytes]:
        """Remove each block from its key. Returns, in order, the keys that have no block left."""
        found = self._found
        if self.num_blocks == len(found):  # no duplicates: the usual case
            for key in keys:
                del found[key]
            self.num_blocks -= len(keys)
            return list(keys)
        for key, block in zip(keys, blocks, strict=True):
            self.pop(key, block.block_id)
        return [key for key in dict.fromkeys(keys) if key not in found]  # one call may remove two blocks of one key

    def pop_all(self, key: bytes) -> list[KVCacheBlock]:
        """Remove the key. Returns its blocks."""
        found = self._found.pop(key, {})
        blocks = [found] if isinstance(found, KVCacheBlock) else list(found.values())
        self.num_blocks -= len(blocks)
        return blocks

    def __len__(self) -> int:
        """Number of keys; ``num_blocks`` can be larger."""
        return len(self._found)

    def blocks(self) -> list[tuple[bytes, KVCacheBlock]]:
        """Return all (key, block) pairs. O(n), for checks and resets."""
        pairs: list[tuple[bytes, KVCacheBlock]] = []
        for key, found in self._found.items():
            pairs += [(key, b) for b in ([found] if isinstance(found, KVCacheBlock) else found.values())]
        return pairs

    def duplicates(self) -> list[tuple[int, bytes]]:
        """Return (block id, key) for keys with several blocks: sorted by key, then in lookup order."""
        if self.num_blocks == len(self._found):
            return []
        several = [(key, found) for key, found in self._found.items() if not isinstance(found, KVCacheBlock)]
        return [(block_id, key) for key, found in sorted(several, key=itemgetter(0)) for block_id in found]

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        pairs = self.blocks()
        assert len(pairs) == self.num_blocks, f"{len(pairs)} blocks cached, {self.num_blocks} counted"
        for key, found in self._found.items():
            blocks = {found.block_id: found} if isinstance(found, KVCacheBlock) else found
            assert len(blocks) > 1 or blocks is not found, f"a dict of {len(blocks)} block for {key.hex()}"
            assert all(b.block_id == i for i, b in blocks.items()), f"wrong block id for {key.hex()}"
