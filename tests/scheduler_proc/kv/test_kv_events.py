"""The recorder of cache events: a consumer that applies its events has exactly the keys of the pool's map."""

from hypothesis import given
from hypothesis import strategies as st
from kv_event_ends import Holder, Mirror, key_of, keys_of, layout_of
from scheduler_driver import Driver

from quire.protocol.wire.kv_events import HASH_BYTES, AllBlocksCleared, BlocksRemoved, BlocksStored
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.events import KVEventRecorder

HASHES = [bytes([i]) * 32 for i in range(6)]


ACTIONS = st.lists(st.tuples(st.sampled_from([0, 0, 1, 1, 1, 2, 3, 3, 4, 5]), st.integers(0, 40)), max_size=60)


@given(ACTIONS, st.booleans())
def test_applied_events_equal_the_keys_of_the_map(actions: list[tuple[int, int]], several_groups: bool) -> None:
    layout = layout_of(4, 4, 4) if several_groups else layout_of(4)
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


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([0, 1, 1, 2, 3, 4, 6]), st.integers(0, 40)), max_size=60))
def test_each_medium_has_its_own_contents(actions: list[tuple[bool, int, int]]) -> None:
    """One recorder for the pools of the device and of host memory; the device's contents are lost now and then."""
    recorder, mirror = KVEventRecorder(layout_of(4), 32), Mirror()
    pools = [BlockPool(5, True, recorder), BlockPool(6, True, recorder, "host")]
    holders = [Holder(pool, HASHES) for pool in pools]
    for of_host, action, number in actions:
        if action == 6:
            pools[of_host].drop_contents()
        holders[of_host].act(action, number)
        if number % 2:
            mirror.apply(recorder.take())
    mirror.apply(recorder.take())
    assert [mirror.of("device"), mirror.of("host")] == [keys_of(pool) for pool in pools]


def test_events_follow_a_scheduler_with_host_memory() -> None:
    engine, mirror = Driver(25, num_host_pages=30), Mirror()
    recorder = KVEventRecorder(engine.header.kv_layout, HASH_BYTES[engine.config.prefix_caching_hash_algo])
    pools = [engine.scheduler.kv.pool, engine.scheduler.kv.tiers[0].pages]
    for pool in pools:
        pool.events = recorder
    for number in range(12):
        engine.add(str(number), [number % 3 + 1] * 40, max_tokens=3)
        engine.run()
        if number == 7:
            engine.restart_worker()
        mirror.apply(recorder.take())
        assert [mirror.of("device"), mirror.of("host")] == [keys_of(pool) for pool in pools]
    assert mirror.of("host")


def test_a_run_of_equal_changes_is_one_event_per_group() -> None:
    recorder = KVEventRecorder(layout_of(4, 4), 32)
    recorder.stored([HASHES[0], HASHES[1]], "device")
    recorder.stored([key_of(HASHES[2], 1), HASHES[3]], "device")
    recorder.removed([HASHES[0]], "device")
    recorder.removed([HASHES[1]], "device")
    recorder.stored([HASHES[0]], "device")
    assert recorder.take() == [
        BlocksStored([HASHES[0], HASHES[1], HASHES[3]], 4, 0),
        BlocksStored([HASHES[2]], 4, 1),
        BlocksRemoved(HASHES[:2], 0),
        BlocksStored([HASHES[0]], 4, 0),
    ]
    recorder.stored(HASHES[4:], "device")
    recorder.stored(HASHES[:1], "host")
    recorder.cleared("device")
    assert recorder.take() == [BlocksStored(HASHES[:1], 4, 0, "host"), AllBlocksCleared("device")]
    recorder.stored(HASHES[:1], "host")
    recorder.cleared()
    assert recorder.take() == [AllBlocksCleared()] and recorder.take() == []


def test_groups_are_split_from_short_hashes() -> None:
    recorder = KVEventRecorder(layout_of(4, 4), 16)
    recorder.stored([key_of(HASHES[0][:16], 1)], "device")
    assert recorder.take() == [BlocksStored([HASHES[0][:16]], 4, 1)]
