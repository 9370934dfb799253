"""Releases: what requests have left in the free queue, by age, and the pins on it."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from operator import attrgetter

from quire.scheduler_proc.kv.block import FreeKVCacheBlockQueue

_ORDER = attrgetter("order")


class Freed:
    """The free cached blocks of one release, which is usually the ending of a request.

    Attributes:
        order: number of the release; the oldest has the lowest.
        pin: number of the pin that keeps it, or 0.
        blocks: what is left of it, the last block of the sequence first.
        num_out: blocks that a copy holds, and that will return.
        line: the line in which it is; None without blocks, which avoids a reference cycle.
    """

    __slots__ = ("blocks", "line", "num_out", "order", "pin")

    def __init__(self, order: int, pin: int) -> None:
        self.order, self.pin = order, pin
        self.blocks = FreeKVCacheBlockQueue(())
        self.num_out = 0
        self.line: ReleaseLine | None = None


class Releases:
    """What all queues of one pool share: the releases, their pins, and the release of each free cached block.

    Attributes:
        of_block: by block id; valid while the block is free and has a content.
        num_evicted: contents that were evicted: ``lru`` by last use, ``pinned`` although they were pinned.
        pin: that of the blocks that are released next, or 0.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_evicted: Counter[str] = Counter()
        self.of_block: list[Freed | None] = [None] * num_blocks
        self.pin = 0
        self._pins: dict[int, list[Freed]] = {}
        self._is_open = False
        self._current: Freed | None = None
        self._last = 0

    @property
    def pins(self) -> Mapping[int, int]:
        """Number of free blocks that each pin still has. O(pins)."""
        counts = {pin: sum(freed.blocks.num_free_blocks for freed in kept) for pin, kept in self._pins.items()}
        return {pin: count for pin, count in counts.items() if count}

    def begin(self, pin: int) -> None:
        """Begin a release, to which all blocks belong that are freed before ``end``."""
        self.pin, self._is_open = pin, True

    def end(self) -> None:
        self.pin, self._is_open, self._current = 0, False, None

    def take(self) -> Freed:
        """Return the release to which blocks that are freed now belong."""
        freed = self._current
        if freed is None:
            freed = self.add(self._last + 1, self.pin)
            if self._is_open:
                self._current = freed
        return freed

    def add(self, order: int, pin: int) -> Freed:
        """Return a new release without blocks."""
        freed = Freed(order, pin)
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
        """Forget a release of which nothing is left, or only copied blocks."""
        freed.line = None
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


class ReleaseLine:
    """Releases by age, the oldest first. Skips those that are empty or have moved to another line."""

    def __init__(self, unpinned: "ReleaseLine | None" = None) -> None:
        """``unpinned``: the line into which its releases move without their pin."""
        self.unpinned = unpinned
        self._entries: list[Freed] = []
        self._begin = 0
        self._compact_at = 64

    def add(self, freed: Freed) -> None:
        entries, freed.line = self._entries, self
        if not entries or entries[-1].order < freed.order:
            entries.append(freed)
        else:
            # Only a release that returns from a pin, or from a copy, is older than the newest entry.
            at = bisect_left(entries, freed.order, self._begin, key=_ORDER)
            if at == len(entries) or entries[at] is not freed:
                entries.insert(at, freed)
        # Entries that moved or emptied stay until here, because removing from the middle of a list is O(n). Doubling
        # the limit makes this O(1) per release.
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
