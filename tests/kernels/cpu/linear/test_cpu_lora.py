"""Addends of adapters by the native library, against float64."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tiers import covering

from quire.kernels.cpu.linear.lora import CpuAdapters
from quire.kernels.cpu.native.library import Native
from quire.kernels.cpu.native.recorded_plan import record
from quire.kernels.lora.lora import NO_SLOT, TOLERANCES, AdapterRows, LoraPart, SlotTable, add_adapters_reference

CPU = torch.device("cpu")
MAX_TOKENS = 200

Shape = tuple[int, int, int]
"""Rank, first output and outputs of a part."""

EMPTY: list[Shape] = []
SITES: dict[str, tuple[int, int, list[list[Shape]]]] = {
    # Inputs, outputs, and the parts of each slot.
    "fused": (
        96,
        200,
        [[(16, 0, 128), (4, 128, 40), (7, 168, 32)], EMPTY, [(64, 128, 40)], [(1, 0, 128), (3, 170, 9)]],
    ),
    "odd": (37, 13, [[(5, 0, 13)], [(2, 3, 7), (9, 10, 1)], EMPTY]),
    "tiny": (1, 1, [[(1, 0, 1)]]),
    # Few rows of this one are computed in two stages.
    "two stages": (4100, 5003, [[(61, 3, 5000)], [(10, 0, 2501), (64, 2501, 2502)], EMPTY]),
    "large": (1100, 700, [[(33, 0, 700)], [(16, 0, 700)], [(8, 100, 600)]]),
}


class Case:
    """A site with adapters in its slots, rows, and NaN in all memory that must not be read."""

    def __init__(self, site: str, dtype: torch.dtype, num_tokens: int, seed: int = 0) -> None:
        self.inputs, self.outputs, slots = SITES[site]
        self.rng = torch.Generator().manual_seed(seed)
        self.table = SlotTable(len(slots), self.inputs, self.outputs, 3, 64, dtype, CPU)
        for slot, parts in enumerate(slots):
            self.table.set(slot, [self.part(shape, dtype) for shape in parts])
        self.rows = AdapterRows(MAX_TOKENS, len(slots), CPU)
        self.x = self.matrix(num_tokens, self.inputs, dtype)
        self.y = self.matrix(num_tokens, self.outputs, dtype)

    def assign(self, seed: int, num_tokens: int) -> npt.NDArray[np.int32]:
        slots = np.random.default_rng(seed).integers(NO_SLOT, len(self.table), num_tokens).astype(np.int32)
        self.rows.assign(slots)
        self.x[slots < 0] = torch.nan
        return slots

    def matrix(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return random rows within a matrix of NaN."""
        memory = torch.full((rows + 2, width + 40), torch.nan, dtype=dtype)
        inner = memory[1:-1, 3 : 3 + width]
        inner.copy_(torch.randn(rows, width, generator=self.rng))
        return inner

    def part(self, shape: Shape, dtype: torch.dtype) -> LoraPart:
        rank, first, outputs = shape
        sizes = 64, rank * self.inputs, 64, rank * outputs, 64
        memory = torch.full((sum(sizes),), torch.nan, dtype=dtype)
        _, a, _, b, _ = memory.split(sizes)
        a.copy_(torch.randn(len(a), generator=self.rng) / self.inputs**0.5)
        b.copy_(torch.randn(len(b), generator=self.rng))
        return LoraPart(a.view(rank, self.inputs), b.view(rank, outputs), first, 0.7)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``y`` with the addends, and the allowed difference, in float64."""
        y, magnitude = self.y.double(), self.y.double().abs()
        for row, slot in enumerate(self.rows.slots.tolist()):
            for part in self.table.parts(slot) if slot >= 0 else ():
                outputs = slice(part.first, part.first + part.b.shape[1])
                x, a, b = self.x[row].double(), part.a.double(), part.b.double()
                y[row, outputs] += part.scale * (x @ a.T) @ b
                magnitude[row, outputs] += part.scale * (x.abs() @ a.abs().T) @ b.abs()
        return y, TOLERANCES[self.table.dtype] * magnitude


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("site", "num_tokens", "dtype"), covering(SITES, [0, 1, 2, 3, 5, 9, 33, 200], DTYPES))
def test_equals_reference(native: Native, site: str, num_tokens: int, dtype: torch.dtype) -> None:
    case = Case(site, dtype, num_tokens)
    case.assign(num_tokens, num_tokens)
    expected, allowed = case.expected()
    by_reference = case.y.clone()
    CpuAdapters(native).add(case.x, case.y, case.table, case.rows)
    assert bool(((case.y.double() - expected).abs() <= allowed).all())
    add_adapters_reference(case.x, by_reference, case.table, case.rows)
    assert bool(((by_reference.double() - expected).abs() <= allowed).all())
    outside = torch.cat([part.flatten() for part in _around(case.y)])
    assert bool(outside.isnan().all()), "nothing but the outputs is written"


def _around(inner: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the rest of a matrix of ``Case.matrix``."""
    stride, start = inner.stride(0), inner.storage_offset()
    whole = torch.as_strided(inner, (inner.shape[0] + 2, stride), (stride, 1), 0)
    left = start % stride
    return whole[0], whole[-1], whole[:, :left], whole[:, left + inner.shape[1] :]


@pytest.mark.parametrize(
    ("site", "dtype", "threads"), covering(["fused", "odd", "large", "two stages"], DTYPES, [1, 2, 3])
)
def test_a_rows_bits_depend_on_that_row_alone(native: Native, site: str, dtype: torch.dtype, threads: int) -> None:
    add, before = CpuAdapters(native).add, torch.get_num_threads()
    case = Case(site, dtype, MAX_TOKENS)
    slots = case.assign(1, MAX_TOKENS)
    start = case.y.clone()
    torch.set_num_threads(1)
    try:
        add(case.x, case.y, case.table, case.rows)
        torch.set_num_threads(threads)
        for first, count in ((0, MAX_TOKENS), (0, 1), (7, 1), (3, 2), (11, 5), (20, 13), (50, 40), (90, 110)):
            rows = slice(first, first + count)
            alone = start[rows].clone()
            case.rows.assign(slots[rows])
            add(case.x[rows], alone, case.table, case.rows)
            assert torch.equal(alone, case.y[rows])
        # All rows use one slot.
        together = start.clone()
        case.x.nan_to_num_()
        case.rows.assign(np.zeros(MAX_TOKENS, np.int32))
        add(case.x, together, case.table, case.rows)
        own = torch.from_numpy(np.flatnonzero(slots == 0))
        assert torch.equal(together[own], case.y[own])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_recorded_plan_serves_any_rows_and_slots(native: Native, dtype: torch.dtype) -> None:
    case, add, num_tokens = Case("fused", dtype, 40), CpuAdapters(native).add, 40
    x, y = torch.randn(num_tokens, case.inputs).to(dtype), torch.zeros(num_tokens, case.outputs, dtype=dtype)
    case.rows.assign(np.full(num_tokens, NO_SLOT, np.int32))
    plan, _ = record(native, lambda: add(x, y, case.table, case.rows), keep=(x, y, case.table, case.rows))
    for seed in range(6):
        case.assign(seed, num_tokens)
        if seed == 3:
            case.table.set(1, [case.part((11, 20, 150), dtype)])
            case.table.clear(0)
        x.copy_(torch.randn(num_tokens, case.inputs))
        y.copy_(torch.randn(num_tokens, case.outputs))
        expected = y.clone()
        add(x, expected, case.table, case.rows)
        assert plan.run() == 0
        assert torch.equal(y, expected)


def test_tensors_that_the_library_would_misread(native: Native) -> None:
    add = CpuAdapters(native).add
    table, rows = SlotTable(1, 8, 8, 1, 4, torch.float16, CPU), AdapterRows(4, 1, CPU)
    with pytest.raises(ValueError, match=r"table: torch.float16 on cpu, expected float32 or bfloat16 on the CPU"):
        add(torch.zeros(2, 8).half(), torch.zeros(2, 8).half(), table, rows)
    with pytest.raises(ValueError, match=r"x: .*stride"):
        add(torch.zeros(8, 2).half().T, torch.zeros(2, 8).half(), table, rows)
