"""The free queue: behaves like a list, and removes from its middle in O(1)."""

import random

import pytest

from quire.scheduler_proc.kv.block import FreeKVCacheBlockQueue, KVCacheBlock


def make(n: int) -> tuple[list[KVCacheBlock], FreeKVCacheBlockQueue]:
    blocks = [KVCacheBlock(i) for i in range(n)]
    return blocks, FreeKVCacheBlockQueue(blocks)


def ids(queue: FreeKVCacheBlockQueue) -> list[int]:
    return [b.block_id for b in queue.blocks()]


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_match_a_list(seed: int) -> None:
    rng = random.Random(seed)
    blocks, queue = make(rng.randrange(1, 12))
    free, taken = list(range(len(blocks))), []
    for _ in range(400):
        action = rng.randrange(4)
        if action == 0 and free:
            n = rng.randrange(len(free) + 1)
            assert [b.block_id for b in queue.popleft_n(n)] == free[:n]
            taken += free[:n]
            del free[:n]
        elif action == 1 and free:
            chosen = rng.choice(free)
            queue.remove(blocks[chosen])
            free.remove(chosen)
            taken.append(chosen)
        elif taken:
            rng.shuffle(taken)
            some = [taken.pop() for _ in range(rng.randrange(len(taken) + 1))]
            if action == 2:
                queue.append_n([blocks[i] for i in some])
                free += some
            else:
                queue.prepend_n([blocks[i] for i in some])
                free = some + free
        queue.check()
        assert ids(queue) == free and queue.num_free_blocks == len(free)


def test_blocks_are_queued_in_initial_order() -> None:
    blocks, queue = make(3)
    assert ids(queue) == [0, 1, 2]
    assert queue.popleft() is blocks[0]
    queue.append(blocks[0])
    assert ids(queue) == [1, 2, 0]


def test_popping_an_empty_queue_raises_and_changes_nothing() -> None:
    _, queue = make(2)
    with pytest.raises(IndexError, match="cannot take 3 blocks: 2 are free"):
        queue.popleft_n(3)
    assert ids(queue) == [0, 1]
    queue.popleft_n(2)
    with pytest.raises(IndexError):
        queue.popleft()
    assert queue.popleft_n(0) == []
    queue.check()


def test_removing_absent_or_adding_queued_blocks_is_refused() -> None:
    blocks, queue = make(3)
    queue.popleft()
    with pytest.raises(ValueError, match="not in the free queue"):
        queue.remove(blocks[0])
    for put in (queue.append_n, queue.prepend_n):
        with pytest.raises(ValueError, match="already"):
            put([blocks[1]])


def test_duplicates_in_one_call_are_refused() -> None:
    blocks, queue = make(3)
    queue.popleft()
    with pytest.raises(ValueError, match="already"):
        queue.append_n([blocks[0], blocks[0]])


@pytest.mark.parametrize("damage", ["count", "backward", "skip", "loop"])
def test_check_fails_on_a_corrupted_list(damage: str) -> None:
    blocks, queue = make(4)
    queue.check()
    if damage == "count":
        queue.num_free_blocks += 1
    elif damage == "backward":
        blocks[2].prev_free_block = blocks[0]
    elif damage == "skip":
        blocks[0].next_free_block = blocks[2]
    else:
        blocks[3].prev_free_block = blocks[1]
    with pytest.raises(AssertionError):
        queue.check()
