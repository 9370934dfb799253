"""One pass of the native CPU backend over a prefix that rows share: bit for bit the result of row by row."""

import dataclasses

import numpy as np
import pytest
import torch
from cpu_attention_cases import Ask, Case, Rows, make_case, raw, run
from tiers import covering

from quire.kernels.cpu.native.library import load_native
from quire.worker_proc.attention.backend import SharedPrefix
from quire.worker_proc.attention.cpu import CpuBackend

BLOCK = 16
ROWS: dict[str, Rows] = {
    "decode": [(600, 1), (513, 1), (900, 1), (512, 1), (700, 1)],
    "with chunks": [(600, 1), (520, 40), (512, 3), (530, 1)],
    "with drafts": [(640, 4), (512, 4), (513, 2)],
}
DTYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "fp8": (torch.float32, torch.float8_e4m3fn),
}
ASKS = [Ask(), Ask(soft_cap=2.0, sinks=True, images=((525, 550),))]
LENGTH = 528
"""Two splits, and a block that is left to the rows."""


@pytest.fixture
def backend() -> CpuBackend:
    if load_native() is None:
        pytest.skip("no C++ compiler")
    return CpuBackend()


def share(case: Case, *prefixes: tuple[list[int], int]) -> Case:
    """Give rows the leading blocks of the first of them; other copies of these keys become NaN."""
    table = case.batch.block_table.clone()
    for rows, length in prefixes:
        blocks = length // BLOCK
        for row in rows[1:]:
            raw(case.cache)[:, table[row, :blocks].long()] = raw(torch.full((1,), float("nan")).to(case.cache.dtype))
            table[row, :blocks] = table[rows[0], :blocks]
    return dataclasses.replace(case, batch=dataclasses.replace(case.batch, block_table=table))


def passed(case: Case, *prefixes: tuple[list[int], int]) -> Case:
    shared = tuple(SharedPrefix(np.array(rows), length) for rows, length in prefixes)
    return dataclasses.replace(case, batch=dataclasses.replace(case.batch, prefixes=shared))


@pytest.mark.parametrize(
    ("rows", "dtypes", "heads", "ask"),
    covering(ROWS, DTYPES, [(4, 4, 8), (9, 3, 64), (5, 1, 20)], ASKS, pairs=True),
)
def test_bits_are_those_of_row_by_row(
    rows: str, dtypes: str, heads: tuple[int, int, int], ask: Ask, backend: CpuBackend
) -> None:
    dtype, cache_dtype = DTYPES[dtypes]
    if dtypes == "fp8":
        ask = dataclasses.replace(ask, k_scale=(0.25, 2.0, 0.03), v_scale=(0.5, 4.0))
    everyone = list(range(len(ROWS[rows])))
    case = share(make_case(ROWS[rows], heads, BLOCK, dtype, cache_dtype, ask), (everyone, 512))
    expected = run(backend, case)
    assert expected.isfinite().all()
    assert torch.equal(run(backend, passed(case, (everyone, 512))), expected)


def test_some_rows_share_and_others_share_another_prefix(backend: CpuBackend) -> None:
    rows = [(600, 1), (20, 1), (700, 2), (900, 1), (300, 1), (0, 9), (310, 1)]
    prefixes = ([0, 2, 3], LENGTH), ([4, 6], 272)
    case = share(make_case(rows, (4, 2, 16), BLOCK, torch.float32), *prefixes)
    assert torch.equal(run(backend, passed(case, *prefixes)), run(backend, case))


@pytest.mark.parametrize("heads", [(4, 2, 16), (7, 1, 20)], ids=str)
@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16], ids=str)
def test_threads_and_many_rows(cache: torch.dtype, heads: tuple[int, int, int], backend: CpuBackend) -> None:
    """More query rows than an item has, keys divided among items, and merged in the same order."""
    rows: Rows = [(1040 + row, 1) for row in range(40)]
    case = share(make_case(rows, heads, BLOCK, torch.float32, cache), (list(range(40)), 1040))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(run(backend, passed(case, (list(range(40)), 1040))), run(backend, case))
    finally:
        torch.set_num_threads(before)


def test_prefix_shorter_than_a_split_is_left_to_the_rows(backend: CpuBackend) -> None:
    case = share(make_case([(300, 1), (301, 1)], (4, 2, 16), BLOCK, torch.float32), ([0, 1], 240))
    assert torch.equal(run(backend, passed(case, ([0, 1], 240))), run(backend, case))


def test_row_that_is_shorter_than_its_prefix_is_an_error(backend: CpuBackend) -> None:
    case = share(make_case([(600, 1), (601, 1)], (4, 2, 16), BLOCK, torch.float32), ([0, 1], 512))
    with pytest.raises(ValueError, match="longer than its block table"):
        run(backend, passed(case, ([0, 1], 768)))
