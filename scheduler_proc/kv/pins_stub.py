"""A pool whose free blocks may be pinned: they are allocated after all others."""

from collections.abc import Iterator, Sequence
from typing import Any

from quire.scheduler_proc.kv.block import FreeKVCacheBlockQueue, KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool


class PinningQueue(FreeKVCacheBlockQueue):
    """Free blocks in reuse order: the plain ones, then the pinned ones.

    Attributes:
        pin: number with which appended blocks are pinned, or 0.
        pins: by number, the pinned blocks by id.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.pin = 0
        self.pins: dict[int, dict[int, KVCacheBlock]] = {}
        self._pin_of: dict[int, int] = {}
        self._plain, self._pinned = FreeKVCacheBlockQueue(blocks), FreeKVCacheBlockQueue(())
        self.num_free_blocks = len(blocks)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        if n > self.num_free_blocks:
            raise IndexError(f"cannot take {n} blocks: {self.num_free_blocks} are free")
        taken = self._plain.popleft_n(min(n, self._plain.num_free_blocks))
        if len(taken) < n:
            last = self._pinned.popleft_n(n - len(taken))
            for block in last:
                self._forget(block)
            taken += last
        self.num_free_blocks -= n
        return taken

    def remove_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            if block.block_id in self._pin_of:
                self._forget(block)
                self._pinned.remove_n((block,))
            else:
                self._plain.remove_n((block,))
            self.num_free_blocks -= 1

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        if self.pin and blocks:
            self._pinned.append_n(blocks)
            self.pins.setdefault(self.pin, {}).update({block.block_id: block for block in blocks})
            self._pin_of.update(dict.fromkeys((block.block_id for block in blocks), self.pin))
        else:
            self._plain.append_n(blocks)
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._plain.prepend_n(blocks)
        self.num_free_blocks += len(blocks)

    def unpin(self, pin: int) -> None:
        blocks = list(self.pins.get(pin, {}).values())
        self.remove_n(blocks)
        self._plain.append_n(blocks)
        self.num_free_blocks += len(blocks)

    def _forget(self, block: KVCacheBlock) -> None:
        pin = self._pin_of.pop(block.block_id)
        del self.pins[pin][block.block_id]
        if not self.pins[pin]:
            del self.pins[pin]

    def upcoming(self) -> Iterator[KVCacheBlock]:
        yield from self._plain.upcoming()
        yield from self._pinned.upcoming()

    def take_out(self, blocks: Sequence[KVCacheBlock]) -> Any:
        places = []
        for block in blocks:
            pin = self._pin_of.get(block.block_id, 0)
            queue = self._pinned if pin else self._plain
            if pin:
                self._forget(block)
            places.append((pin, queue.take_out((block,))))
        self.num_free_blocks -= len(blocks)
        return places

    def put_back(self, blocks: Sequence[KVCacheBlock], places: Any) -> None:
        for block, (_, place) in zip(reversed(blocks), reversed(places), strict=True):
            if block.ref_cnt == 0:
                self._plain.put_back((block,), place)
                self.num_free_blocks += 1

    def runs(self) -> list[tuple[int, list[int]]]:
        """Return the pinned blocks in reuse order, those in a row with the same pin together."""
        found: list[tuple[int, list[int]]] = []
        for block in self._pinned.upcoming():
            pin = self._pin_of[block.block_id]
            if not found or found[-1][0] != pin:
                found.append((pin, []))
            found[-1][1].append(block.block_id)
        return found

    def check(self) -> None:
        self._plain.check()
        self._pinned.check()
        pinned = {block.block_id for block in self._pinned.blocks()}
        assert pinned == self._pin_of.keys() == {block_id for held in self.pins.values() for block_id in held}
        assert self._plain.num_free_blocks + len(pinned) == self.num_free_blocks, "wrong number of free blocks"


class PinningPool(BlockPool):
    """A block pool with a class of pinned blocks."""

    free_block_queue: PinningQueue

    def _make_queue(self) -> PinningQueue:
        return PinningQueue(self.blocks)

    def drop_contents(self) -> None:
        super().drop_contents()
        for pin in list(self.free_block_queue.pins):
            self.free_block_queue.unpin(pin)
