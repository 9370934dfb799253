"""Addends of adapters by the Triton kernels, against float64; run by test_triton.py."""

import numpy as np
import pytest
import torch

from quire.kernels.lora.lora import NO_SLOT, TOLERANCES, AdapterRows, LoraPart, SlotTable, launch_adapters

NUM_SLOTS, MAX_RANK = 4, 80

Shape = tuple[int, int, int]
"""Rank, first output and outputs of a part."""

SITES: list[tuple[int, int, list[list[Shape]]]] = [
    # Inputs, outputs, and the parts of the slots; the last slot is empty.
    (2100, 320, [[(16, 0, 192), (4, 192, 64), (7, 256, 64)], [(80, 192, 64)], [(1, 0, 192), (3, 258, 9)]]),
    (72, 40, [[(5, 0, 40)], [(2, 3, 7), (9, 10, 1)]]),
    (96, 130, [[(16, 0, 130)]]),
]


def poisoned(rows: int, width: int, dtype: torch.dtype, device: torch.device, rng: torch.Generator) -> torch.Tensor:
    """Return random rows within a matrix of NaN."""
    memory = torch.full((rows + 2, width + 16), torch.nan, dtype=dtype)
    memory[1:-1, :width] = torch.randn(rows, width, generator=rng)
    return memory.to(device)[1:-1, :width]


@pytest.mark.parametrize("num_tokens", [21, 1, 70])
@pytest.mark.parametrize("site", SITES)
def test_equals_reference(
    site: tuple[int, int, list[list[Shape]]], num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    inputs, outputs, slots = site
    rng = torch.Generator().manual_seed(num_tokens)
    table = SlotTable(NUM_SLOTS, inputs, outputs, 3, MAX_RANK, dtype, device)
    for slot, parts in enumerate(slots):
        tensors = [
            LoraPart(
                (torch.randn(rank, inputs, generator=rng) / inputs**0.5).to(dtype).to(device),
                torch.randn(rank, width, generator=rng).to(dtype).to(device),
                first,
                0.7,
            )
            for rank, first, width in parts
        ]
        table.set(slot, tensors)
    rows = AdapterRows(80, NUM_SLOTS, device)
    x, y = (poisoned(num_tokens + 2, width, dtype, device, rng) for width in (inputs, outputs))
    for seed in range(2):  # other rows in the same memory
        assigned = np.random.default_rng(seed).integers(NO_SLOT, NUM_SLOTS, num_tokens).astype(np.int32)
        rows.assign(assigned)
        expected, magnitude = y.double(), y.double().abs()
        for row, slot in enumerate(assigned.tolist()):
            for part in table.parts(slot) if slot >= 0 else ():
                added = slice(part.first, part.first + part.b.shape[1])
                a, b, own = part.a.double(), part.b.double(), x[row].double()
                expected[row, added] += part.scale * (own @ a.T) @ b
                magnitude[row, added] += part.scale * (own.abs() @ a.abs().T) @ b.abs()
        without = torch.from_numpy(np.flatnonzero(assigned < 0)).to(device)
        before = y.clone()
        launch_adapters(x, y, table, rows)
        assert bool(((y.double() - expected).abs() <= TOLERANCES[dtype] * magnitude).all())
        assert torch.equal(y[without], before[without]) and torch.equal(y[num_tokens:], before[num_tokens:])
    table.clear(0)
    before = y.clone()
    rows.assign(np.zeros(num_tokens, np.int32))
    launch_adapters(x, y, table, rows)
    assert torch.equal(y, before), "an empty slot adds nothing"
