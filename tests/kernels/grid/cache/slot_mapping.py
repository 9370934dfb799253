"""The slot mapping kernel compared with its reference; run by test_triton.py."""

import pytest
import torch

from quire.kernels.cache.pointer_table import TableSet
from quire.kernels.cache.slot_mapping import (
    PAD_SLOT_ID,
    TILE_TOKENS,
    compute_slot_mappings,
    slot_mappings_reference,
)

QUERY_LENS = [[1], [1, 1, 1], [5, 1, 20, 1], [0, 3, 0, 0, 2], [TILE_TOKENS, 1, 2 * TILE_TOKENS + 3], [0]]
POISON = -(2**31)
FAR = 2**40


def random_tables(rows: int, block_sizes: list[int], max_len: int, device: torch.device) -> TableSet:
    """Make strided tables with ids up to the largest; the memory beside them must not be read."""
    rng = torch.Generator().manual_seed(1)
    tables = []
    for block_size in block_sizes:
        columns = max_len // block_size + 1
        table = torch.randint(0, 2**31 - 1, (rows, columns), generator=rng, dtype=torch.int32)
        wide = torch.cat([table, torch.full_like(table, POISON)], dim=1).to(device)
        tables.append(wide[:, :columns])
    return TableSet.of(tables, block_sizes)


def step(query_lens: list[int], padding: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(2)
    contexts = torch.randint(0, 100, (len(query_lens),), generator=rng).tolist()
    spans = [torch.arange(context, context + query) for context, query in zip(contexts, query_lens, strict=True)]
    # Padding has invalid positions, which must not be looked up.
    positions = torch.cat([*spans, torch.full((padding,), FAR)]).to(device)
    return torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(device), positions


@pytest.mark.parametrize("padding", [0, TILE_TOKENS + 1])
@pytest.mark.parametrize("block_sizes", [[1], [12], [16, 8, 48]], ids=str)
@pytest.mark.parametrize("query_lens", QUERY_LENS, ids=str)
def test_equals_reference(query_lens: list[int], block_sizes: list[int], padding: int, device: torch.device) -> None:
    starts, positions = step(query_lens, padding, device)
    tables = random_tables(len(query_lens), block_sizes, 100 + max(query_lens), device)
    result = compute_slot_mappings(starts, positions, tables)
    assert result.dtype == torch.int64
    assert torch.equal(result, slot_mappings_reference(starts, positions, tables))
    assert (result[:, sum(query_lens) :] == PAD_SLOT_ID).all()


def test_rows_in_any_order_with_the_callers_output_tensor(device: torch.device) -> None:
    starts, positions = step([2, 3, 4], 2, device)
    tables = random_tables(6, [4, 8], 110, device)
    row_of = torch.tensor([4, -1, 0], dtype=torch.int32, device=device)
    wide = torch.full((2, 32), 77, device=device)
    result = compute_slot_mappings(starts, positions, tables, row_of, out=wide[:, :11])
    assert torch.equal(result, slot_mappings_reference(starts, positions, tables, row_of))
    assert (result[:, 2:5] == PAD_SLOT_ID).all() and (result[:, :2] >= 0).all()
    assert (wide[:, 11:] == 77).all()


def test_positions_outside_the_table_are_not_written(device: torch.device) -> None:
    starts = torch.tensor([0, 4, 5], dtype=torch.int32, device=device)
    tables = TableSet.of([torch.tensor([[5, 6, POISON]], dtype=torch.int32, device=device)], [4])
    positions = torch.tensor([7, 12, -1, 8, 0], device=device)
    row_of = torch.tensor([0, 1], dtype=torch.int32, device=device)
    assert compute_slot_mappings(starts, positions, tables, row_of).tolist() == [[6 * 4 + 3, *[PAD_SLOT_ID] * 4]]


def test_tokens_past_the_end_of_the_tensors_are_skipped(device: torch.device) -> None:
    """``query_start_loc`` has five tokens, the tensors three."""
    starts = torch.tensor([0, 5], dtype=torch.int32, device=device)
    table = torch.tensor([[3, 4]], dtype=torch.int32, device=device)
    out = torch.full((1, 5), 77, device=device)
    positions = torch.arange(3, device=device)
    compute_slot_mappings(starts, positions, TableSet.of([table], [4]), out=out[:, :3])
    assert out.tolist() == [[12, 13, 14, 77, 77]]
