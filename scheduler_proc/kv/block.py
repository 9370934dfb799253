"""One block's bookkeeping, and the queue of free blocks that is threaded through the blocks themselves."""

from collections.abc import Sequence
from typing import Any


class KVCacheBlock:
    """Metadata of one physical block; the KV itself lies with the workers.

    Attributes:
        block_id: index in the pool; 0 is the null block.
        ref_cnt: how many requests hold it.
        block_hash: key under which its content can be found, while it is full and unchanged.
        prev_free_block, next_free_block: neighbours in the free queue; None when it is not in the queue.
        is_null: the one block that stands for "no block".
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
    """Free blocks, the next to be reused first. A doubly linked list, so that a cache hit leaves its middle in O(1).

    Two sentinels stand at the ends, so that no operation has an edge case. Links live in the blocks: nothing is
    allocated when blocks come and go.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free_block = self._tail
        self._tail.prev_free_block = self._head
        self.append_n(blocks)

    def popleft(self) -> KVCacheBlock:
        """Remove and return the first block. Raises IndexError when there is none."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Remove and return the first ``n`` blocks in order. Raises IndexError when there are fewer."""
        if n > self.num_free_blocks:
            raise IndexError(f"{n} blocks wanted, {self.num_free_blocks} free")
        taken: list[KVCacheBlock] = []
        block: Any = self._head.next_free_block  # Any: n links are there, and an assert for each would be felt
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
        """Take ``block`` out of wherever it stands. Raises ValueError when it is not in the queue."""
        self.remove_n((block,))

    def remove_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Take each block out. Raises ValueError at the first that is not in the queue; those before it are out."""
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
        """Put ``blocks`` at the end, in order: reused last."""
        last = self._tail.prev_free_block
        assert last is not None
        self._link(last, blocks, self._tail)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put ``blocks`` at the front, in order: reused next."""
        first = self._head.next_free_block
        assert first is not None
        self._link(self._head, blocks, first)

    def _link(self, before: KVCacheBlock, blocks: Sequence[KVCacheBlock], after: KVCacheBlock) -> None:
        for block in blocks:
            if block.next_free_block is not None:
                raise ValueError(f"{block!r} is in the free queue already")
            block.prev_free_block = before
            before.next_free_block = block
            # Set at once, so that a block listed twice in this very call is noticed.
            block.next_free_block = after
            before = block
        before.next_free_block = after
        after.prev_free_block = before
        self.num_free_blocks += len(blocks)

    def blocks(self) -> list[KVCacheBlock]:
        """All free blocks in order: for checks and tests, O(n)."""
        found: list[KVCacheBlock] = []
        block = self._head.next_free_block
        while block is not None and block is not self._tail:
            found.append(block)
            block = block.next_free_block
        return found

    def check(self) -> None:
        """Raise AssertionError unless both directions of the list agree with each other and with the count."""
        forward = self.blocks()
        assert len(forward) == self.num_free_blocks, f"{len(forward)} linked, {self.num_free_blocks} counted"
        assert len({id(b) for b in forward}) == len(forward), "a block stands twice in the free queue"
        before: KVCacheBlock = self._head
        for block in forward:
            assert block.prev_free_block is before, f"{block!r} has a wrong neighbour"
            before = block
        assert self._tail.prev_free_block is before, "the tail has a wrong neighbour"
