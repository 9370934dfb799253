"""KVCacheManager: allocation of all blocks or none, and hits that never include the last token."""

from typing import Any

import pytest
from kv_cases import CacheCase, case, full, picture, sliding
from kv_cases import layout_of as cases_layout

from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import KVGroup, KVLayout
from quire.scheduler_proc.kv.manager import KVCacheManager

SIZE = 4


def layout_of(*kinds: str) -> KVLayout:
    return cases_layout(*(KVGroup(kind, SIZE, [index]) for index, kind in enumerate(kinds)))


def manager_of(usable: int = 8, *, caching: bool = True, groups: int = 1) -> KVCacheManager:
    return KVCacheManager(layout_of(*["full_attention"] * groups), usable + 1, caching)


def request_of(handle: int, tokens: list[int], salt: str = "") -> CacheCase:
    return CacheCase(handle, tokens, SIZE, salt=salt)


def run(kv: KVCacheManager, request: CacheCase) -> tuple[int, Any]:
    """Admit a request like the scheduler: hits, then the rest in one chunk. Returns hit tokens and new blocks."""
    hits, num_hits = kv.get_computed_blocks(request)
    new = kv.allocate_slots(request, request.num_tokens - num_hits, hits, num_hits)
    if new is not None:
        request.num_computed_tokens = request.num_tokens
        kv.cache_blocks(request, request.num_tokens)
    kv.check()
    return num_hits, new


@pytest.mark.parametrize(("num_tokens", "blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_allocates_as_many_blocks_as_the_positions_need(num_tokens: int, blocks: int) -> None:
    kv = manager_of()
    _, new = run(kv, request_of(1, list(range(num_tokens))))
    assert [len(g) for g in new] == [blocks]


def test_fills_a_block_before_allocating_another() -> None:
    kv, request = manager_of(), request_of(1, [1])
    run(kv, request)
    given = []
    for position in range(1, 9):
        new = kv.allocate_slots(request, 1)
        request.num_computed_tokens = position + 1
        given.append(len(new[0]) if new is not None else None)
    assert given == [0, 0, 0, 1, 0, 0, 0, 1]


def test_failed_allocation_changes_nothing() -> None:
    kv = manager_of(4)
    run(kv, request_of(1, list(range(8))))
    second = request_of(2, [*range(8), *range(50, 60)])
    before = picture(kv)
    hits, num_hits = kv.get_computed_blocks(second)
    assert num_hits == 8
    assert kv.allocate_slots(second, 10, hits, num_hits) is None  # needs 3 more blocks, 2 are free
    assert picture(kv) == before


def test_free_hit_blocks_count_as_needed() -> None:
    kv = manager_of(3)
    first = request_of(1, list(range(9)))
    run(kv, first)
    kv.free(first)
    second = request_of(2, [*range(8), *range(50, 55)])
    before = picture(kv)
    hits, num_hits = kv.get_computed_blocks(second)
    # Three blocks are free, but two of them are the hits; 5 more tokens need 2 blocks.
    assert num_hits == 8 and kv.allocate_slots(second, 5, hits, num_hits) is None
    assert picture(kv) == before
    assert kv.allocate_slots(second, 4, hits, num_hits) is not None


def test_the_last_token_is_never_a_hit() -> None:
    kv = manager_of()
    run(kv, request_of(1, list(range(8))))
    assert kv.get_computed_blocks(request_of(2, list(range(8))))[1] == 4
    assert kv.get_computed_blocks(request_of(3, list(range(9))))[1] == 8
    assert kv.get_computed_blocks(request_of(4, [0]))[1] == 0


def test_a_hit_ends_at_the_first_different_or_evicted_block() -> None:
    kv = manager_of()
    first = request_of(1, list(range(13)))
    run(kv, first)
    assert kv.get_computed_blocks(request_of(2, [*range(6), 99, *range(7, 13)]))[1] == 4
    kv.pool.invalidate(first.block_hashes[0])
    assert kv.get_computed_blocks(request_of(3, list(range(13))))[1] == 0


def test_shared_blocks_are_freed_by_their_last_holder() -> None:
    kv = manager_of()
    first, second = request_of(1, list(range(9))), request_of(2, list(range(9)))
    run(kv, first)
    assert run(kv, second)[0] == 8
    one, other = (kv.block_ids(request)[0].tolist() for request in (first, second))
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    kv.free(first)
    assert kv.pool.num_free_blocks == 5
    kv.free(second)
    assert kv.pool.num_free_blocks == 8
    kv.check()


def test_a_freed_prefix_is_evicted_after_its_continuation() -> None:
    kv = manager_of(4)
    request = request_of(1, list(range(13)))
    run(kv, request)
    kv.free(request)
    kv.pool.get_new_blocks(2)
    assert kv.get_computed_blocks(request_of(2, list(range(13))))[1] == 8


def test_only_known_and_written_positions_are_cached() -> None:
    kv, request = manager_of(), request_of(1, list(range(12)))
    kv.allocate_slots(request, 7)
    kv.cache_blocks(request, 7)
    assert kv.get_computed_blocks(request_of(2, list(range(12))))[1] == 4


def test_allocation_succeeds_for_all_groups_or_none() -> None:
    kv = manager_of(7, caching=False, groups=2)
    request = request_of(1, list(range(9)))
    assert [len(g) for g in run(kv, request)[1]] == [3, 3]
    before = picture(kv)
    assert kv.allocate_slots(request_of(2, [1]), 1) is None  # one block is free, two are needed
    assert picture(kv) == before
    assert kv.max_tokens == 12


def test_unknown_group_kinds_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="kind 'telepathy' is not supported; supported: full_attention, latent_attention, sliding_w",
    ):
        KVCacheManager(layout_of("telepathy"), 9, True)


def test_keep_free_blocks_are_not_allocated() -> None:
    kv = manager_of(4)
    before = picture(kv)
    assert kv.allocate_slots(case(1, 9), 9, keep_free=2) is None
    assert picture(kv) == before
    assert kv.allocate_slots(case(1, 9), 9, keep_free=1) is not None


def test_the_watermark_is_a_fraction_of_the_pool() -> None:
    kv = KVCacheManager(layout_of("full_attention"), 201, True, watermark=0.05)
    assert kv.watermark_blocks == 10 and manager_of().watermark_blocks == 0


@pytest.mark.parametrize("groups", [[full()], [full(), sliding(3)]])
def test_one_token_within_a_block_changes_nothing(groups: list[KVGroup]) -> None:
    kv = KVCacheManager(cases_layout(*groups), 30, True)
    request = case(1, 30)
    assert kv.allocate_slots(request, 5) is not None
    request.num_computed_tokens = request.num_acknowledged_tokens = 5
    for position in range(5, 8):
        before = picture(kv)
        assert not any(kv.allocate_slots(request, 1) or [1])
        assert picture(kv) == before
        request.num_computed_tokens = request.num_acknowledged_tokens = position + 1
    assert any(kv.allocate_slots(request, 1) or ())


def test_the_longest_request_fills_the_pool() -> None:
    for groups, most in (([full()], 28), ([full(), full()], 12)):
        kv = KVCacheManager(cases_layout(*groups), 8, True, max_step_tokens=4)
        assert kv.max_tokens == most, groups
        assert kv.num_blocks_for(most) <= 7 < kv.num_blocks_for(most + 1)


def test_can_fit_full_sequence_counts_shared_blocks() -> None:
    kv = manager_of(6)
    first = request_of(1, list(range(13)))
    run(kv, first)
    late = case(2, 13)
    assert kv.can_fit_full_sequence(late, 20) and not kv.can_fit_full_sequence(
        late, 21
    )  # 3 of 5 blocks are already held
    assert kv.can_fit_full_sequence(late, 8, kv.coordinator.no_blocks)
    assert not kv.can_fit_full_sequence(late, 9, kv.coordinator.no_blocks)
    kv.free(first)
    assert kv.can_fit_full_sequence(late, 24) and not kv.can_fit_full_sequence(late, 25)


def test_check_detects_a_wrong_number_of_holders() -> None:
    kv, request = manager_of(), request_of(1, list(range(9)))
    run(kv, request)
    kv.coordinator.managers[0].req_to_blocks[1].pop()
    with pytest.raises(AssertionError):
        kv.check()


def test_check_detects_cached_partial_blocks() -> None:
    kv, request = manager_of(), request_of(1, list(range(9)))
    run(kv, request)
    kv.coordinator.managers[0].num_cached_block[1] = 1
    with pytest.raises(AssertionError, match="partial block"):
        kv.check()
