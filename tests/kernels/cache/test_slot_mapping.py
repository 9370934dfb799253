"""Slot mapping without triton: the reference on worked examples, and the launcher's argument checks."""

import pytest
import torch

from quire.kernels.cache.pointer_table import TableSet
from quire.kernels.cache.slot_mapping import (
    PAD_SLOT_ID,
    compute_slot_mappings,
    slot_mapping_reference,
    slot_mappings_reference,
)
from quire.protocol.model import kv_layout


def starts_of(*query_lens: int) -> torch.Tensor:
    return torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)


def table_of(*rows: list[int]) -> torch.Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32)


def test_pad_slot_equals_the_protocol_constant() -> None:
    assert PAD_SLOT_ID == kv_layout.PAD_SLOT_ID


def test_chunk_that_crosses_a_block_boundary() -> None:
    positions = torch.tensor([6, 7, 8])
    assert slot_mapping_reference(starts_of(3), positions, table_of([7, 3, 9]), 4).tolist() == [14, 15, 36]


def test_three_rows_at_once() -> None:
    table = table_of([5, 8], [2, 3, 10], [12])
    positions = torch.tensor([3, 7, 2, 5, 9, 1])
    assert slot_mapping_reference(starts_of(2, 3, 1), positions, table, 4).tolist() == [23, 35, 10, 13, 41, 49]


def test_whole_prompts_of_small_blocks() -> None:
    table = table_of([0, 1], [5, 6, 7], [10, 11])
    positions = torch.tensor([0, 1, 0, 1, 2, 3, 4, 0, 1, 2])
    expected = [0, 1, 10, 11, 12, 13, 14, 20, 21, 22]
    assert slot_mapping_reference(starts_of(2, 5, 3), positions, table, 2).tolist() == expected


def test_padding_and_a_row_without_tokens() -> None:
    positions = torch.tensor([2, 3, 4, 0, 99])
    table = table_of([5, 2], [1, 1], [9, 1])
    expected = [5 * 4 + 2, 5 * 4 + 3, 2 * 4, 9 * 4, PAD_SLOT_ID]
    assert slot_mapping_reference(starts_of(3, 0, 1), positions, table, 4).tolist() == expected


def test_each_group_has_its_own_slots() -> None:
    tables = TableSet.of([table_of([7, 3]), table_of([2])], [4, 16])
    assert slot_mappings_reference(starts_of(2), torch.tensor([3, 4]), tables).tolist() == [[31, 12], [35, 36]]


def test_reference_raises_outside_the_table() -> None:
    with pytest.raises(IndexError):
        slot_mapping_reference(starts_of(1), torch.tensor([8]), torch.zeros(1, 2, dtype=torch.int32), 4)


def test_rejects_wrong_tensors() -> None:
    table, starts = torch.zeros(2, 4, dtype=torch.int32), starts_of(5, 0)
    tables, positions = TableSet.of([table], [8]), torch.zeros(5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"query_start_loc: dimension 0 \(num_rows \+ 1\) is 2, expected 3"):
        compute_slot_mappings(starts[:2], positions, tables, row_of=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"\(num_rows \+ 1\) is 4, more than the table's rows"):
        compute_slot_mappings(torch.zeros(4, dtype=torch.int32), positions, tables)
    with pytest.raises(ValueError, match=r"out: dimension 1 \(num_tokens\) is 4, expected 5"):
        compute_slot_mappings(starts, positions, tables, out=torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="tables: device is cpu, expected meta"):
        compute_slot_mappings(starts.to("meta"), positions.to("meta"), tables)


def test_table_set_rejects_invalid_tables() -> None:
    table = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="expected equal numbers"):
        TableSet.of([table], [8, 8])
    with pytest.raises(ValueError, match="block_size is 0"):
        TableSet.of([table], [0])
    with pytest.raises(ValueError, match="block_table: dtype"):
        TableSet.of([table.long()], [8])
