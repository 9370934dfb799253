"""State groups (mamba) and cross attention."""

import pytest
from kv_cases import case, cross, full, layout_of, mamba, shape, sliding, step

from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.kv.single_type import Extent


def manager_of(*, caching: bool = True, usable: int = 9, drop: bool = False) -> KVCacheManager:
    return KVCacheManager(layout_of(mamba()), usable + 1, caching, drop_last_block=drop)


def test_without_caching_one_block_is_rewritten_for_ever() -> None:
    kv, request = manager_of(caching=False), case(1, 30)
    for num_tokens in (9, 1, 5, 1, 1, 1, 1):
        step(kv, request, num_tokens)
    assert kv.block_ids(request) == [[1]]
    assert kv.num_blocks_for(1) == kv.num_blocks_for(10**6) == 1


def test_a_chunk_writes_one_state_and_the_one_before_is_let_go_of_once_it_is_answered() -> None:
    kv, request = manager_of(), case(1, 30)
    seen = []
    for num_tokens in (8, 4, 2, 1, 1, 1):
        step(kv, request, num_tokens)
        seen.append(shape(kv, request))
    # Within a block its state is rewritten; at 16 the next one begins, and the state at 16 is what it goes on from.
    assert seen == [".#", ".##", "..##", "..##", "..##", "...##"]
    assert kv.num_blocks_for(10**6) == 3, "one to go on from, and one for each of two steps in flight"


def test_states_are_found_only_once_acknowledged() -> None:
    """Recurring bug 15: a hit on a state that is being computed in this very step."""
    kv, first, second = manager_of(), case(1, 9), case(2, 9)
    step(kv, first, 8, answered=False)
    assert kv.get_computed_blocks(second)[1] == 0, "planned in the same step"
    first.num_acknowledged_tokens = 7
    kv.cache_blocks(first, 8)
    assert kv.get_computed_blocks(second)[1] == 0
    first.num_acknowledged_tokens = 8
    kv.cache_blocks(first, 8)
    assert kv.get_computed_blocks(second)[1] == 8


def test_a_hit_is_the_last_state_and_goes_on_in_a_block_of_its_own() -> None:
    kv, first, second = manager_of(), case(1, 13), case(2, 13)
    step(kv, first, 8)
    step(kv, first, 4)
    step(kv, first, 1)
    assert kv.get_computed_blocks(second)[1] == 12
    step(kv, second, 1)
    assert shape(kv, second) == "..##"
    assert kv.block_ids(second)[0][2] == kv.block_ids(first)[0][2]
    assert kv.block_ids(second)[0][3] != kv.block_ids(first)[0][3]


def test_states_are_made_findable_before_they_are_let_go_of() -> None:
    kv, first = manager_of(), case(1, 30)
    for _ in range(13):  # nobody calls cache_blocks in between
        assert kv.allocate_slots(first, 1) is not None
        first.num_computed_tokens += 1
        first.num_acknowledged_tokens += 1
    assert shape(kv, first) == "..##"
    kv.free(first)
    found = [kv.get_computed_blocks(case(2, n))[1] for n in (5, 9, 13)]
    assert found == [4, 8, 12]


def test_a_state_from_inside_a_block_is_never_found() -> None:
    kv, first = manager_of(), case(1, 30)
    step(kv, first, 3)
    step(kv, first, 5)  # runs across 4: entry 0 keeps the state at 3
    assert shape(kv, first) == "##"
    step(kv, first, 1)
    kv.free(first)
    assert kv.get_computed_blocks(case(2, 6))[1] == 0
    assert kv.get_computed_blocks(case(2, 9))[1] == 8


def test_rejected_drafts_leave_no_wrong_state() -> None:
    kv, request = manager_of(), case(1, 30)
    step(kv, request, 6)
    assert kv.allocate_slots(request, 4) is not None  # one token and three drafts, to 10; none is accepted
    request.num_computed_tokens = request.num_acknowledged_tokens = 7
    assert kv.allocate_slots(request, 3) is not None  # across 8 again, and no entry is new
    request.num_computed_tokens = request.num_acknowledged_tokens = 10
    kv.cache_blocks(request, 10)
    kv.check()
    assert kv.get_computed_blocks(case(2, 10))[1] == 0


def test_going_back_to_where_no_state_is_kept_is_noticed() -> None:
    kv, request = manager_of(), case(1, 30)
    step(kv, request, 8)
    request.num_computed_tokens = request.num_acknowledged_tokens = 0
    with pytest.raises(AssertionError, match="set back"):
        kv.coordinator.managers[0].allocate(Extent(1, 0, num_tokens=3, num_slots=3))


@pytest.mark.parametrize(
    ("start", "num_tokens", "aligned"),
    [(0, 10, 8), (0, 8, 8), (0, 3, 3), (3, 3, 1), (3, 9, 9), (8, 2, 2), (4, 6, 4), (10, 1, 1), (6, 5, 2)],
)
def test_chunks_end_where_a_state_is_kept(start: int, num_tokens: int, aligned: int) -> None:
    assert manager_of().aligned_chunk(case(1, 10), start, num_tokens) == aligned


@pytest.mark.parametrize(("start", "num_tokens", "aligned"), [(0, 10, 4), (4, 6, 6), (0, 3, 3), (2, 8, 2)])
def test_with_drafts_from_hidden_states_the_last_but_one_is_kept(start: int, num_tokens: int, aligned: int) -> None:
    assert manager_of(drop=True).aligned_chunk(case(1, 10), start, num_tokens) == aligned


def test_chunks_stay_whole_where_no_state_is_kept() -> None:
    assert manager_of(caching=False).aligned_chunk(case(1, 10), 0, 10) == 10
    assert KVCacheManager(layout_of(full()), 9, True).aligned_chunk(case(1, 10), 0, 10) == 10


def test_chunks_end_at_boundaries_of_all_groups() -> None:
    kv = KVCacheManager(layout_of(full(2), mamba(4), sliding(5, 6)), 30, True)
    assert kv.aligned_chunk(case(1, 40, 2), 0, 35) == 24


def test_external_states_have_a_block_where_they_end() -> None:
    kv, request = manager_of(), case(1, 30)
    new = kv.allocate_slots(request, 4, num_external_computed_tokens=10)
    assert new is not None and shape(kv, request) == "..##"
    request.num_computed_tokens = request.num_acknowledged_tokens = 14
    kv.cache_blocks(request, 14)
    assert kv.get_computed_blocks(case(2, 30))[1] == 0, "the chunk ran across 12"


@pytest.mark.parametrize("damage", ["last", "crossed", "early"])
def test_check_of_states_fails_when_it_should(damage: str) -> None:
    kv, request = manager_of(), case(1, 30)
    for num_tokens in (3, 5, 1):
        step(kv, request, num_tokens)
    manager = kv.coordinator.managers[0]
    assert shape(kv, request) == ".##"
    if damage == "last":
        manager.req_to_blocks[1][-1] = kv.pool.null_block
    elif damage == "crossed":
        manager.req_to_blocks[1][0] = kv.pool.blocks[7]
        kv.pool.blocks[7].block_hash = b"a"
        manager.num_skipped_blocks[1] = 0  # type: ignore[attr-defined]
    else:
        manager.num_cached_block[1] = 1
    with pytest.raises(AssertionError, match="state"):
        kv.coordinator.check()


def encoder_manager(usable: int = 8) -> KVCacheManager:
    return KVCacheManager(layout_of(full(), cross()), usable + 1, True)


def test_an_encoder_gets_its_blocks_once() -> None:
    kv, request = encoder_manager(), case(1, 30)
    new = kv.allocate_slots(request, 4, num_encoder_tokens=9)
    assert new is not None and [len(g) for g in new] == [1, 3]
    request.num_computed_tokens = 4
    new = kv.allocate_slots(request, 4, num_encoder_tokens=9)
    assert new is not None and [len(g) for g in new] == [1, 0]
    kv.check()
    assert kv.num_blocks_for(8, num_encoder_tokens=9) == 5
    assert kv.can_fit_full_sequence(case(2, 8), 8, num_encoder_tokens=4)
    assert not kv.can_fit_full_sequence(case(2, 8), 8, num_encoder_tokens=5)
    assert kv.allocate_slots(case(2, 8), 8, num_encoder_tokens=5) is None
    kv.free(request)
    assert kv.pool.num_free_blocks == 8


def test_what_an_encoder_made_is_never_shared() -> None:
    kv, first, second = encoder_manager(), case(1, 9), case(2, 9)
    kv.allocate_slots(first, 9, num_encoder_tokens=8)
    kv.cache_blocks(first, 9)
    hits, num_hits = kv.get_computed_blocks(second)
    assert num_hits == 8 and [len(g) for g in hits] == [2, 0]
    assert kv.allocate_slots(second, 1, hits, num_hits, num_encoder_tokens=8) is not None
    assert not set(kv.block_ids(first)[1]) & set(kv.block_ids(second)[1])
    kv.forget_content(first, 0)
    kv.check()


def test_only_cross_attention_finds_nothing() -> None:
    kv, request = KVCacheManager(layout_of(cross()), 9, True), case(1, 9)
    assert kv.allocate_slots(request, 9, num_encoder_tokens=8) is not None
    kv.cache_blocks(request, 9)
    assert kv.get_computed_blocks(case(2, 9)) == (((),), 0)


@pytest.mark.parametrize("damage", ["shared", "null"])
def test_check_of_an_encoder_fails_when_it_should(damage: str) -> None:
    kv, request = encoder_manager(), case(1, 9)
    kv.allocate_slots(request, 9, num_encoder_tokens=8)
    held = kv.coordinator.managers[1].req_to_blocks[1]
    if damage == "shared":
        held[0].ref_cnt = 2
    else:
        held[0] = kv.pool.null_block
    with pytest.raises(AssertionError, match="group 1, handle 1"):
        kv.coordinator.check()
