"""The hash table of block keys, compared with a dict of sets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.router_proc.core import key_table
from quire.router_proc.core.key_table import MIN_CAPACITY, KeyTable

FEW_KEYS = st.one_of(st.integers(0, 8), st.integers(0, 8).map(lambda n: n << 32), st.integers(0, 2**64 - 1))
"""Some keys are alike: 0, small numbers, and numbers of which one half is 0."""
CHANGES = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 7), st.lists(st.tuples(FEW_KEYS, st.booleans()), max_size=12)),
    max_size=12,
)


def apply(table: KeyTable, column: int, bit: int, changes: list[tuple[int, bool]]) -> int:
    keys = np.array([key for key, _ in changes], np.uint64)
    return table.set_bits(column, bit, keys, np.array([value for _, value in changes], np.bool_))


@settings(max_examples=40)
@given(CHANGES, st.sampled_from([np.uint8, np.uint64]), st.sampled_from([0, 4, 100]))
def test_has_the_bits_that_were_set_last(
    changes: list[tuple[int, int, list[tuple[int, bool]]]], dtype: type, few: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_table, "FEW", few)
        check_bits(changes, dtype)


def check_bits(changes: list[tuple[int, int, list[tuple[int, bool]]]], dtype: type) -> None:
    table, model = KeyTable(dtype, 2), set[tuple[int, int, int]]()
    for column, bit, keys in changes:
        before = len(model)
        for key, value in keys:
            (model.add if value else model.discard)((column, bit, key or 1))  # 0 and 1 are one key
        if keys:
            assert apply(table, column, bit, keys) == len(model) - before
        table.check()
    known = {key for _, _, key in model}
    assert table.num_keys == len(known)
    asked = np.array([*sorted(known), 12345, 0], np.uint64)
    found = table.find(asked)
    for at, key in enumerate(asked.tolist()):
        expected = [sum(1 << bit for c, bit, k in model if (c, k) == (column, key or 1)) for column in (0, 1)]
        assert [int(column[at]) for column in found] == expected
        assert table.mask(key) == expected[0] | expected[1]
    for column in (0, 1):
        assert all(table.count(column, bit) == len([e for e in model if e[:2] == (column, bit)]) for bit in range(8))


@settings(max_examples=8)
@given(st.integers(0, 2**32), st.integers(1, 30_000), st.sampled_from([(np.uint8, 1), (np.uint64, 3)]))
def test_grows_and_shrinks_within_its_bytes_per_key(seed: int, number: int, form: tuple[type, int]) -> None:
    rng = np.random.default_rng(seed)
    table = KeyTable(*form)
    keys = rng.integers(1, 2**63, number).astype(np.uint64)
    for part in np.array_split(keys, 5):
        table.set_bits(0, 3, part, np.ones(len(part), np.bool_))
        table.check()
    assert table.num_keys == len(set(keys.tolist())) and (table.find(keys)[0] == 8).all()
    for part in np.array_split(keys, 3)[:2]:
        table.set_bits(0, 3, part, np.zeros(len(part), np.bool_))
        table.check()
    table.clear_bit(0, 3)
    table.check()
    assert table.num_keys == 0 and table.num_bytes == MIN_CAPACITY * (8 + np.dtype(form[0]).itemsize * form[1])


def test_numbers_in_a_row_need_no_more_memory_than_hashes() -> None:
    table = KeyTable(np.uint8, 1)
    keys = np.arange(1, 50_000, dtype=np.uint64)
    table.set_bits(0, 0, keys, np.ones(len(keys), np.bool_))
    assert table.num_bytes <= 64 * table.num_keys
    table.set_bits(0, 0, keys << np.uint64(32), np.ones(len(keys), np.bool_))
    table.check()


@pytest.mark.parametrize("number", [5, 300])
def test_keys_that_were_made_to_have_equal_places_need_no_more_memory(number: int) -> None:
    table = KeyTable(np.uint8, 1)
    keys = np.arange(1, number + 1, dtype=np.uint64) * np.uint64(pow(key_table._FACTOR, -1, 2**64))
    assert table.set_bits(0, 3, keys, np.ones(number, np.bool_)) == number
    table.check()
    assert (table.find(keys)[0] == 8).all() and table.mask(int(keys[-1])) == 8


def test_a_wide_table_is_filled_in_small_parts() -> None:
    """It is fuller than others, so that some keys find no place."""
    table = KeyTable(np.uint64, 3)
    for part in np.array_split(np.random.default_rng(1).integers(1, 2**63, 10_000).astype(np.uint64), 50):
        table.set_bits(0, 3, part, np.ones(len(part), np.bool_))
    table.check()
    assert table.num_keys == 10_000


def test_keeps_its_masks_when_it_becomes_wider() -> None:
    table = KeyTable(np.uint8, 1)
    keys = np.arange(1, 2000, dtype=np.uint64)
    table.set_bits(0, 7, keys, np.ones(len(keys), np.bool_))
    table.widen(np.uint16, 2)
    table.set_bits(1, 15, keys[:10], np.ones(10, np.bool_))
    table.check()
    assert table.mask(5) == 1 << 7 | 1 << 15 and table.mask(1000) == 1 << 7
