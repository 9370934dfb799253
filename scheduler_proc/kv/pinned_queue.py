"""A free queue with pins: contents by age, and pinned ones after all others."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from quire.scheduler_proc.kv.block import FreeKVCacheBlockQueue, KVCacheBlock
from quire.scheduler_proc.kv.releases import Freed, ReleaseLine, Releases


class PinnedFreeQueue(FreeKVCacheBlockQueue):
    """Free blocks in reuse order: those without content, then contents in the order of their release, and then those
    with a pin, the highest pin first.

    Allocating costs O(1) per block and per release. A hit removes its blocks in O(1) each. Pins keep nothing from being
    allocated: a pinned content is evicted as soon as no other free block is left, that of the highest pin first: of the
    youngest program.

    Without pins it behaves like FreeKVCacheBlockQueue, except that blocks which lose their content while they are free
    are reused first.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock], releases: Releases) -> None:
        self._releases = releases
        self._uncached = FreeKVCacheBlockQueue(())
        self._line = ReleaseLine()
        self._pinned: dict[int, ReleaseLine] = {}
        """By pin, its releases; or an empty line, until there are many of these."""
        self._most_pinned = 64
        self.num_free_blocks = 0
        self.append_n(blocks)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        if n > self.num_free_blocks:
            raise IndexError(f"cannot take {n} blocks: {self.num_free_blocks} are free")
        self.num_free_blocks -= n
        taken = self._uncached.popleft_n(min(n, self._uncached.num_free_blocks))
        missing = n - len(taken)
        if not missing:
            return taken
        num_pinned = 0
        while len(taken) < n:
            freed = self._next()
            count = min(n - len(taken), freed.blocks.num_free_blocks)
            taken += freed.blocks.popleft_n(count)
            if freed.pin:
                num_pinned += count
            self._note_empty(freed)
        self._releases.num_evicted["lru"] += missing - num_pinned
        if num_pinned:
            self._releases.num_evicted["pinned"] += num_pinned
        return taken

    def _next(self) -> Freed:
        """Return the release that is evicted next."""
        if (freed := self._line.first()) is not None:
            return freed
        while self._pinned:
            # The highest pin is the youngest program. Giving up the oldest pin first was tried, and made conversations
            # of coding agents 5 % longer (docs/log/2026-11-27.md).
            pin = max(self._pinned)
            if (freed := self._pinned[pin].first()) is not None:
                return freed
            del self._pinned[pin]
        raise AssertionError("free blocks are counted that are in no line")

    def _list(self, freed: Freed) -> None:
        """Put a release with blocks into its line."""
        line = self._line
        if freed.pin:
            line = self._pinned.setdefault(freed.pin, ReleaseLine(self._line))
        line.add(freed)
        # Empty lines are dropped in bulk, when their number has doubled. Dropping a line when its last block leaves
        # would look for it at each hit; never dropping it was a leak of one line per pin that has ended.
        if len(self._pinned) >= self._most_pinned:
            self._pinned = {pin: line for pin, line in self._pinned.items() if line.first() is not None}
            self._most_pinned = 2 * len(self._pinned) + 64

    def _note_empty(self, freed: Freed) -> None:
        if not freed.blocks.num_free_blocks:
            self._releases.emptied(freed)

    def remove_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        of_block = self._releases.of_block
        # The blocks of a hit usually are of one release, which then removes them together.
        for freed, run in groupby(blocks, lambda block: of_block[block.block_id]):
            part = tuple(run)
            if freed is None:
                self._uncached.remove_n(part)
            else:
                freed.blocks.remove_n(part)
                self._note_empty(freed)
            self.num_free_blocks -= len(part)

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add cached blocks to the current release, and reuse the others after those without content."""
        cached = [block for block in blocks if block.block_hash is not None]
        if len(cached) < len(blocks):
            self._add_uncached([block for block in blocks if block.block_hash is None], self._uncached.append_n)
        if cached:
            freed = self._releases.take()
            self._add(freed, cached)
            self._list(freed)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Prepend blocks without cached content."""
        self._add_uncached(blocks, self._uncached.prepend_n)

    def _add_uncached(self, blocks: Sequence[KVCacheBlock], put: Any) -> None:
        put(blocks)
        for block in blocks:
            self._releases.of_block[block.block_id] = None
        self.num_free_blocks += len(blocks)

    def _add(self, freed: Freed, blocks: Sequence[KVCacheBlock]) -> None:
        freed.blocks.append_n(blocks)
        for block in blocks:
            self._releases.of_block[block.block_id] = freed
        self.num_free_blocks += len(blocks)

    def upcoming(self) -> Iterator[KVCacheBlock]:
        yield from self._uncached.upcoming()
        for freed in self._freed():
            yield from freed.blocks.upcoming()

    def _freed(self) -> Iterator[Freed]:
        """Yield all releases in the order in which they would be evicted now."""
        yield from self._line
        for pin in sorted(self._pinned, reverse=True):
            yield from self._pinned[pin]

    def take_out(self, blocks: Sequence[KVCacheBlock]) -> list[tuple[Freed, Any]]:
        """Remove cached blocks that return with ``put_back``. Returns the release of each, and its place there."""
        places: list[tuple[Freed, Any]] = []
        for block in blocks:
            freed = self._releases.of_block[block.block_id]
            assert freed is not None, f"{block!r} is copied without a content"
            (place,) = freed.blocks.take_out((block,))
            freed.num_out += 1
            places.append((freed, place))
            self._note_empty(freed)
        self.num_free_blocks -= len(blocks)
        return places

    def put_back(self, blocks: Sequence[KVCacheBlock], places: list[tuple[Freed, Any]]) -> None:
        for block, (freed, place) in zip(reversed(blocks), reversed(places), strict=True):
            freed.num_out -= 1
            if block.ref_cnt:
                pass
            elif block.block_hash is None:
                self.prepend_n((block,))
            else:
                # The place is valid only while the block before it is still in the same release: it may have been
                # allocated, and freed into another one, during the copy.
                before = place[0].block_id
                if before < 0 or self._releases.of_block[before] is freed:
                    freed.blocks.put_back((block,), (place,))
                else:
                    freed.blocks.prepend_n((block,))
                self._releases.of_block[block.block_id] = freed
                self.num_free_blocks += 1
                self._list(freed)
            self._note_empty(freed)

    def forget_contents(self) -> None:
        """Keep the order of all blocks, none of which has a content any more."""
        blocks = self.blocks()
        self.remove_n(blocks)
        self.append_n(blocks)

    # ---- checks

    def check(self) -> None:
        """Raise AssertionError unless each free block is in the release that ``Releases`` names, in the right line."""
        self._uncached.check()
        of_block = self._releases.of_block
        count = self._uncached.num_free_blocks
        assert all(of_block[b.block_id] is None for b in self._uncached.blocks()), "a block without content is released"
        for line in (self._line, *self._pinned.values()):
            entries = list(line)
            assert [each.order for each in entries] == sorted({each.order for each in entries}), "wrong order in a line"
            for freed in entries:
                freed.blocks.check()
                kept = self._pinned[freed.pin] if freed.pin else self._line
                assert line is kept, f"release {freed.order} with pin {freed.pin} is in another line"
                for block in freed.blocks.blocks():
                    assert of_block[block.block_id] is freed, f"{block!r} is in another release"
                    assert block.block_hash is not None, f"{block!r} is released without a content"
                count += freed.blocks.num_free_blocks
        assert count == self.num_free_blocks, f"{count} free blocks are queued, {self.num_free_blocks} counted"
