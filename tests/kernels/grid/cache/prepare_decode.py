"""The prepare decode kernels compared with their references; run by test_triton.py."""

import dataclasses

import pytest
import torch

from quire.kernels.cache.pointer_table import TableSet
from quire.kernels.cache.prepare_decode import (
    TILE_ROWS,
    DecodeInputs,
    advance_decode,
    advance_decode_reference,
    prepare_decode,
    prepare_decode_reference,
)
from quire.kernels.cache.slot_mapping import PAD_SLOT_ID

MAX_LEN = 100
POISON = -(2**31)


def state_of(max_rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last sampled tokens and the lengths of rows."""
    rng = torch.Generator().manual_seed(3)
    last_sampled = torch.randint(0, 200_000, (max_rows,), generator=rng)
    num_computed = torch.randint(0, MAX_LEN, (max_rows,), generator=rng, dtype=torch.int32)
    return last_sampled.to(device), num_computed.to(device)


def tables_of(num_computed: torch.Tensor, block_sizes: list[int]) -> TableSet:
    """Return tables with ids for the positions up to each row's next one, and poison after them."""
    rng = torch.Generator().manual_seed(4)
    tables = []
    for block_size in block_sizes:
        columns = MAX_LEN // block_size + 1
        table = torch.randint(0, 2**31 - 1, (len(num_computed), columns), generator=rng, dtype=torch.int32)
        held = num_computed.cpu() // block_size + 1
        table[torch.arange(columns) >= held[:, None]] = POISON
        tables.append(table.to(num_computed.device))
    return TableSet.of(tables, block_sizes)


def used_inputs(num_rows: int, num_groups: int, device: torch.device) -> DecodeInputs:
    """Return buffers with the content of an earlier step."""
    inputs = DecodeInputs.empty(num_rows, num_groups, device)
    for field in dataclasses.fields(inputs):
        getattr(inputs, field.name).fill_(77)
    return inputs


def assert_equal(got: DecodeInputs, want: DecodeInputs) -> None:
    for field in dataclasses.fields(got):
        assert torch.equal(getattr(got, field.name), getattr(want, field.name)), field.name


@pytest.mark.parametrize("num_live", [0, 1, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 2])
@pytest.mark.parametrize("padding", [0, 3])
def test_equals_reference(num_live: int, padding: int, device: torch.device) -> None:
    last_sampled, num_computed = state_of(TILE_ROWS + 5, device)
    tables = tables_of(num_computed, [16, 8])
    rows = torch.randperm(TILE_ROWS + 5, generator=torch.Generator().manual_seed(5))[:num_live]
    row_of = torch.cat([rows, torch.full((padding,), -1)]).to(torch.int32).to(device)
    got, want = (used_inputs(num_live + padding, 2, device) for _ in range(2))
    prepare_decode(row_of, last_sampled, num_computed, tables, got)
    prepare_decode_reference(row_of, last_sampled, num_computed, tables, want)
    assert_equal(got, want)


@pytest.mark.parametrize("num_rows", [0, 5, TILE_ROWS + 2])
def test_advance_equals_reference(num_rows: int, device: torch.device) -> None:
    got, want = state_of(TILE_ROWS + 5, device), state_of(TILE_ROWS + 5, device)
    row_of = torch.randperm(TILE_ROWS + 5, generator=torch.Generator().manual_seed(5))[:num_rows].to(torch.int32)
    row_of[num_rows // 2 :] = -1
    sampled = torch.arange(1000, 1000 + num_rows, device=device)
    advance_decode(row_of.to(device), sampled, *got)
    advance_decode_reference(row_of.to(device), sampled, *want)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_out_of_range_rows_are_padding(device: torch.device) -> None:
    """A row past the last one, and a row whose next block is missing."""
    last_sampled = torch.tensor([5, 6], device=device)
    num_computed = torch.tensor([8, 3], dtype=torch.int32, device=device)
    tables = TableSet.of([torch.tensor([[7, POISON], [9, POISON]], dtype=torch.int32, device=device)], [4])
    inputs = used_inputs(4, 1, device)
    row_of = torch.tensor([0, 1, 2, -5], dtype=torch.int32, device=device)
    prepare_decode(row_of, last_sampled, num_computed, tables, inputs)
    assert inputs.input_ids.tolist() == [5, 6, 0, 0]
    assert inputs.seq_lens.tolist() == [9, 4, 0, 0]
    assert inputs.query_start_loc.tolist() == [0, 1, 2, 2, 2]
    assert inputs.slot_mapping.tolist() == [[PAD_SLOT_ID, 9 * 4 + 3, PAD_SLOT_ID, PAD_SLOT_ID]]
    advance_decode(row_of, torch.tensor([1, 2, 3, 4], device=device), last_sampled, num_computed)
    assert last_sampled.tolist() == [1, 2] and num_computed.tolist() == [9, 4]


def test_captured_graph_advances_without_the_host(device: torch.device) -> None:
    """Every replay computes the next step, because the graph reads nothing from the host."""
    if device.type != "cuda":
        pytest.skip("graphs need a CUDA device")
    last_sampled, num_computed = state_of(6, device)
    begun = num_computed.clone()
    tables = tables_of(num_computed + 4, [16, 8])
    row_of = torch.tensor([2, 0, 5, -1], dtype=torch.int32, device=device)
    inputs, sampled = used_inputs(4, 2, device), torch.zeros(4, dtype=torch.int64, device=device)

    def step() -> None:
        prepare_decode(row_of, last_sampled, num_computed, tables, inputs)
        torch.add(inputs.input_ids, 1, out=sampled)
        advance_decode(row_of, sampled, last_sampled, num_computed)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    want = used_inputs(4, 2, device)
    num_computed[row_of[:3].long()] -= 1
    last_sampled[row_of[:3].long()] -= 1
    prepare_decode_reference(row_of, last_sampled, num_computed, tables, want)
    assert_equal(inputs, want)
    assert (num_computed - begun).tolist() == [3, 0, 3, 0, 0, 3]
