"""A pool whose free blocks may be pinned: they are allocated after all others."""

from collections.abc import Iterator, Sequence
from typing import Any

from quire.scheduler_proc.kv.block import FreeKVCacheBlockQueue, KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool


class PinningQueue(FreeKVCacheBlockQueue):
    """Free blocks in reuse order: the plain ones, then the pinned ones, those with the highest pin first.

    Attributes:
        pin: number with which appended blocks are pinned, or 0.
        pins: by number, the pinned blocks in reuse order.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.pin = 0
        self.pins: dict[int, FreeKVCacheBlockQueue] = {}
        self._pin_of: dict[int, int] = {}
        self._plain = FreeKVCacheBlockQueue(blocks)
        self.num_free_blocks = len(blocks)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        if n > self.num_free_blocks:
            raise IndexError(f"cannot take {n} blocks: {self.num_free_blocks} are free")
        taken = self._plain.popleft_n(min(n, self._plain.num_free_blocks))
        while len(taken) < n:
            pin = max(self.pins)
            some = self.pins[pin].popleft_n(min(n - len(taken), self.pins[pin].num_free_blocks))
            for block in some:
                del self._pin_of[block.block_id]
            self._remove_if_empty(pin)
            taken += some
        self.num_free_blocks -= n
        return taken

    def remove_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            pin = self._pin_of.pop(block.block_id, 0)
            queue = self.pins[pin] if pin else self._plain
            queue.remove_n((block,))
            if pin:
                self._remove_if_empty(pin)
            self.num_free_blocks -= 1

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        if self.pin and blocks:
            self.pins.setdefault(self.pin, FreeKVCacheBlockQueue(())).append_n(blocks)
            self._pin_of.update(dict.fromkeys((block.block_id for block in blocks), self.pin))
        else:
            self._plain.append_n(blocks)
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._plain.prepend_n(blocks)
        self.num_free_blocks += len(blocks)

    def unpin(self, pin: int) -> None:
        if (queue := self.pins.pop(pin, None)) is not None:
            blocks = queue.popleft_n(queue.num_free_blocks)
            for block in blocks:
                del self._pin_of[block.block_id]
            self._plain.append_n(blocks)

    def _remove_if_empty(self, pin: int) -> None:
        if not self.pins[pin].num_free_blocks:
            del self.pins[pin]

    def upcoming(self) -> Iterator[KVCacheBlock]:
        yield from self._plain.upcoming()
        for pin in sorted(self.pins, reverse=True):
            yield from self.pins[pin].upcoming()

    def take_out(self, blocks: Sequence[KVCacheBlock]) -> Any:
        places = []
        for block in blocks:
            pin = self._pin_of.pop(block.block_id, 0)
            queue = self.pins[pin] if pin else self._plain
            places.append((pin, queue.take_out((block,))))
            if pin:
                self._remove_if_empty(pin)
        self.num_free_blocks -= len(blocks)
        return places

    def put_back(self, blocks: Sequence[KVCacheBlock], places: Any) -> None:
        for block, (pin, place) in zip(reversed(blocks), reversed(places), strict=True):
            if block.ref_cnt:
                continue
            queue = self.pins.get(pin)
            if queue is not None:
                queue.prepend_n((block,))
                self._pin_of[block.block_id] = pin
            elif pin or place[0][0].block_id in self._pin_of:  # its neighbour is in another queue now
                self._plain.prepend_n((block,))
            else:
                self._plain.put_back((block,), place)
            self.num_free_blocks += 1

    def pinned_blocks(self) -> list[tuple[int, list[int]]]:
        """Return the pinned blocks in reuse order by pin."""
        return [(pin, [block.block_id for block in queue.upcoming()]) for pin, queue in self.pins.items()]

    def check(self) -> None:
        self._plain.check()
        found = {}
        for pin, queue in self.pins.items():
            queue.check()
            assert queue.num_free_blocks, f"pin {pin} has no blocks"
            found.update({block.block_id: pin for block in queue.blocks()})
        assert found == self._pin_of, "a block is not in the queue of its pin"
        assert self._plain.num_free_blocks + len(found) == self.num_free_blocks, "wrong number of free blocks"


class PinningPool(BlockPool):
    """A block pool with a class of pinned blocks."""

    free_block_queue: PinningQueue

    def _make_queue(self) -> PinningQueue:
        return PinningQueue(self.blocks)

    def drop_contents(self) -> None:
        super().drop_contents()
        for pin in list(self.free_block_queue.pins):
            self.free_block_queue.unpin(pin)
