"""Staged writes without triton: packed runs, the reference, and the launcher's argument checks."""

import numpy as np
import pytest
import torch

from quire.kernels.cache.pointer_table import TableSet
from quire.kernels.cache.staged_write import pack_runs, write_runs, write_runs_reference


def tables_of(*shapes: tuple[int, int]) -> TableSet:
    return TableSet.of([torch.zeros(shape, dtype=torch.int32) for shape in shapes], [1] * len(shapes))


def packed_of(*runs: tuple[int, int, int, int], values: list[int]) -> torch.Tensor:
    return torch.from_numpy(pack_runs(np.array(runs), np.array(values, np.int32)))


def test_runs_are_written_at_their_headers_places() -> None:
    tables = tables_of((2, 4), (3, 2))
    packed = packed_of((0, 1, 1, 3), (1, 2, 0, 1), (0, 0, 0, 0), (0, 0, 3, 1), values=[5, 6, 7, 8, 9])
    write_runs_reference(packed, 4, tables)
    assert tables.tables[0].tolist() == [[0, 0, 0, 9], [0, 5, 6, 7]]
    assert tables.tables[1].tolist() == [[0, 0], [0, 0], [8, 0]]


def test_buffer_holds_only_headers_and_values() -> None:
    packed = pack_runs(np.array([(0, 1, 2, 1), (3, 4, 5, 2)]), np.array([7, 8, 9], np.int32))
    assert packed.tolist() == [0, 1, 2, 1, 10, 3, 4, 5, 2, 11, 7, 8, 9]


@pytest.mark.parametrize("run", [(2, 0, 0, 1), (0, 2, 0, 1), (0, 0, 4, 1), (0, 0, -1, 1), (0, -1, 0, 1), (-1, 0, 0, 1)])
def test_reference_raises_outside_a_table(run: tuple[int, int, int, int]) -> None:
    with pytest.raises(IndexError):
        write_runs_reference(packed_of(run, values=[5]), 1, tables_of((2, 4)))


def test_rejects_wrong_tensors() -> None:
    with pytest.raises(ValueError, match="packed: dtype"):
        write_runs(torch.zeros(5), 1, tables_of((2, 4)))
    with pytest.raises(ValueError, match="too short for 2 runs"):
        write_runs(torch.zeros(9, dtype=torch.int32), 2, tables_of((2, 4)))
