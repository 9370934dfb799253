"""A naive model of a pool with pins, and random sequences of operations on both."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool


@dataclass(eq=False)
class Release:
    """What one release has left: ids of blocks, the next to be evicted first."""

    order: int
    pin: int
    blocks: list[int] = field(default_factory=list)


class Model:
    """Lists that are searched and sorted for each question."""

    def __init__(self, num_blocks: int) -> None:
        self.uncached = list(range(1, num_blocks))
        self.releases: list[Release] = []
        self.out: dict[int, Release] = {}

    def order(self) -> list[int]:
        """Return all free blocks in the order of their reuse."""
        kept = [each for each in self.releases if not each.pin]
        kept += sorted((each for each in self.releases if each.pin), key=lambda each: (-each.pin, each.order))
        return self.uncached + [block for each in kept for block in each.blocks]

    def remove(self, block: int) -> None:
        for blocks in (self.uncached, *(each.blocks for each in self.releases)):
            if block in blocks:
                blocks.remove(block)

    def pins(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for each in self.releases:
            if each.pin and each.blocks:
                found[each.pin] = found.get(each.pin, 0) + len(each.blocks)
        return found


class Case:
    """One pool and its model, to which the same is done. ``draw(low, high)`` decides, both ends included."""

    def __init__(self, draw: Callable[[int, int], int], make: Callable[..., BlockPool] = BlockPool) -> None:
        self.draw = draw
        self.pool = make(draw(4, 24), True, has_pins=True)
        self.model = Model(self.pool.num_blocks)
        self.held: list[list[KVCacheBlock]] = []
        self.copies: list[tuple[list[KVCacheBlock], Any, list[tuple[int, int | None, Release]]]] = []
        self.num_keys = 0

    def check(self) -> None:
        self.pool.check([*self.held, *(blocks for blocks, _, _ in self.copies)])
        assert [b.block_id for b in self.pool.free_block_queue.blocks()] == self.model.order()
        assert self.pool.pins == self.model.pins()
        assert self.pool.num_free_blocks == len(self.model.order()), "pinned blocks can be allocated"

    def step(self) -> None:
        kinds = ["allocate", "free", "hit"] * 2 + ["free", "unpin", "invalidate", "copy", "end_copy", "drop"]
        getattr(self, kinds[self.draw(0, len(kinds) - 1)])()
        self.check()

    def allocate(self) -> None:
        count = self.draw(0, self.pool.num_free_blocks)
        expected = self.model.order()[:count]
        taken = self.pool.get_new_blocks(count)
        assert [block.block_id for block in taken] == expected
        for block in taken:
            self.model.remove(block.block_id)
        full = taken[: self.draw(0, count)]
        self.num_keys += len(full)
        self.pool.cache_full_blocks(full, [b"key %d" % (self.num_keys - at) for at in range(len(full))])
        self.held.append(taken)

    def free(self) -> None:
        if not self.held:
            return
        blocks = self.held.pop(self.draw(0, len(self.held) - 1))
        release = Release(len(self.model.releases) + 1, max(self.draw(-3, 2), 0))
        ended = [block for block in reversed(blocks) if block.ref_cnt == 1]
        self.pool.begin_release(release.pin)
        self.pool.free_blocks(reversed(blocks))
        self.pool.end_release()
        release.blocks = [block.block_id for block in ended if block.block_hash is not None]
        self.model.releases.append(release)
        self.model.uncached[:0] = [block.block_id for block in ended if block.block_hash is None]

    def hit(self) -> None:
        cached = [block for block in self.pool.blocks if block.block_hash is not None]
        hits = [block for block in cached if not self.draw(0, 2)]
        self.pool.touch(hits)
        for block in hits:
            self.model.remove(block.block_id)
        self.held.append(hits)

    def unpin(self) -> None:
        number = self.draw(0, 3)
        self.pool.unpin(number)
        for release in self.model.releases:
            if release.pin == number:
                release.pin = 0

    def invalidate(self) -> None:
        cached = [block for block in self.pool.blocks if block.block_hash is not None]
        if cached:
            block = cached[self.draw(0, len(cached) - 1)]
            assert block.block_hash is not None
            self.pool.invalidate(block.block_hash)
            if block.ref_cnt == 0:
                self.model.remove(block.block_id)
                self.model.uncached.insert(0, block.block_id)

    def copy(self) -> None:
        blocks = list(self.pool.next_evicted())[: self.draw(0, 4)]
        places: list[tuple[int, int | None, Release]] = []
        for block in blocks:
            release = next(each for each in self.model.releases if block.block_id in each.blocks)
            at = release.blocks.index(block.block_id)
            places.append((block.block_id, release.blocks[at - 1] if at else None, release))
            release.blocks.remove(block.block_id)
        self.copies.append((blocks, self.pool.begin_copy(blocks), places))

    def end_copy(self) -> None:
        if not self.copies:
            return
        blocks, token, places = self.copies.pop(self.draw(0, len(self.copies) - 1))
        self.pool.end_copy(blocks, token)
        for block, (number, before, release) in zip(reversed(blocks), reversed(places), strict=True):
            if block.ref_cnt:
                continue
            if block.block_hash is None:
                self.model.uncached.insert(0, number)
            else:
                at = release.blocks.index(before) + 1 if before in release.blocks else 0
                release.blocks.insert(at, number)

    def drop(self) -> None:
        if self.draw(0, 3):
            return
        order = self.model.order()
        self.pool.drop_contents()
        self.model.uncached = order
        for release in self.model.releases:
            release.blocks = []
