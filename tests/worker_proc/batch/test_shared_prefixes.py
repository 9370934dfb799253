"""Prefixes that rows of the batch share, found in their block tables."""

import numpy as np
import pytest
import torch

from quire.worker_proc.batch.block_table import BlockTable
from quire.worker_proc.batch.group_tables import MultiGroupBlockTable
from quire.worker_proc.batch.shared_prefixes import SharedPrefixes, find_prefixes

BLOCK = 16
CPU = torch.device("cpu")


class Tables:
    """The block tables of one group."""

    def __init__(self, *rows: list[int], max_rows: int = 8) -> None:
        self.table = BlockTable(BLOCK, max_rows, 64 * BLOCK, 10_000, CPU)
        self.all = MultiGroupBlockTable([self.table])
        for row, blocks in enumerate(rows):
            self.all.add_row(row, [blocks])

    def found(self, min_blocks: int = 1) -> list[tuple[list[int], int]]:
        return [(p.rows.tolist(), p.num_blocks) for p in find_prefixes(self.table, min_blocks * BLOCK)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], []),
        ([[1, 2, 3]], []),
        ([[1, 2], [3, 4]], []),
        ([[1, 2, 3], [1, 2, 4]], [([0, 1], 2)]),
        ([[1, 2, 3], [1, 2]], [([0, 1], 2)]),
        ([[1, 2, 3], [9, 8], [1, 2, 4]], [([0, 2], 2)]),  # one row shares nothing
        ([[1, 2, 3], [7, 8, 4], [1, 2, 5], [7, 8, 6]], [([0, 2], 2), ([1, 3], 2)]),
        # Of 4 rows with a common block, 3 share more: 2 x 3 blocks are more than 3 x 1.
        ([[1, 9], [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6]], [([1, 2, 3], 3)]),
        # 3 x 2 blocks are more than 1 x 3; the rest has no second row.
        ([[1, 2, 9], [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]], [([0, 1, 2, 3], 2)]),
        # The same block after different ones is not a common prefix.
        ([[1, 2, 5], [1, 3, 5]], [([0, 1], 1)]),
    ],
)
def test_prefixes(rows: list[list[int]], expected: list[tuple[list[int], int]]) -> None:
    assert Tables(*rows).found() == expected


def test_short_prefixes_do_not_hide_long_ones() -> None:
    tables = Tables([1, 10], [1, 11], [1, 12], [2, 3, 4, 5], [2, 3, 4, 6])
    assert tables.found(min_blocks=3) == [([3, 4], 3)]


def test_equal_to_an_exhaustive_search_for_two_rows() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        one, other = (rng.integers(1, 3, rng.integers(1, 6)).tolist() for _ in range(2))
        same = 0
        while same < min(len(one), len(other)) and one[same] == other[same]:
            same += 1
        assert Tables(one, other).found() == ([([0, 1], same)] if same else [])


def test_rows_of_a_step() -> None:
    shared = list(range(1, 17))
    tables = Tables([*shared, 20], [30], [*shared, 21], [*shared, 22])
    prefixes = SharedPrefixes(tables.all, 0)

    def of(rows: list[int], contexts: list[int]) -> list[tuple[list[int], int]]:
        return [(p.rows.tolist(), p.length) for p in prefixes.of_step(np.array(rows), np.array(contexts))]

    assert of([0, 1, 2, 3], [256, 3, 260, 300]) == [([0, 2, 3], 256)]
    assert of([0, 1, 2, 3], [255, 3, 260, 300]) == [([2, 3], 256)]  # row 0 is still computing the prefix
    assert of([1, 2, 3], [3, 260, 300]) == [([1, 2], 256)]  # row 0 is parked
    assert of([0, 1], [256, 3]) == []
    tables.all.move_row(3, 1)
    assert of([0, 1, 2], [256, 300, 260]) == [([0, 1, 2], 256)]
    tables.all.clear_row(2)
    tables.all.clear_row(1)
    assert of([0], [256]) == []


def test_tables_are_searched_only_after_rows_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = list(range(1, 17))
    tables = Tables([*shared, 20], [*shared, 21])
    prefixes = SharedPrefixes(tables.all, 0)
    rows, contexts = np.arange(2), np.array([260, 260])
    (before,) = prefixes.of_step(rows, contexts)
    monkeypatch.setattr("quire.worker_proc.batch.shared_prefixes.find_prefixes", None)
    tables.all.append_rows(np.array([0, 1]), np.array([0, 0]), np.array([40, 41]))
    (after,) = prefixes.of_step(rows, contexts + 20)
    assert after.length == before.length and after.rows.tolist() == before.rows.tolist()
