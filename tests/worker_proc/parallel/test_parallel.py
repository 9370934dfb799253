"""Sums and gathers over shared memory and torch.distributed, with a process per rank."""

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.worker_proc.parallel import shared_memory
from quire.worker_proc.parallel.distributed import DistributedGroup, file_store
from quire.worker_proc.parallel.shared_memory import SharedMemoryGroup

SHAPES = [(1, 8), (3, 5), (700, 3)]


def _part(shape: tuple[int, int], rank: int, round_: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * round_ + rank)).to(dtype)


def _rank(kind: str, path: Path, rank: int, size: int, dtype: torch.dtype) -> None:
    """Main function of one rank; a failed assertion gives a non-zero exit status."""
    torch.set_num_threads(1)
    shared_memory.CHUNK_BYTES = 1 << 10  # so that some exchanges take several rounds
    group = (
        DistributedGroup("gloo", file_store(path, size), rank, size)
        if kind == "gloo"
        else SharedMemoryGroup(path, rank, size)
    )
    for round_ in range(4):
        for shape in SHAPES:
            parts = [_part(shape, r, round_, dtype) for r in range(size)]
            expected = parts[0].clone()
            for part in parts[1:]:
                expected += part
            reduced = group.all_reduce(parts[rank].clone())
            torch.testing.assert_close(reduced, expected, rtol=0, atol=0 if kind == "memory" else 1e-5)
            assert torch.equal(group.all_gather(parts[rank]), torch.cat(parts, 1))


@pytest.mark.parametrize(
    ("kind", "size", "dtype"),
    [("memory", 2, torch.float32), ("memory", 3, torch.bfloat16), ("gloo", 2, torch.float32)],
    ids=str,
)
def test_every_rank_gets_the_sum_and_all_parts(kind: str, size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(kind, tmp_path / "meet", r, size, dtype)) for r in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0] * size


def test_shared_memory_file_must_be_private(tmp_path: Path) -> None:
    group = SharedMemoryGroup(tmp_path / "meet", 0, 1)
    assert (tmp_path / "meet").stat().st_mode & 0o077 == 0
    x = torch.from_numpy(np.arange(4, dtype=np.float32)).view(2, 2)
    assert torch.equal(group.all_gather(x), x)
