"""A free queue with classes: contents of several classes in an order by rank, and pinned ones after all others."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace, merge
from operator import attrgetter
from typing import Any, Protocol

from quire.scheduler_proc.kv.block import FreeKVCacheBlockQueue, KVCacheBlock

_ORDER = attrgetter("order")


class Freed:
    """The free cached blocks of one release, which is usually the ending of a request.

    Attributes:
        order: number of the release; the oldest has the lowest.
        at: time of the release, in seconds of ``Ranking.now``.
        turn_class: class of the request, which gives it a rank; 0 if it has not ended.
        pin: number of the pin that keeps it, or 0.
        blocks: what is left of it, the last block of the sequence first.
        num_out: blocks that a copy holds, and that will return.
        line: the line of a queue in which it is.
    """

    __slots__ = ("at", "blocks", "line", "num_out", "order", "pin", "turn_class")

    def __init__(self, order: int, at: float, turn_class: int, pin: int) -> None:
        self.order, self.at, self.turn_class, self.pin = order, at, turn_class, pin
        self.blocks = FreeKVCacheBlockQueue(())
        self.num_out = 0
        self.line: _Line | None = None


class Ranking(Protocol):
    """The order in which contents are evicted. Within a class the oldest must have the lowest rank.

    Attributes:
        now: seconds of the last event ``Clock``.
        version: another number after each change of ranks.
        num_classes: number of classes, 0 included.
    """

    @property
    def now(self) -> float: ...
    @property
    def version(self) -> int: ...
    @property
    def num_classes(self) -> int: ...

    def rank(self, freed: Freed) -> float:
        """Return the rank; the content with the lowest is evicted first."""
        ...


class RecentUse:
    """One class: what was used longest ago is evicted first."""

    now, version, num_classes = 0.0, 0, 1

    def rank(self, freed: Freed) -> float:
        return freed.order


class Releases:
    """What all queues of one pool share: the releases, their pins, and the release of each free cached block.

    Attributes:
        of_block: by block id; valid while the block is free and has a content.
        turn_class, pin: those of the blocks that are released next.
    """

    def __init__(self, num_blocks: int, ranking: Ranking) -> None:
        self.ranking = ranking
        self.of_block: list[Freed | None] = [None] * num_blocks
        self.turn_class = self.pin = 0
        self._pins: dict[int, list[Freed]] = {}
        self._is_open = False
        self._current: Freed | None = None
        self._last = 0

    @property
    def pins(self) -> Mapping[int, int]:
        """Number of free blocks that each pin still has. O(pins)."""
        counts = {pin: sum(freed.blocks.num_free_blocks for freed in kept) for pin, kept in self._pins.items()}
        return {pin: count for pin, count in counts.items() if count}

    def begin(self, turn_class: int, pin: int) -> None:
        """Begin a release, to which all blocks belong that are freed before ``end``."""
        self.turn_class, self.pin, self._is_open = turn_class, pin, True

    def end(self) -> None:
        self.turn_class = self.pin = 0
        self._is_open, self._current = False, None

    def take(self) -> Freed:
        """Return the release to which blocks that are freed now belong."""
        freed = self._current
        if freed is None:
            freed = self.add(self._last + 1, self.turn_class, self.pin)
            if self._is_open:
                self._current = freed
        return freed

    def add(self, order: int, turn_class: int, pin: int) -> Freed:
        """Return a new release without blocks."""
        freed = Freed(order, self.ranking.now, turn_class, pin)
        self._last = max(self._last, order)
        if pin:
            self._pins.setdefault(pin, []).append(freed)
        return freed

    def unpin(self, pin: int) -> list[Freed]:
        """Forget a pin. Returns its releases, which are not pinned any more."""
        kept = self._pins.pop(pin, [])
        for freed in kept:
            freed.pin = 0
        return kept

    def emptied(self, freed: Freed) -> None:
        """Forget a pinned release of which nothing is left."""
        if freed.pin and not freed.num_out:
            kept = self._pins[freed.pin]
            kept.remove(freed)
            if not kept:
                del self._pins[freed.pin]

    def check(self) -> None:
        """Raise AssertionError unless the index of pins is right."""
        for pin, kept in self._pins.items():
            assert kept, f"pin {pin} has no release"
            for freed in kept:
                assert freed.pin == pin, f"a release of pin {freed.pin} is listed under pin {pin}"
                assert freed.blocks.num_free_blocks or freed.num_out, f"pin {pin} has an empty release"


class _Line:
    """Releases by age, the oldest first. Skips those that are empty or have moved to another line."""

    def __init__(self, queue: "ClassedFreeQueue") -> None:
        self.queue = queue
        self._entries: list[Freed] = []
        self._begin = 0
        self._compact_at = 64

    def add(self, freed: Freed) -> None:
        entries, freed.line = self._entries, self
        if not entries or entries[-1].order < freed.order:
            entries.append(freed)
        else:
            at = bisect_left(entries, freed.order, self._begin, key=_ORDER)
            if at == len(entries) or entries[at] is not freed:
                entries.insert(at, freed)
        if len(entries) >= self._compact_at:
            self._entries, self._begin = list(self), 0
            self._compact_at = 2 * len(self._entries) + 64

    def first(self) -> Freed | None:
        """Return the oldest release, or None."""
        entries = self._entries
        while self._begin < len(entries):
            freed = entries[self._begin]
            if freed.line is self and freed.blocks.num_free_blocks:
                return freed
            self._begin += 1
        entries.clear()
        self._begin = 0
        return None

    def __iter__(self) -> Iterator[Freed]:
        for at in range(self._begin, len(self._entries)):
            freed = self._entries[at]
            if freed.line is self and freed.blocks.num_free_blocks:
                yield freed


class ClassedFreeQueue(FreeKVCacheBlockQueue):
    """Free blocks in reuse order: those without content, then contents by rank, then pinned ones by age.

    Contents are in one line per class. Within a line the order is that of their release, so that only the oldest of
    each line are compared: allocating costs O(1) per block, O(log classes) per release and O(classes) per new version
    of the ranking. A hit removes its blocks in O(1) each. Pins keep nothing from being allocated: a pinned content is
    evicted as soon as no other free block is left, the one that was pinned first before others.

    With one class and no pins it behaves like FreeKVCacheBlockQueue, except that blocks which lose their content while
    they are free are reused first.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock], releases: Releases) -> None:
        self._releases = releases
        self._uncached = FreeKVCacheBlockQueue(())
        self._lines = [_Line(self) for _ in range(releases.ranking.num_classes)]
        self._pinned = _Line(self)
        self._heap: list[tuple[float, int, int]] = []
        """Rank and order of the oldest release of each line as of when it was ranked, and the number of the line."""
        self._is_ranked = [False] * len(self._lines)
        self._version = releases.ranking.version
        self.num_free_blocks = 0
        self.append_n(blocks)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        if n > self.num_free_blocks:
            raise IndexError(f"cannot take {n} blocks: {self.num_free_blocks} are free")
        taken = self._uncached.popleft_n(min(n, self._uncached.num_free_blocks))
        while len(taken) < n:
            freed = self._next()
            taken += freed.blocks.popleft_n(min(n - len(taken), freed.blocks.num_free_blocks))
            self._note_empty(freed)
        self.num_free_blocks -= n
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
        freed = self._pinned.first()
        assert freed is not None, "free blocks are counted that are in no line"
        return freed

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
            self._pinned.add(freed)
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
        for block in blocks:
            freed = of_block[block.block_id]
            if freed is None:
                self._uncached.remove_n((block,))
            else:
                freed.blocks.remove_n((block,))
                self._note_empty(freed)
            self.num_free_blocks -= 1

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
        yield from self._pinned

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
        self.popleft_n(len(blocks))
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
        for line in (*self._lines, self._pinned):
            entries = list(line)
            assert [each.order for each in entries] == sorted({each.order for each in entries}), "wrong order in a line"
            for freed in entries:
                freed.blocks.check()
                kept = self._pinned if freed.pin else self._lines[freed.turn_class]
                assert line is kept, f"release {freed.order} with pin {freed.pin} is in another line"
                for block in freed.blocks.blocks():
                    assert of_block[block.block_id] is freed, f"{block!r} is in another release"
                    assert block.block_hash is not None, f"{block!r} is released without a content"
                count += freed.blocks.num_free_blocks
        assert count == self.num_free_blocks, f"{count} free blocks are queued, {self.num_free_blocks} counted"
        for number, line in enumerate(self._lines):
            ranked = self._is_ranked[number] or line.first() is None
            assert ranked, f"class {number} has contents, and no rank"
