"""Tables of slots, rows sorted by slot, and the reference of adapters. These tests do not need triton."""

import numpy as np
import pytest
import torch

from quire.kernels.lora.lora import (
    NO_SLOT,
    TILE_ROWS,
    AdapterRows,
    LoraPart,
    SlotTable,
    add_adapters,
)

CPU = torch.device("cpu")


def make_table() -> SlotTable:
    return SlotTable(3, 4, 10, max_parts=2, max_rank=8, dtype=torch.float32, device=CPU)


def make_part(rank: int = 2, outputs: int = 5, first: int = 0, scale: float = 0.5) -> LoraPart:
    return LoraPart(torch.randn(rank, 4), torch.randn(rank, outputs), first, scale)


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 100])
@pytest.mark.parametrize("num_slots", [1, 5])
def test_tiles_hold_each_row_with_a_slot_once(num_tokens: int, num_slots: int) -> None:
    rows = AdapterRows(100, num_slots, CPU)
    for seed in range(4):
        slots = np.random.default_rng(seed).integers(NO_SLOT, num_slots, num_tokens).astype(np.int32)
        rows.assign(slots)
        assert rows.empty == bool((slots < 0).all())
        found = []
        for slot, first, end in rows.tiles.tolist():
            assert end - first <= TILE_ROWS
            assert (slots[rows.order[first:end]] == slot).all()
            found += rows.order[first:end].tolist()
        assert sorted(found) == np.flatnonzero(slots >= 0).tolist()


def test_memory_made_in_inference_mode_can_be_written_outside_it() -> None:
    with torch.inference_mode():
        table, rows = make_table(), AdapterRows(4, 3, CPU)
    table.set(0, [make_part()])
    rows.assign(np.zeros(2, np.int32))
    assert table.entries[0].any() and rows.tiles[0].tolist() == [0, 0, 2]


def test_rows_that_do_not_fit() -> None:
    rows = AdapterRows(4, 2, CPU)
    with pytest.raises(ValueError, match="slots: 5 rows, expected at most 4"):
        rows.assign(np.zeros(5, np.int32))
    with pytest.raises(ValueError, match="slots: 2, expected -1 to 1"):
        rows.assign(np.array([0, 2], np.int32))
    with pytest.raises(ValueError, match="slots: -2, expected -1 to 1"):
        rows.assign(np.array([0, -2], np.int32))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([make_part(outputs=2)] * 3, "parts: 3, expected at most 2"),
        ([make_part(outputs=6), make_part(first=5)], r"parts\[1\]: output 5 belongs to another part"),
        ([make_part(rank=9)], r"parts\[0\]: rank is 9, expected 1 to 8"),
        ([make_part(first=6)], r"parts\[0\]: outputs 6 to 11, expected 0 to 10"),
        ([LoraPart(torch.zeros(2, 5), torch.zeros(2, 5), 0, 1.0)], r"a: dimension 1 \(inputs\) is 5, expected 4"),
        ([LoraPart(torch.zeros(2, 4), torch.zeros(3, 5), 0, 1.0)], r"b: dimension 0 \(rank\) is 3, expected 2"),
        ([LoraPart(torch.zeros(2, 4).half(), torch.zeros(2, 5), 0, 1.0)], "a: dtype"),
        ([LoraPart(torch.zeros(2, 8)[:, :4], torch.zeros(2, 5), 0, 1.0)], "contiguous"),
    ],
)
def test_parts_that_a_kernel_would_misread(parts: list[LoraPart], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_table().set(0, parts)


def test_tensors_that_a_kernel_would_misread() -> None:
    table, rows = make_table(), AdapterRows(4, 3, CPU)
    rows.assign(np.zeros(2, np.int32))
    for x, y, message in (
        (torch.zeros(2, 3), torch.zeros(2, 10), "x: dimension 1"),
        (torch.zeros(2, 4), torch.zeros(3, 10), "y: dimension 0"),
        (torch.zeros(2, 4).half(), torch.zeros(2, 10), "x: dtype"),
        (torch.zeros(1, 4), torch.zeros(1, 10), "x: 1 rows, expected 2 to 4"),
        (torch.zeros(5, 4), torch.zeros(5, 10), "x: 5 rows, expected 2 to 4"),
    ):
        with pytest.raises(ValueError, match=message):
            add_adapters(x, y, table, rows)
    with pytest.raises(ValueError, match="rows: 2 slots"):
        add_adapters(torch.zeros(2, 4), torch.zeros(2, 10), table, AdapterRows(4, 2, CPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reference_adds_the_product_of_dense_matrices(dtype: torch.dtype) -> None:
    table, rows = SlotTable(3, 4, 10, 2, 8, dtype, CPU), AdapterRows(6, 3, CPU)
    parts = [LoraPart(torch.randn(r, 4).to(dtype), torch.randn(r, 3).to(dtype), f, 0.25) for r, f in ((2, 0), (5, 4))]
    table.set(1, parts)
    table.set(2, parts[:1])
    table.clear(2)
    rows.assign(np.array([1, -1, 1, 0, 2], np.int32))
    x, y = torch.randn(5, 4).to(dtype), torch.randn(5, 10).to(dtype)
    expected = y.double()
    for part in parts:
        weight = part.scale * (part.b.double().T @ part.a.double())
        expected[[0, 2], part.first : part.first + 3] += x[[0, 2]].double() @ weight.T
    add_adapters(x, y, table, rows)
    torch.testing.assert_close(y, expected.to(dtype))
