"""A free queue with classes: contents of several classes in an order by rank, and pinned ones after all others."""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace, merge
from itertools import groupby
from typing import Any

from quire.scheduler_proc.kv.block import FreeKVCacheBlockQueue, KVCacheBlock
from quire.scheduler_proc.kv.releases import Freed, Line, Releases


class ClassedFreeQueue(FreeKVCacheBlockQueue):
    """Free blocks in reuse order: those without content, then contents by rank, and then those with a pin, the highest
    pin first.

    Contents are in one line per class. Within a line the order is that of their release, so that only the oldest of
    each line are compared: allocating costs O(1) per block, O(log classes) per release and O(classes) per new version
    of the ranking. A hit removes its blocks in O(1) each. Pins keep nothing from being allocated: a pinned content is
    evicted as soon as no other free block is left, that of the highest pin first: of the youngest program.

    With one class and no pins it behaves like FreeKVCacheBlockQueue, except that blocks which lose their content while
    they are free are reused first.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock], releases: Releases) -> None:
        self._releases = releases
        self._uncached = FreeKVCacheBlockQueue(())
        self._lines = [Line(self) for _ in range(releases.ranking.num_classes)]
        self._pinned: dict[int, Line] = {}
        """By pin, its releases."""
        self._heap: list[tuple[float, int, int]] = []
        """Rank and order of the oldest release of each line as of when it was ranked, and the number of the line."""
        self._is_ranked = [False] * len(self._lines)
        self._version = releases.ranking.version
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
        self._releases.num_evicted[self._releases.ranking.policy] += missing - num_pinned
        if num_pinned:
            self._releases.num_evicted["pinned"] += num_pinned
        return taken

    def _next(self) -> Freed:
        """Return the release that is evicted next.

        A rank in the heap may be out of date, because hits have removed the oldest release of a line. The right one is
        higher, so that only the lowest must be compared.
        """
        ranking, heap = self._releases.ranking, self._heap
        if self._version != ranking.version:
            self._rank_all()
        while heap:
            _, order, number = heap[0]
            freed = self._lines[number].first()
            if freed is None:
                heappop(heap)
                self._is_ranked[number] = False
            elif freed.order == order:
                return freed
            else:
                heapreplace(heap, (ranking.rank(freed), freed.order, number))
        return self._next_pinned()

    def _next_pinned(self) -> Freed:
        while self._pinned:
            pin = max(self._pinned)
            if (freed := self._pinned[pin].first()) is not None:
                return freed
            del self._pinned[pin]
        raise AssertionError("free blocks are counted that are in no line")

    def _rank_all(self) -> None:
        ranking, heap = self._releases.ranking, self._heap
        heap.clear()
        for number, line in enumerate(self._lines):
            freed = line.first()
            self._is_ranked[number] = freed is not None
            if freed is not None:
                heap.append((ranking.rank(freed), freed.order, number))
        heapify(heap)
        self._version = ranking.version

    def _list(self, freed: Freed) -> None:
        """Put a release with blocks into its line."""
        if freed.pin:
            self._pinned.setdefault(freed.pin, Line(self)).add(freed)
            return
        number = freed.turn_class
        line = self._lines[number]
        is_newest = not self._is_ranked[number]
        line.add(freed)
        if is_newest:
            self._is_ranked[number] = True
            heappush(self._heap, (self._releases.ranking.rank(freed), freed.order, number))
        elif line.first() is freed:
            self._version = -1  # older than what was ranked

    def _note_empty(self, freed: Freed) -> None:
        if freed.pin and not freed.blocks.num_free_blocks:
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

    def unpin(self, freed: Freed) -> None:
        """Put a release that was pinned in this queue where it would be without the pin."""
        if freed.blocks.num_free_blocks:
            self._list(freed)

    def upcoming(self) -> Iterator[KVCacheBlock]:
        yield from self._uncached.upcoming()
        for freed in self._freed():
            yield from freed.blocks.upcoming()

    def _freed(self) -> Iterator[Freed]:
        """Yield all releases in the order in which they would be evicted now."""
        rank = self._releases.ranking.rank
        ranked = [((rank(freed), freed.order, freed) for freed in line) for line in self._lines]
        yield from (freed for _, _, freed in merge(*ranked))
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

    # ---- keyframes

    def left(self) -> list[tuple[int, int, int]]:
        """Return (order, pin, number of blocks) of each release, in the order of ``blocks``.

        Before them, order 0 stands for blocks without content, if there are any.
        """
        found = [(freed.order, freed.pin, freed.blocks.num_free_blocks) for freed in self._freed()]
        count = self._uncached.num_free_blocks
        return [(0, 0, count), *found] if count else found

    def restore(self, blocks: Sequence[KVCacheBlock], left: Sequence[tuple[int, int, int]]) -> None:
        """Fill an empty queue with another's ``blocks`` and what it had ``left``. Raises ValueError if they differ."""
        if sum(count for _, _, count in left) != len(blocks) or any(min(each) < 0 or not each[2] for each in left):
            raise ValueError(f"the free queue has {len(blocks)} blocks, and its releases do not (got {left[:8]})")
        at = 0
        for order, pin, count in left:
            part = blocks[at : at + count]
            at += count
            if order:
                freed = self._releases.add(order, 0, pin)
                self._add(freed, part)
                self._list(freed)
            else:
                self._add_uncached(part, self._uncached.append_n)

    # ---- checks

    def check(self) -> None:
        """Raise AssertionError unless each free block is in the release that ``Releases`` names, in the right line."""
        self._uncached.check()
        of_block = self._releases.of_block
        count = self._uncached.num_free_blocks
        assert all(of_block[b.block_id] is None for b in self._uncached.blocks()), "a block without content is released"
        for line in (*self._lines, *self._pinned.values()):
            entries = list(line)
            assert [each.order for each in entries] == sorted({each.order for each in entries}), "wrong order in a line"
            for freed in entries:
                freed.blocks.check()
                kept = self._pinned[freed.pin] if freed.pin else self._lines[freed.turn_class]
                assert line is kept, f"release {freed.order} with pin {freed.pin} is in another line"
                for block in freed.blocks.blocks():
                    assert of_block[block.block_id] is freed, f"{block!r} is in another release"
                    assert block.block_hash is not None, f"{block!r} is released without a content"
                count += freed.blocks.num_free_blocks
        assert count == self.num_free_blocks, f"{count} free blocks are queued, {self.num_free_blocks} counted"
        for number, line in enumerate(self._lines):
            ranked = self._is_ranked[number] or line.first() is None
            assert ranked, f"class {number} has contents, and no rank"
