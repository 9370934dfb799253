"""The metadata of one block, and the free queue, a linked list through the blocks."""

from collections.abc import Iterator, Sequence
from typing import Any


class KVCacheBlock:
    """Metadata of one physical block. The keys and values are in the workers' memory.

    Attributes:
        block_id: index in the pool; 0 is the null block.
        ref_cnt: number of requests and holds (holds.py) that hold the block.
        block_hash: key under which the content can be found; None unless the block is full and unchanged.
        prev_free_block, next_free_block: neighbours in the free queue; None when the block is not in the queue.
        is_null: whether this is the null block.
    """

    __slots__ = ("block_hash", "block_id", "is_null", "next_free_block", "prev_free_block", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.prev_free_block: KVCacheBlock | None = None
        self.next_free_block: KVCacheBlock | None = None
        self.is_null = False

    def __repr__(self) -> str:
        cached = "cached" if self.block_hash else "plain"
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, {cached})"


class FreeKVCacheBlockQueue:
    """Free blocks in reuse order: a doubly linked list, so that a cache hit is removed from its middle in O(1).

    Sentinels at both ends remove the edge cases. The links are block attributes, so queue operations allocate nothing.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free_block = self._tail
        self._tail.prev_free_block = self._head
        self.append_n(blocks)

    def __del__(self) -> None:
        """Unlink the sentinels: each release has a queue, and cycles of old objects are not collected under load."""
        if "_head" in self.__dict__:  # subclasses consist of several queues
            self._head.next_free_block = None

    def popleft(self) -> KVCacheBlock:
        """Remove and return the first block. Raises IndexError when the queue is empty."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Remove and return the first ``n`` blocks in order. Raises IndexError when there are fewer."""
        if n > self.num_free_blocks:
            raise IndexError(f"cannot take {n} blocks: {self.num_free_blocks} are free")
        taken: list[KVCacheBlock] = []
        block: Any = self._head.next_free_block  # Any: n links exist, and one assert per link is slow
        for _ in range(n):
            taken.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        self._head.next_free_block = block
        block.prev_free_block = self._head
        self.num_free_blocks -= n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Remove ``block`` from any position. Raises ValueError when it is not in the queue."""
        self.remove_n((block,))

    def remove_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Remove each block. Raises ValueError at the first that is not in the queue; those before it are removed."""
        for block in blocks:
            before, after = block.prev_free_block, block.next_free_block
            if before is None or after is None:
                raise ValueError(f"{block!r} is not in the free queue")
            before.next_free_block = after
            after.prev_free_block = before
            block.prev_free_block = block.next_free_block = None
            self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        self.append_n((block,))

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Append ``blocks`` in order: they are reused last."""
        last = self._tail.prev_free_block
        assert last is not None
        self._link(last, blocks, self._tail)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Prepend ``blocks`` in order: they are reused next."""
        first = self._head.next_free_block
        assert first is not None
        self._link(self._head, blocks, first)

    def upcoming(self) -> Iterator[KVCacheBlock]:
        """Yield free blocks in reuse order. The queue must not change meanwhile."""
        block = self._head.next_free_block
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free_block

    def take_out(self, blocks: Sequence[KVCacheBlock]) -> Any:
        """Remove blocks that return with ``put_back``. Returns their places: the block before each, and its key."""
        places: list[tuple[Any, bytes | None]] = []
        for block in blocks:
            before: Any = block.prev_free_block
            self.remove(block)
            places.append((before, before.block_hash))
        return places

    def put_back(self, blocks: Sequence[KVCacheBlock], places: Any) -> None:
        """Return those of the blocks that nothing holds to their places.

        If the block before one was allocated in the meantime, this one would be allocated soon: it is put in front.
        """
        for block, (before, key) in zip(reversed(blocks), reversed(places), strict=True):
            if block.ref_cnt == 0:
                after = before.next_free_block
                if after is None or before.block_hash != key:
                    before, after = self._head, self._head.next_free_block
                self._link(before, (block,), after)

    def _link(self, before: KVCacheBlock, blocks: Sequence[KVCacheBlock], after: KVCacheBlock) -> None:
        for block in blocks:
            if block.next_free_block is not None:
                raise ValueError(f"{block!r} is already in the free queue")
            block.prev_free_block = before
            before.next_free_block = block
            # Set here so that a block listed twice in one call is detected.
            block.next_free_block = after
            before = block
        before.next_free_block = after
        after.prev_free_block = before
        self.num_free_blocks += len(blocks)

    def blocks(self) -> list[KVCacheBlock]:
        """Return all free blocks in order. O(n), for checks and tests."""
        return list(self.upcoming())

    def check(self) -> None:
        """Raise AssertionError unless both directions of the list agree with each other and with the count."""
        forward = self.blocks()
        assert len(forward) == self.num_free_blocks, f"{len(forward)} linked, {self.num_free_blocks} counted"
        assert len({id(b) for b in forward}) == len(forward), "a block is in the free queue twice"
        before: KVCacheBlock = self._head
        for block in forward:
            assert block.prev_free_block is before, f"{block!r}: wrong prev_free_block"
            before = block
        assert self._tail.prev_free_block is before, "wrong prev_free_block at the tail"
