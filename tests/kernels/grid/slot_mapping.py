"""The slot mapping kernel against its reference; run by test_triton.py."""

import pytest
import torch

from quire.kernels.slot_mapping import PAD_SLOT_ID, TILE_TOKENS, compute_slot_mapping, slot_mapping_reference

QUERY_LENS = [[1], [1, 1, 1], [5, 1, 20, 1], [0, 3, 0, 0, 2], [TILE_TOKENS, 1, 2 * TILE_TOKENS + 3], [0]]


@pytest.mark.parametrize("padding", [0, 3, TILE_TOKENS + 1])
@pytest.mark.parametrize("block_size", [1, 8, 12, 16, 32])
@pytest.mark.parametrize("query_lens", QUERY_LENS, ids=str)
def test_equals_reference(query_lens: list[int], block_size: int, padding: int, device: torch.device) -> None:
    rng = torch.Generator().manual_seed(1)
    context_lens = torch.randint(0, 100, (len(query_lens),), generator=rng).tolist()
    positions = [
        torch.arange(context, context + query) for context, query in zip(context_lens, query_lens, strict=True)
    ]
    max_blocks = (100 + max(query_lens)) // block_size + 1
    block_table = torch.randint(0, 2**31 - 1, (len(query_lens), max_blocks), generator=rng, dtype=torch.int32)
    # Padding holds positions from nowhere: they must not be looked up.
    padded = torch.cat([*positions, torch.full((padding,), 2**40)]).to(device)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(device)
    # A table is a slice of a wider one, so that its rows are strided.
    table = torch.cat([block_table, block_table], dim=1).to(device)[:, :max_blocks]
    expected = slot_mapping_reference(starts, padded, table, block_size)
    result = compute_slot_mapping(starts, padded, table, block_size)
    assert result.dtype == torch.int64
    assert torch.equal(result, expected)
    assert (result[sum(query_lens) :] == PAD_SLOT_ID).all()


def test_position_outside_the_table_is_not_written(device: torch.device) -> None:
    starts = torch.tensor([0, 3], dtype=torch.int32, device=device)
    table = torch.tensor([[5, 6]], dtype=torch.int32, device=device)
    positions = torch.tensor([7, 8, -1], device=device)
    assert compute_slot_mapping(starts, positions, table, 4).tolist() == [6 * 4 + 3, PAD_SLOT_ID, PAD_SLOT_ID]
