"""The staged write kernel compared with its reference; run by test_triton.py."""

import numpy as np
import pytest
import torch

from quire.kernels.cache.pointer_table import TableSet
from quire.kernels.cache.staged_write import TILE_WORDS, pack_runs, write_runs, write_runs_reference

BESIDE = 77


def strided_tables(shapes: list[tuple[int, int]], device: torch.device) -> TableSet:
    """Make tables that are slices of wider ones, filled with ``BESIDE``."""
    wide = [torch.full((rows, columns + 3), BESIDE, dtype=torch.int32, device=device) for rows, columns in shapes]
    tables = [whole[:, :columns] for whole, (_, columns) in zip(wide, shapes, strict=True)]
    return TableSet.of(tables, [1] * len(shapes))


RUNS = [
    [],
    [(0, 2, 5, 1)],
    [(0, 0, 0, 7), (0, 0, 7, 1), (1, 3, 4, 0), (1, 0, 2, 3), (2, 1, 0, 1)],
    [(2, 0, 1, TILE_WORDS), (0, 1, 0, 2 * TILE_WORDS + 3), (2, 1, 3, 1)],
]


@pytest.mark.parametrize("runs", RUNS, ids=[f"{len(runs)} runs" for runs in RUNS])
def test_equals_reference(runs: list[tuple[int, int, int, int]], device: torch.device) -> None:
    headers = np.array(runs, np.int32).reshape(len(runs), 4)
    rng = np.random.default_rng(1)
    values = rng.integers(-(2**31), 2**31, headers[:, 3].sum(), np.int32)
    packed = torch.from_numpy(pack_runs(headers, values)).to(device)
    shapes = [(3, 2 * TILE_WORDS + 3), (4, 9), (2, TILE_WORDS + 5)]
    expected, tables = strided_tables(shapes, device), strided_tables(shapes, device)
    write_runs_reference(packed, len(runs), expected)
    write_runs(packed, len(runs), tables)
    for got, want in zip(tables.tables, expected.tables, strict=True):
        # Compare the whole storage: memory beside the table must not change either.
        assert torch.equal(_whole(got), _whole(want))
    assert sum(int((t != BESIDE).sum()) for t in tables.tables) == len(values)


def _whole(table: torch.Tensor) -> torch.Tensor:
    return table.as_strided((table.shape[0], table.stride(0)), table.stride())


@pytest.mark.parametrize(
    "run", [(1, 0, 0, 1), (-1, 0, 0, 1), (0, 2, 0, 1), (0, -1, 0, 1), (0, 0, 4, 1), (0, 1, -1, 1)], ids=str
)
def test_places_outside_a_table_are_not_written(run: tuple[int, int, int, int], device: torch.device) -> None:
    tables = strided_tables([(2, 4)], device)
    packed = torch.from_numpy(pack_runs(np.array([run]), np.array([5], np.int32))).to(device)
    write_runs(packed, 1, tables)
    assert (_whole(tables.tables[0]) == BESIDE).all()


def test_values_outside_the_buffer_are_not_read(device: torch.device) -> None:
    tables = strided_tables([(1, 4)], device)
    packed = torch.from_numpy(pack_runs(np.array([(0, 0, 0, 4)]), np.arange(4, dtype=np.int32))).to(device)
    write_runs(packed[:-2], 1, tables)
    assert tables.tables[0].tolist() == [[0, 1, BESIDE, BESIDE]]
