"""Block tables and slots: the seeds' examples, bad ids refused, and no stale id after any move."""

import random

import numpy as np
import pytest
import torch

from quire.worker_proc.block_table import BlockTable, MultiGroupBlockTable
from quire.worker_proc.input_batch import StepRefused


def table_of(block_size: int = 4, max_rows: int = 4, max_len: int = 32, num_blocks: int = 100) -> BlockTable:
    return BlockTable(block_size, max_rows, max_len, num_blocks, torch.device("cpu"))


def slots(table: BlockTable, rows: list[int], positions: list[int]) -> list[int]:
    return table.slots(np.array(rows, np.int64), np.array(positions, np.int64)).tolist()


def view(table: BlockTable, rows: list[int], max_seq_len: int) -> list[list[int]]:
    return table.rows(np.array(rows, np.int64), max_seq_len).tolist()


def test_the_example_of_seed_000() -> None:
    table = table_of(block_size=4)
    table.append_row(0, [7, 3, 9])
    assert slots(table, [0] * 10, list(range(10))) == [28, 29, 30, 31, 12, 13, 14, 15, 36, 37]
    assert slots(table, [0, 0, 0], [6, 7, 8]) == [14, 15, 36]


def test_the_example_of_seed_003() -> None:
    """Its row 0 begins with block 0, which is never a request's here: all ids are one more."""
    table = table_of(block_size=2)
    for row, ids in enumerate(([1, 2], [6, 7, 8], [11, 12])):
        table.append_row(row, ids)
    rows, positions = [0, 0, 1, 1, 1, 1, 1, 2, 2, 2], [0, 1, 0, 1, 2, 3, 4, 0, 1, 2]
    assert slots(table, rows, positions) == [2, 3, 12, 13, 14, 15, 16, 22, 23, 24]


def test_slots_do_not_overflow_32_bits() -> None:
    table = table_of(block_size=16, num_blocks=2**30)
    table.append_row(0, [2**30 - 1])
    assert slots(table, [0], [15]) == [2**34 - 1]


@pytest.mark.parametrize("ids", [[0], [-1], [100], [5, 0], [5, 100, 6], [2**31 - 1]])
def test_ids_that_no_request_may_write_to_are_refused_and_change_nothing(ids: list[int]) -> None:
    table = table_of()
    table.append_row(0, [5])
    with pytest.raises(StepRefused, match="not from 1 to 99"):
        table.append_row(0, ids)
    assert view(table, [0], 12) == [[5, 0, 0]] and table.num_blocks_per_row[0] == 1


def test_more_blocks_than_a_request_can_have_are_refused() -> None:
    table = table_of(max_len=10)  # 3 blocks
    table.append_row(0, [1, 2])
    with pytest.raises(StepRefused, match="has 4 blocks, 3 are the most"):
        table.append_row(0, [3, 4])
    table.append_row(0, [3])


@pytest.mark.parametrize(("row", "position"), [(0, 4), (0, 31), (1, 0)])
def test_a_token_without_a_block_is_refused(row: int, position: int) -> None:
    table = table_of()
    table.append_row(0, [5])
    with pytest.raises(StepRefused, match="no block"):
        slots(table, [0, row], [0, position])


def test_appending_goes_on_behind_what_is_there() -> None:
    table = table_of()
    table.append_row(1, [5])
    table.append_row(1, [])
    table.append_row(1, np.array([6, 7], np.int32))
    assert view(table, [1], 16) == [[5, 6, 7, 0]]


def test_a_move_leaves_no_stale_id_in_its_target() -> None:
    """Seeds 000 and 003 copy only the moved length, so that the target keeps ids of its former request behind it."""
    table = table_of()
    table.append_row(0, [1, 2, 3, 4])
    table.append_row(1, [9])
    table.move_row(1, 0)
    assert view(table, [0], 32) == [[9, 0, 0, 0, 0, 0, 0, 0]]


def test_a_cleared_row_holds_nothing() -> None:
    table = table_of()
    table.append_row(0, [1, 2, 3])
    table.clear_row(0)
    assert view(table, [0], 32) == [[0] * 8] and table.num_blocks_per_row[0] == 0


def test_a_swap_exchanges_ids_and_lengths() -> None:
    table = table_of()
    table.append_row(0, [1, 2, 3])
    table.append_row(1, [9])
    table.swap_row(0, 1)
    assert view(table, [0, 1], 12) == [[9, 0, 0], [1, 2, 3]]
    assert table.num_blocks_per_row[:2].tolist() == [1, 3]


@pytest.mark.parametrize("seed", range(5))
def test_after_any_operations_a_table_equals_plain_lists(seed: int) -> None:
    rng = random.Random(seed)
    table, plain = table_of(max_rows=5), [[] for _ in range(5)]
    for _ in range(300):
        a, b = rng.randrange(5), rng.randrange(5)
        match rng.randrange(4):
            case 0 if len(plain[a]) < 7:
                ids = [rng.randrange(1, 100) for _ in range(rng.randrange(3))][: 8 - len(plain[a])]
                table.append_row(a, ids)
                plain[a] += ids
            case 1:
                table.move_row(a, b)
                plain[b] = list(plain[a])
            case 2:
                table.swap_row(a, b)
                plain[a], plain[b] = plain[b], plain[a]
            case _:
                table.clear_row(a)
                plain[a] = []
        table.commit()
        assert view(table, list(range(5)), 32) == [row + [0] * (8 - len(row)) for row in plain]
        assert table.num_blocks_per_row.tolist() == [len(row) for row in plain]


def test_kernels_get_the_chosen_rows_as_wide_as_the_longest() -> None:
    table = table_of()
    for row in range(4):
        table.append_row(row, [10 * row + 1, 10 * row + 2, 10 * row + 3])
    assert view(table, [1, 3], 5) == [[11, 12], [31, 32]]
    assert view(table, [0, 1], 4) == [[1], [11]]
    assert view(table, [2], 9) == [[21, 22, 23]]


def test_groups_move_together() -> None:
    groups = MultiGroupBlockTable([table_of(), table_of(block_size=8)])
    groups.add_row(0, [np.array([1, 2], np.int32), np.array([3], np.int32)])
    groups.add_row(1, [np.array([4], np.int32), np.array([5], np.int32)])
    groups.append_row(1, 1, [6])
    groups.swap_row(0, 1)
    groups.move_row(0, 2)
    groups.clear_row(0)
    groups.commit()
    assert [t.num_blocks_per_row[:3].tolist() for t in groups.tables] == [[0, 2, 1], [0, 1, 2]]
    assert slots(groups.tables[1], [2], [9]) == [6 * 8 + 1]


@pytest.mark.parametrize("group", [-1, 2])
def test_an_unknown_group_is_refused(group: int) -> None:
    groups = MultiGroupBlockTable([table_of(), table_of()])
    with pytest.raises(StepRefused, match="does not exist"):
        groups.append_row(0, group, [1])


def test_setting_a_row_replaces_what_it_held() -> None:
    groups = MultiGroupBlockTable([table_of()])
    groups.add_row(0, [np.array([1, 2, 3], np.int32)])
    groups.add_row(0, [np.array([9], np.int32)])
    assert view(groups.tables[0], [0], 12) == [[9, 0, 0]]
