"""The block pool: reference counts, order of reuse, and how long cached contents can be found."""

import pytest

from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.block_map import BlockHashToBlockMap
from quire.scheduler_proc.kv.block_pool import BlockPool


def pool_of(usable: int = 6) -> BlockPool:
    return BlockPool(usable + 1, enable_caching=True)


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [b.block_id for b in blocks]


def test_the_map_returns_the_first_block_of_a_key() -> None:
    found, a, b, c = BlockHashToBlockMap(), *(KVCacheBlock(i) for i in (3, 1, 2))
    assert found.get_one_block(b"k") is None and len(found) == 0
    for block in (a, b, c):
        found.insert_blocks([b"k"], [block])
    found.insert_blocks([b"other"], [a])
    assert found.get_one_block(b"k") is a and len(found) == 2
    assert found.pop(b"k", a.block_id) is a
    assert found.get_one_block(b"k") is b
    assert sorted(x.block_id for key, x in found.blocks() if key == b"k") == [1, 2]


def test_pop_removes_only_the_given_block() -> None:
    found, a, b = BlockHashToBlockMap(), KVCacheBlock(1), KVCacheBlock(2)
    found.insert_blocks([b"k"], [a])
    assert found.pop(b"k", 2) is None and found.pop(b"x", 1) is None
    assert found.get_one_block(b"k") is a
    found.insert_blocks([b"k"], [b])
    assert found.pop(b"k", 9) is None
    assert found.pop(b"k", 1) is a and found.pop(b"k", 1) is None
    assert found.pop(b"k", 2) is b
    assert len(found) == 0 and found.blocks() == []


def test_the_null_block_is_never_allocated() -> None:
    pool = pool_of(3)
    assert pool.num_usable_blocks == pool.num_free_blocks == 3
    assert ids(pool.get_new_blocks(3)) == [1, 2, 3]
    with pytest.raises(IndexError):
        pool.get_new_blocks(1)
    assert pool.null_block.block_id == 0


@pytest.mark.parametrize("num_blocks", [1, 0, -1])
def test_a_pool_without_a_usable_block_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(num_blocks, enable_caching=True)


def test_freeing_a_block_that_is_not_held_is_refused() -> None:
    pool = pool_of()
    (block,) = pool.get_new_blocks(1)
    pool.free_blocks([block])
    with pytest.raises(ValueError, match="freed but not held"):
        pool.free_blocks([block])
    pool.check([])
    (again,) = pool.get_new_blocks(1)
    with pytest.raises(ValueError, match="freed but not held"):
        pool.free_blocks([again, again])


def test_a_duplicate_is_found_after_the_first_block_is_evicted() -> None:
    pool = pool_of(2)
    first, second = pool.get_new_blocks(2)
    pool.cache_full_blocks([first], [b"a"])
    pool.cache_full_blocks([second], [b"a"])
    pool.free_blocks([first])
    pool.get_new_blocks(1)
    assert pool.get_cached_block(b"a") is second
    pool.check()


def test_invalidated_content_is_not_found_in_any_block() -> None:
    pool = pool_of(2)
    for block in pool.get_new_blocks(2):
        pool.cache_full_blocks([block], [b"a"])
    pool.invalidate(b"a")
    pool.invalidate(b"never known")
    assert pool.get_cached_block(b"a") is None
    pool.check()


def test_get_cached_blocks_stops_at_the_first_unknown_key() -> None:
    pool = pool_of(5)
    blocks = pool.get_new_blocks(5)
    for block, key in zip(blocks, (b"a", b"b", b"b", b"c"), strict=False):
        pool.cache_full_blocks([block], [key])
    assert ids(pool.get_cached_blocks([b"a", b"b", b"c"])) == [1, 2, 4]
    assert ids(pool.get_cached_blocks([b"a", b"x", b"c"])) == [1]
    assert pool.get_cached_blocks([b"x", b"a"]) == pool.get_cached_blocks([]) == []
    assert [block and block.block_id for block in pool.find_blocks([b"a", b"x", b"c"])] == [1, None, 4]
    pool.free_blocks([blocks[1], *blocks[2:]])
    assert ids(pool.get_new_blocks(2)) == [5, 2]
    assert ids(pool.get_cached_blocks(iter([b"a", b"b", b"c"]))) == [1, 3, 4]


def test_cached_and_evicted_blocks_are_counted() -> None:
    pool = pool_of(4)
    blocks = pool.get_new_blocks(3)
    for block, key in zip(blocks, (b"a", b"a", b"b"), strict=True):
        pool.cache_full_blocks([block], [key])
    assert (pool.num_cached_blocks, pool.num_evicted_blocks) == (3, 0)
    pool.free_blocks(blocks)
    pool.get_new_blocks(2)  # the never used one, and one of the two with "a"
    assert (pool.num_cached_blocks, pool.num_evicted_blocks) == (2, 1)
    pool.invalidate(b"a")
    assert (pool.num_cached_blocks, pool.num_evicted_blocks) == (1, 1)
    pool.check()


def test_duplicates_may_be_evicted_in_one_call() -> None:
    pool = pool_of(3)
    blocks = pool.get_new_blocks(3)
    for block in blocks:
        pool.cache_full_blocks([block], [b"a"])
    pool.free_blocks(blocks)
    pool.get_new_blocks(3)
    assert pool.num_cached_blocks == 0 and pool.num_evicted_blocks == 3
    pool.check()


def test_touch_and_free_skip_the_null_block() -> None:
    pool = pool_of(2)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(blocks, [b"a", b"b"])
    mixed = [pool.null_block, blocks[0], pool.null_block, blocks[1]]
    pool.touch(mixed)
    assert pool.null_block.ref_cnt == 0 and blocks[0].ref_cnt == 2
    for _ in range(2):
        pool.free_blocks(mixed)
    pool.touch(mixed)  # no longer in the free queue
    assert pool.num_free_blocks == 0
    pool.free_blocks(mixed)
    pool.check([])


def test_one_call_may_hold_a_block_twice() -> None:
    pool = pool_of(2)
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks([block], [b"a"])
    pool.free_blocks([block])
    pool.touch([block, block])
    pool.check([[block] * 2])
    pool.free_blocks([block, block])
    pool.check([])


def test_an_invalid_free_leaves_the_pool_consistent() -> None:
    pool = pool_of(3)
    first, second = pool.get_new_blocks(2)
    with pytest.raises(ValueError, match="freed but not held"):
        pool.free_blocks([first, first, second])
    pool.check([[second]])


def test_a_block_accepts_one_hash_and_the_null_block_none() -> None:
    pool = pool_of()
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks([block], [b"a"])
    for wrong in (block, pool.null_block):
        with pytest.raises(ValueError, match="cannot be cached"):
            pool.cache_full_blocks([wrong], [b"b"])


def test_reset_clears_the_cache_only_when_no_block_is_held() -> None:
    pool = pool_of()
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks([block], [b"a"])
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(b"a") is block
    pool.free_blocks([block])
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(b"a") is None
    pool.check([])


def _damage(pool: BlockPool, damage: str) -> None:
    """Block 1 is held and caches "a", 2 is held, the others are free."""
    block, other, null = pool.blocks[1], pool.blocks[2], pool.null_block
    match damage:
        case "lost":
            other.ref_cnt = 0
        case "null free":
            pool.free_block_queue.append(null)
        case "null held":
            null.ref_cnt = 1
        case "null cached":
            null.block_hash = b"n"
            pool.cached_block_hash_to_block.insert_blocks([b"n"], [null])
        case "null moved":
            pool.null_block = other
        case "two nulls":
            other.is_null = True
        case "negative":
            pool.blocks[5].ref_cnt = -1
        case "hash":
            block.block_hash = b"b"
        case "map":
            other.block_hash = b"c"
        case "count":
            pool.cached_block_hash_to_block.num_blocks = 2
        case "moved":
            pool.blocks[1:3] = [other, block]


@pytest.mark.parametrize(
    "damage",
    [
        *("lost", "null free", "null held", "null cached", "null moved", "two nulls", "negative", "hash", "map"),
        *("count", "moved"),
    ],
)
def test_check_detects_violations(damage: str) -> None:
    pool = pool_of()
    block, other = pool.get_new_blocks(2)
    pool.cache_full_blocks([block], [b"a"])
    pool.check([[block, other]])
    _damage(pool, damage)
    with pytest.raises(AssertionError):
        pool.check()


def test_check_counts_holders() -> None:
    pool = pool_of()
    blocks = pool.get_new_blocks(2)
    with pytest.raises(AssertionError, match="holders"):
        pool.check([blocks, blocks[:1]])


@pytest.mark.parametrize("damage", ["single", "id"])
def test_check_of_the_map_detects_violations(damage: str) -> None:
    found, a, b = BlockHashToBlockMap(), KVCacheBlock(1), KVCacheBlock(2)
    for block in (a, b):
        found.insert_blocks([b"k"], [block])
    found.check()
    if damage == "id":
        a.block_id = 3
    else:
        entry = found._found[b"k"]  # a state that no method produces
        assert isinstance(entry, dict)
        del entry[2]
        found.num_blocks = 1
    with pytest.raises(AssertionError):
        found.check()
