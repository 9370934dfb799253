"""Block tables and slots: worked examples, invalid ids, no stale ids after moves, and correct device copies."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.cache.slot_mapping import slot_mapping_reference, slot_mappings_reference
from quire.worker_proc.batch.block_table import POISON_BLOCK_ID, BlockTable
from quire.worker_proc.batch.group_tables import MultiGroupBlockTable
from quire.worker_proc.batch.input_batch import StepRefused
from quire.worker_proc.device.transfer import Transfer

CPU = torch.device("cpu")


def table_of(
    block_size: int = 4, max_rows: int = 4, max_len: int = 32, num_blocks: int = 100, **options: Any
) -> BlockTable:
    return BlockTable(block_size, max_rows, max_len, num_blocks, options.pop("device", CPU), **options)


def slots(table: BlockTable, rows: list[int], positions: list[int]) -> list[int]:
    return table.slots(np.array(rows, np.int64), np.array(positions, np.int64)).tolist()


def view(table: BlockTable, rows: list[int], max_seq_len: int) -> list[list[int]]:
    return table.rows(np.array(rows, np.int64), max_seq_len, Transfer(CPU)).tolist()


def test_slots_of_one_row_and_of_a_chunk_across_blocks() -> None:
    table = table_of(block_size=4)
    table.append_row(0, [7, 3, 9])
    assert slots(table, [0] * 10, list(range(10))) == [28, 29, 30, 31, 12, 13, 14, 15, 36, 37]
    assert slots(table, [0, 0, 0], [6, 7, 8]) == [14, 15, 36]


def test_slots_do_not_overflow_32_bits() -> None:
    table = table_of(block_size=16, num_blocks=2**30)
    table.append_row(0, [2**30 - 1])
    assert slots(table, [0], [15]) == [2**34 - 1]


@pytest.mark.parametrize(("row", "position"), [(0, 4), (0, 31), (0, 32), (0, 10**12), (0, -1), (1, 0)])
def test_refuses_token_without_a_block(row: int, position: int) -> None:
    table = table_of()
    table.append_row(0, [5])
    with pytest.raises(StepRefused, match="no block"):
        slots(table, [0, row], [0, position])


def test_refuses_position_past_a_full_table() -> None:
    table = table_of()
    table.append_row(0, range(1, 9))
    with pytest.raises(StepRefused, match="no block"):
        slots(table, [0], [32])


def test_move_leaves_no_stale_id_in_its_target() -> None:
    """The target row was longer than the source row."""
    table = table_of()
    table.append_row(0, [1, 2, 3, 4])
    table.append_row(1, [9])
    table.move_row(1, 0)
    assert view(table, [0], 32) == [[9, 0, 0, 0, 0, 0, 0, 0]]


def test_kernels_get_the_chosen_rows_with_the_width_of_the_longest() -> None:
    table = table_of()
    for row in range(4):
        table.append_row(row, [10 * row + 1, 10 * row + 2, 10 * row + 3])
    assert view(table, [1, 3], 5) == [[11, 12], [31, 32]]
    assert view(table, [0, 1], 4) == [[1], [11]]
    assert view(table, [2], 9) == [[21, 22, 23]]


# ---- scheduler blocks larger than kernel blocks


def test_scheduler_block_is_several_kernel_blocks() -> None:
    table = table_of(block_size=32, max_len=96, kernel_block_size=16)
    table.append_row(0, [1, 2])
    table.append_row(0, [7])
    assert table.block_size == 16 and table.num_blocks_per_row[0] == 6
    assert view(table, [0], 96) == [[2, 3, 4, 5, 14, 15]]
    assert table.block_ids(0).tolist() == [1, 2, 7]
    assert slots(table, [0, 0, 0], [0, 31, 80]) == [32, 63, 15 * 16]
    assert table.max_blocks == 3 and table.id_range == (1, 99)


@given(ids=st.lists(st.integers(1, 99), min_size=1, max_size=4), ratio=st.sampled_from([1, 2, 4]))
def test_slots_do_not_depend_on_kernel_block_size(ids: list[int], ratio: int) -> None:
    """The kernel blocks of a block are adjacent in memory, so a position has one slot for all kernel block sizes."""
    whole, cut = table_of(8), table_of(8, kernel_block_size=8 // ratio)
    for table in (whole, cut):
        table.append_row(2, ids)
    positions = list(range(8 * len(ids)))
    assert slots(whole, [2] * len(positions), positions) == slots(cut, [2] * len(positions), positions)


@pytest.mark.parametrize("kernel_block_size", [3, 16, 0])
def test_rejects_kernel_block_size_that_does_not_divide(kernel_block_size: int) -> None:
    with pytest.raises(ValueError, match="not a multiple of the kernel block size"):
        table_of(block_size=8, kernel_block_size=kernel_block_size)


def test_rejects_ids_of_more_than_32_bits() -> None:
    with pytest.raises(ValueError, match="more than 32 bits"):
        table_of(block_size=8, kernel_block_size=1, num_blocks=2**28 + 1)


# ---- blocks that are no longer read


@pytest.mark.parametrize("kernel_block_size", [4, 2])
def test_null_block_is_allowed_left_of_a_window(kernel_block_size: int) -> None:
    table = table_of(null_allowed=True, kernel_block_size=kernel_block_size)
    table.append_row(0, [0, 0, 9])
    assert slots(table, [0], [8]) == [36]
    assert table.id_range == (0, 99)


@st.composite
def mapped_steps(draw: st.DrawFn) -> tuple[BlockTable, list[range]]:
    """Draw a table, and the positions that each of its rows computes."""
    kernel_block_size, ratio = draw(st.sampled_from([2, 4, 8])), draw(st.sampled_from([1, 2, 3]))
    table = table_of(kernel_block_size * ratio, max_len=240, kernel_block_size=kernel_block_size)
    held = draw(st.lists(st.lists(st.integers(1, 99), max_size=4), min_size=1, max_size=4))
    spans = []
    for row, ids in enumerate(held):
        table.append_row(row, ids)
        end = draw(st.integers(0, len(ids) * kernel_block_size * ratio))
        spans.append(range(draw(st.integers(0, end)), end))
    return table, spans


@given(step=mapped_steps())
def test_slots_equal_the_kernel_reference(step: tuple[BlockTable, list[range]]) -> None:
    table, spans = step
    rows = np.repeat(np.arange(len(spans)), [len(span) for span in spans])
    positions = np.array([position for span in spans for position in span], np.int64)
    starts = torch.tensor([0, *map(len, spans)]).cumsum(0)
    # Poison: neither may read past a row's length.
    table.poison()
    expected = slot_mapping_reference(
        starts,
        torch.from_numpy(positions),
        table.device_copy,
        table.block_size,
        row_of=torch.arange(len(spans)),
    )
    assert table.slots(rows, positions).tolist() == expected.tolist()


# ---- separate device copies


def separate(**options: Any) -> BlockTable:
    """Make a table with a separate device copy, as on a GPU."""
    return table_of(own_copy=True, max_rows=5, **options)


def test_cpu_table_has_no_separate_device_copy() -> None:
    assert not table_of().has_own_copy and separate().has_own_copy
    shared = table_of()
    groups = MultiGroupBlockTable([shared])
    groups.append_rows(np.array([0]), np.array([0]), np.array([5]))
    assert shared.device_copy[0, 0] == 5


def test_device_copy_changes_only_on_commit() -> None:
    groups = MultiGroupBlockTable([separate(), separate(block_size=8)])
    groups.add_row(1, [[1, 2, 3], [4]])
    assert not groups.tables[0].device_copy.any() and not groups.tables[1].device_copy.any()
    with pytest.raises(AssertionError, match="not committed"):
        groups.check()
    groups.commit()
    groups.check()
    assert groups.tables[0].device_copy[1, :3].tolist() == [1, 2, 3] and groups.tables[1].device_copy[1, 0] == 4


def test_sends_only_changes() -> None:
    table = separate()
    assert table.take_staged() is None
    table.append_row(3, [1, 2, 3])
    table.append_row(1, [4])
    table.append_row(3, [5])
    runs, ids = table.take_staged() or pytest.fail("nothing is staged")
    assert runs.tolist() == [[1, 0, 1], [3, 0, 4]] and ids.tolist() == [4, 1, 2, 3, 5]
    assert table.take_staged() is None
    table.append_row(3, [6])
    table.append_row(0, [7])
    table.clear_row(0)
    table.append_row(1, [])
    runs, ids = table.take_staged() or pytest.fail("nothing is staged")
    assert runs.tolist() == [[3, 4, 1]] and ids.tolist() == [6]
    table.move_row(3, 0)
    table.clear_row(3)
    runs, ids = table.take_staged() or pytest.fail("nothing is staged")
    assert runs.tolist() == [[0, 0, 5]] and ids.tolist() == [1, 2, 3, 5, 6]


OPERATIONS = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 4), st.integers(0, 1), st.lists(st.integers(1, 99), max_size=3)),
    st.tuples(st.just("add"), st.integers(0, 4), st.lists(st.integers(1, 99), max_size=4)),
    st.tuples(st.just("move"), st.integers(0, 4), st.integers(0, 4)),
    st.tuples(st.just("many"), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1)), max_size=4)),
    st.tuples(st.just("clear"), st.integers(0, 4)),
    st.tuples(st.just("commit")),
)


class PlainRows:
    """Expected content of two groups: lists of at most eight scheduler blocks per row."""

    def __init__(self) -> None:
        self.held: list[list[list[int]]] = [[[] for _ in range(5)] for _ in range(2)]

    def apply(self, groups: MultiGroupBlockTable, operation: Any) -> None:
        match operation:
            case "append", row, group, ids:
                ids = ids[: 8 - len(self.held[group][row])]
                groups.append_rows(np.full(len(ids), row), np.full(len(ids), group), np.array(ids, np.int64))
                self.held[group][row] += ids
            case "add", row, ids:
                groups.add_row(row, [ids, ids[:1]])
                self.held[0][row], self.held[1][row] = list(ids), list(ids[:1])
            case "many", pairs:
                pairs = [(row, group) for row, group in pairs if len(self.held[group][row]) < 5]
                ids = list(range(50, 50 + len(pairs)))
                rows, of_groups = np.array(pairs, np.int64).reshape(-1, 2).T
                groups.append_rows(rows, of_groups, np.array(ids))
                for (row, group), block_id in zip(pairs, ids, strict=True):
                    self.held[group][row].append(block_id)
            case "move", source, target:
                groups.move_row(source, target)
                for rows in self.held:
                    rows[target] = list(rows[source])
            case "clear", row:
                groups.clear_row(row)
                for rows in self.held:
                    rows[row] = []
            case _:
                groups.commit()


@given(operations=st.lists(OPERATIONS, max_size=25))
def test_device_copy_equals_the_host_after_any_operations(operations: list[Any]) -> None:
    assert_known_after(operations, CPU)


@pytest.mark.gpu
@given(operations=st.lists(OPERATIONS, max_size=25))
def test_gpu_copy_equals_the_host_after_any_operations(operations: list[Any]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    assert_known_after(operations, torch.device("cuda"))


def assert_known_after(operations: list[Any], device: torch.device) -> None:
    """Check with poison past the lengths, before and after the operations: it never appears below a length."""
    cut = separate(block_size=8, max_len=64, kernel_block_size=4, device=device)
    groups = MultiGroupBlockTable([separate(device=device), cut])
    plain = PlainRows()
    groups.poison()
    for operation in operations:
        plain.apply(groups, operation)
    groups.commit()
    groups.check()
    groups.poison()
    groups.check()
    for table, rows in zip(groups.tables, plain.held, strict=True):
        for row, ids in enumerate(rows):
            kernels = [block_id * table.ratio + i for block_id in ids for i in range(table.ratio)]
            padded = kernels + [POISON_BLOCK_ID] * (table.device_copy.shape[1] - len(kernels))
            assert table.device_copy[row].tolist() == padded
            assert table.block_ids(row).tolist() == ids


def test_maps_slots_of_all_groups_from_device_copies() -> None:
    groups = MultiGroupBlockTable([separate(), separate(block_size=8, kernel_block_size=4)])
    groups.add_row(0, [[7, 3], [2]])
    groups.add_row(1, [[9], [5]])
    groups.commit()
    starts, positions = torch.tensor([0, 2, 3]), torch.tensor([3, 4, 1])
    mapped = slot_mappings_reference(starts, positions, groups.table_set)
    assert mapped.tolist() == [table.slots(np.array([0, 0, 1]), positions.numpy()).tolist() for table in groups.tables]
    assert mapped.tolist() == [[31, 12, 37], [19, 20, 41]]


# ---- errors that check finds


def test_check_finds_a_stale_device_copy() -> None:
    groups = MultiGroupBlockTable([separate()])
    groups.add_row(0, [[1, 2]])
    groups.commit()
    groups.tables[0].device_copy[0, 2] = 5  # past the length: ignored
    groups.check()
    groups.tables[0].device_copy[0, 1] = 5
    with pytest.raises(AssertionError, match="differs from the host"):
        groups.check()


def test_check_finds_stale_ids_past_a_rows_length() -> None:
    table = table_of()
    table.append_row(0, [1, 2])
    table.num_blocks_per_row[0] = 1
    with pytest.raises(AssertionError, match="past a row's length"):
        table.check()
    table.num_blocks_per_row[0] = 3
    with pytest.raises(AssertionError, match="not a block of the pool"):
        table.check()


def test_check_finds_part_of_a_block() -> None:
    table = table_of(block_size=8, kernel_block_size=4)
    table.append_row(0, [1])
    table.num_blocks_per_row[0] = 1
    with pytest.raises(AssertionError, match="holds part of a block"):
        table.check()
