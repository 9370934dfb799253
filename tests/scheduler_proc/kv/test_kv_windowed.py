"""Sliding windows: held blocks, freed blocks, and the blocks that a hit needs."""

import pytest
from kv_cases import case, chunked, layout_of, shape, sliding, step

from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import KVGroup
from quire.scheduler_proc.kv.manager import KVCacheManager


def manager_of(group: KVGroup, usable: int = 20, **options: int | bool) -> KVCacheManager:
    return KVCacheManager(layout_of(group), usable + 1, True, **options)  # type: ignore[arg-type]


def filled(group: KVGroup, num_tokens: int = 17, **options: int | bool) -> KVCacheManager:
    """Return a manager after one request computed ``num_tokens`` tokens and ended."""
    kv = manager_of(group, **options)
    first = case(1, num_tokens)
    first.skip_reading_prefix_cache = True
    step(kv, first, num_tokens)
    kv.free(first)
    return kv


def forget(kv: KVCacheManager, *blocks: int) -> None:
    for index in blocks:
        kv.pool.invalidate(case(0, 100).block_hashes[index])


def hit(kv: KVCacheManager, num_tokens: int = 17) -> tuple[int, str]:
    """Return the tokens and entries that a request of this length finds."""
    request = case(9, num_tokens)
    hits, num_tokens = kv.get_computed_blocks(request)
    return num_tokens, "".join(".#"[not b.is_null] for b in hits[0])


def test_blocks_left_of_the_window_are_freed() -> None:
    kv, request = manager_of(sliding(5)), case(1, 40)
    seen = []
    for _ in range(4):
        step(kv, request, 4)
        seen.append(shape(kv, request))
    # With 8 computed, position 8 reads 4 to 8, so block 0 is not read any more.
    assert seen == ["#", "##", ".##", "..##"]
    assert kv.block_ids(request)[0].tolist() == [0, 0, 3, 4] and kv.pool.num_free_blocks == 18


def test_partially_read_blocks_are_kept() -> None:
    kv, request = manager_of(sliding(6)), case(1, 40)
    for _ in range(3):
        step(kv, request, 4)
    assert shape(kv, request) == "###", "position 8 reads from position 3 on"


def test_blocks_are_freed_by_acknowledged_positions() -> None:
    kv, request = manager_of(sliding(5)), case(1, 40)
    for _ in range(4):
        step(kv, request, 4, answered=False)
    assert shape(kv, request) == "####"
    request.num_acknowledged_tokens = 12
    step(kv, request, 4)
    assert shape(kv, request) == "..###"


def test_a_step_within_a_block_frees_nothing() -> None:
    kv, request = manager_of(sliding(3)), case(1, 40)
    step(kv, request, 9)
    assert not any(step(kv, request, 1) or ()) and shape(kv, request) == "###"
    step(kv, request, 3)
    assert shape(kv, request) == "..##"


@pytest.mark.parametrize(
    ("window", "entries"), [(1, "...."), (2, "...#"), (5, "...#"), (6, "..##"), (9, "..##"), (10, ".###"), (99, "####")]
)
def test_a_hit_needs_only_the_window(window: int, entries: str) -> None:
    kv = filled(sliding(window))
    assert hit(kv) == (16, entries)
    forget(kv, *(index for index, entry in enumerate(entries) if entry == "."))
    assert hit(kv) == (16, entries)


def test_a_missing_block_shortens_the_hit_to_the_prefix_before_it() -> None:
    kv = filled(sliding(6))
    forget(kv, 2)
    assert hit(kv) == (8, "##")
    forget(kv, 0)
    assert hit(kv) == (0, "")


def test_null_blocks_of_a_hit_are_neither_held_nor_freed() -> None:
    kv = filled(sliding(5))
    request = case(2, 17)
    step(kv, request, 1)
    assert shape(kv, request) == "...##" and kv.pool.num_free_blocks == 18
    assert kv.pool.null_block.ref_cnt == 0
    kv.free(request)
    kv.check()
    assert kv.pool.num_free_blocks == 20


def test_a_window_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'sliding_window' needs a window of at least 1 \(got 0\)"):
        manager_of(sliding(0))


def test_a_window_of_one_needs_no_cached_blocks() -> None:
    assert hit(manager_of(sliding(1))) == (16, "....")


def test_a_window_bounds_the_held_blocks() -> None:
    kv = manager_of(sliding(9), usable=7, max_step_tokens=8, pipeline_depth=2)
    # 8 positions before the first one in flight and 16 in flight, starting and ending within a block.
    assert [kv.num_blocks_for(n) for n in (1, 12, 24, 1000)] == [1, 3, 6, 7]
    assert kv.max_tokens == 2**31 - 1
    assert manager_of(sliding(9), usable=7).max_tokens == 28, "unbounded positions in flight"
    request = case(1, 2000)
    for _ in range(100):
        previous = request.num_computed_tokens
        assert step(kv, request, 8, answered=False) is not None
        request.num_acknowledged_tokens = previous


@pytest.mark.parametrize("damage", ["hole", "skipped", "early", "twice"])
def test_check_detects_violations(damage: str) -> None:
    kv, request = manager_of(sliding(9)), case(1, 40)
    for _ in range(4):
        step(kv, request, 5)
    manager = kv.coordinator.managers[0]
    held = manager.req_to_blocks[1]
    assert shape(kv, request) == ".####"
    kv.coordinator.check()
    if damage == "hole":
        held[2] = kv.pool.null_block
    elif damage == "skipped":
        held[0] = kv.pool.blocks[1]
    elif damage == "early":
        manager.num_cached_block[1] -= 1
    else:
        held[2] = held[3]
    with pytest.raises(AssertionError, match="group 0, handle 1"):
        kv.coordinator.check()


def test_blocks_before_the_chunk_of_the_next_token_are_freed() -> None:
    kv, request = manager_of(chunked(8)), case(1, 40)
    request.skip_reading_prefix_cache = True
    seen = []
    for _ in range(6):
        step(kv, request, 4)
        seen.append(shape(kv, request))
    # With 8 acknowledged the next token begins a chunk. Before it is planned, both blocks are freed at once.
    assert seen == ["#", "##", "..#", "..##", "....#", "....##"]
    kv.check()


@pytest.mark.parametrize(
    ("num_tokens", "forgotten", "found"),
    [
        (17, (), (16, "....")),  # ends where a chunk begins: no block is read
        (15, (), (12, "..#")),
        (15, (2,), (8, "..")),
        (23, (4,), (16, "....")),
        (23, (), (20, "....#")),
    ],
)
def test_a_hit_needs_the_blocks_of_its_last_chunk(
    num_tokens: int, forgotten: tuple[int, ...], found: tuple[int, str]
) -> None:
    kv = filled(chunked(8), 23)
    forget(kv, *forgotten)
    assert hit(kv, num_tokens) == found


def test_a_chunk_that_begins_within_a_block_keeps_the_block() -> None:
    kv, request = manager_of(chunked(6)), case(1, 40)
    request.skip_reading_prefix_cache = True
    for _ in range(4):
        step(kv, request, 4)
    assert shape(kv, request) == "...#", "position 12 begins a chunk"
    step(kv, request, 4)
    step(kv, request, 4)
    assert shape(kv, request) == "....##", "position 20 reads from position 18 on, in block 4"
