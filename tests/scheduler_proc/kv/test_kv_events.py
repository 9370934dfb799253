"""The recorder of cache events: a consumer that applies its events has exactly the keys of the pool's map."""

from hypothesis import given
from hypothesis import strategies as st
from kv_event_ends import Holder, Mirror, key_of, keys_of, layout_of

from quire.protocol.wire.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.events import KVEventRecorder

HASHES = [bytes([i]) * 32 for i in range(6)]


ACTIONS = st.lists(st.tuples(st.sampled_from([0, 0, 1, 1, 1, 2, 3, 3, 4, 5]), st.integers(0, 40)), max_size=60)


@given(ACTIONS, st.booleans())
def test_applied_events_equal_the_keys_of_the_map(actions: list[tuple[int, int]], several_groups: bool) -> None:
    layout = layout_of(4, 8, 4) if several_groups else layout_of(4)
    keys = [key_of(h, g) for g in range(len(layout.groups)) for h in HASHES[:3]]
    recorder, mirror = KVEventRecorder(layout, 32), Mirror()
    pool = BlockPool(7, enable_caching=True, events=recorder)
    holder = Holder(pool, keys)
    for action, number in actions:
        holder.act(action, number)
        pool.check([holder.held])
        mirror.apply(recorder.take())
        assert mirror.keys == keys_of(pool)
        one_by_one = [pool.get_cached_block(key) for key in keys]
        run = one_by_one[: one_by_one.index(None)] if None in one_by_one else one_by_one
        assert pool.get_cached_blocks(keys) == run


@given(ACTIONS)
def test_batched_events_have_the_same_effect(actions: list[tuple[int, int]]) -> None:
    """The order within a batch matters: one step may store, remove and store the same content again."""
    recorder, mirror = KVEventRecorder(layout_of(4), 32), Mirror()
    pool = BlockPool(5, enable_caching=True, events=recorder)
    holder = Holder(pool, HASHES)
    for action, number in actions:
        holder.act(action, number)
    mirror.apply(recorder.take())
    assert mirror.keys == keys_of(pool) and recorder.take() == []


def test_a_run_of_equal_changes_is_one_event_per_group() -> None:
    recorder = KVEventRecorder(layout_of(4, 16), 32)
    recorder.stored([HASHES[0], HASHES[1]])
    recorder.stored([key_of(HASHES[2], 1), HASHES[3]])
    recorder.removed([HASHES[0]])
    recorder.removed([HASHES[1]])
    recorder.stored([HASHES[0]])
    assert recorder.take() == [
        BlocksStored([HASHES[0], HASHES[1], HASHES[3]], 4, 0),
        BlocksStored([HASHES[2]], 16, 1),
        BlocksRemoved(HASHES[:2], 0),
        BlocksStored([HASHES[0]], 4, 0),
    ]
    recorder.stored(HASHES[4:])
    recorder.cleared()
    assert recorder.take() == [AllBlocksCleared()] and recorder.take() == []


def test_groups_are_split_from_short_hashes() -> None:
    recorder = KVEventRecorder(layout_of(4, 4), 16)
    recorder.stored([key_of(HASHES[0][:16], 1)])
    assert recorder.take() == [BlocksStored([HASHES[0][:16]], 4, 1)]
