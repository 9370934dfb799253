"""The index of contents, compared with a set of (engine, medium, hash)."""

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.protocol.model.kv_layout import KVGroup, KVLayout
from quire.router_proc.core import index as index_module
from quire.router_proc.core.index import MEDIA, BlockIndex, CachedPrefix, counted_group, keys_of

Contents = set[tuple[int, str, bytes]]
ENGINES = (0, 1, 9, 63)
HASHES = [bytes([i % 251, i // 251]) * 16 for i in range(40)]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["stored", "stored", "removed", "cleared", "forget", "look"]),
        st.sampled_from(ENGINES),
        st.sampled_from(MEDIA),
        st.lists(st.integers(0, len(HASHES) - 1), max_size=10),
    ),
    max_size=40,
)


def keys(hashes: Iterable[bytes]) -> memoryview:
    return keys_of(b"".join(each[:8] for each in hashes))


def prefix(model: Contents, engine: int, hashes: list[bytes]) -> int:
    """Return the blocks of the prompt that the engine has in any medium, up to the first that it has not."""
    for at, each in enumerate(hashes):
        if not any((engine, medium, each) in model for medium in MEDIA):
            return at
    return len(hashes)


@settings(max_examples=40)
@given(ACTIONS, st.integers(1, 50))
def test_finds_the_prefix_that_each_engine_has(actions: list[tuple[str, int, str, list[int]]], max_queued: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "MAX_QUEUED", max_queued)
        index, model = BlockIndex(), Contents()
        for action, engine, medium, numbers in actions:
            hashes = [HASHES[number] for number in numbers]
            match action:
                case "stored":
                    index.stored(engine, hashes, medium)
                    model |= {(engine, medium, each) for each in hashes}
                case "removed":
                    index.removed(engine, hashes, medium)
                    model -= {(engine, medium, each) for each in hashes}
                case "cleared":
                    index.cleared(engine, medium)
                    model = {each for each in model if each[:2] != (engine, medium)}
                case "forget":
                    index.forget(engine)
                    model = {each for each in model if each[0] != engine}
                case "look":
                    prompt = hashes[:8]  # all of it is looked up
                    found = {each: hit.num_blocks for each, hit in index.hits(keys(prompt)).items()}
                    lengths = {each: prefix(model, each, prompt) for each in ENGINES}
                    assert found == {each: length for each, length in lengths.items() if length}
        index.check()
        assert all(index.num_blocks(each) == len([e for e in model if e[0] == each]) for each in ENGINES)
        assert index.num_keys == len({each for _, _, each in model})


@settings(max_examples=40)
@given(st.integers(1, 5000), st.lists(st.integers(0, 5000), min_size=4, max_size=4))
def test_finds_prefixes_of_long_prompts(length: int, ends: list[int]) -> None:
    hashes = [number.to_bytes(8, "little") * 2 for number in range(1, length + 1)]
    index = BlockIndex()
    for engine, end in zip(ENGINES, ends, strict=True):
        index.stored(engine, hashes[:end], "device")
    expected = {engine: CachedPrefix(min(end, length)) for engine, end in zip(ENGINES, ends, strict=True) if end}
    assert index.hits(keys(hashes)) == expected


@settings(max_examples=40)
@given(st.integers(1, 300), st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), max_size=6))
def test_a_hole_ends_a_prefix_or_stays_unnoticed(length: int, holes: list[tuple[int, int]]) -> None:
    """Pins leave holes. The result is at least the true prefix, and ends before a missing block."""
    hashes = [number.to_bytes(8, "little") for number in range(1, length + 1)]
    index, present = BlockIndex(), {engine: set(range(length)) for engine in ENGINES}
    index.stored(ENGINES[0], hashes, "device")
    for number, engine in enumerate(ENGINES[1:]):
        for start, size in holes[number::3]:
            present[engine] -= set(range(start, start + size))
        index.stored(engine, [hashes[at] for at in sorted(present[engine])], "device")
    found = index.hits(keys(hashes))
    assert found[ENGINES[0]] == CachedPrefix(length)
    for engine in ENGINES:
        end = found.get(engine, CachedPrefix(0)).num_blocks
        assert end not in present[engine] and end >= min(set(range(length + 1)) - present[engine])
        assert not end or end - 1 in present[engine]


def test_tells_the_media_of_a_prefix() -> None:
    hashes = [number.to_bytes(8, "little") for number in range(1, 41)]
    index = BlockIndex()
    index.stored(2, hashes[:20], "device")
    index.stored(2, hashes[10:30], "host")
    index.stored(2, hashes[20:36], "disk")
    assert index.hits(keys(hashes)) == {2: CachedPrefix(36, 10, 6)}
    index.cleared(2, "device")
    assert index.hits(keys(hashes)) == {}


def test_notes_an_engine_that_has_more_blocks_than_its_pool() -> None:
    hashes = [number.to_bytes(8, "little") for number in range(1, 102)]
    index = BlockIndex()
    index.limit(0, 100)
    index.stored(0, hashes[:100], "device")
    index.stored(1, hashes, "device")
    assert index.hits(keys(hashes)) == {0: CachedPrefix(100), 1: CachedPrefix(101)}
    assert not index.overfull
    index.stored(0, hashes[100:], "device")
    index.apply()
    assert index.overfull == {0}
    index.removed(0, hashes[3:], "device")
    assert index.hits(keys(hashes)) == {0: CachedPrefix(3), 1: CachedPrefix(101)}, (
        "the same as if it had been applied at once"
    )
    assert index.overfull == {0}
    index.forget(0)
    assert index.hits(keys(hashes)) == {1: CachedPrefix(101)}
    index.stored(0, hashes[:1], "device")
    assert index.num_blocks(0) == 1 and not index.overfull
    index.check()


def test_takes_at_most_64_bytes_per_block_at_any_fill() -> None:
    rng = np.random.default_rng(1)
    index, most = BlockIndex(), 0.0
    for number in range(60):
        raw = rng.bytes(32 * 1000)
        index.stored(number % 4, [raw[at : at + 32] for at in range(0, len(raw), 32)], "device")
        index.apply()
        if number > 3:
            most = max(most, index.num_bytes / index.num_keys)
    assert most <= 64


@pytest.mark.parametrize(
    ("kinds", "group"),
    [(["full_attention"], 0), (["sliding_window", "full_attention"], 1), (["sliding_window"], 0), ([], 0)],
)
def test_counts_the_first_group_of_full_attention(kinds: list[str], group: int) -> None:
    groups = [KVGroup(kind, 16, [0]) for kind in kinds]
    assert counted_group(KVLayout(groups, num_kv_heads=1, head_dim=8, dtype="float32")) == group
