"""The block staging kernel compared with its references; run by test_triton.py."""

import pytest
import torch

from quire.kernels.cache.block_copy import TILE_WORDS, CacheSet
from quire.kernels.cache.block_staging import (
    bytes_of_block,
    gather_blocks,
    gather_blocks_reference,
    scatter_blocks,
    scatter_blocks_reference,
)

DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.float16]
SHAPES = [
    # shape, dimension of the blocks
    ((2, 6, 4, 2, 8), 1),
    ((2, 6, 8 * TILE_WORDS + 8), 1),
    ((2, 6, 1, 5), 1),
    ((6, 5, 1), 0),
    ((3, 6, 12), 1),
]
IDS = [[], [4], [1, -1, 5, 0], [-1, -1]]


def random_bytes(*shape: int, seed: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)


def make_caches(shape: tuple[int, ...], dim: int, dtype: torch.dtype, device: torch.device) -> CacheSet:
    """Make caches of random bytes, including NaN: copies must be exact in every byte."""
    sizes = (*shape[:-1], shape[-1] * dtype.itemsize)
    return CacheSet.of([random_bytes(*sizes, seed=layer).to(device).view(dtype) for layer in range(3)], dim)


def contents(caches: CacheSet) -> list[torch.Tensor]:
    return [cache.contiguous().view(torch.uint8).clone() for cache in caches.caches]


def buffer(count: int, caches: CacheSet, seed: int) -> torch.Tensor:
    return random_bytes(count, bytes_of_block(caches), seed=seed).to(caches.pointers.device)


@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_equals_reference(shape: tuple[int, ...], dim: int, dtype: torch.dtype, device: torch.device) -> None:
    caches = make_caches(shape, dim, dtype, device)
    before = contents(caches)
    for ids in IDS:
        work = torch.tensor(ids, dtype=torch.int64, device=device)
        got, want = (buffer(len(ids), caches, 9) for _ in range(2))
        gather_blocks(caches, work, got)
        gather_blocks_reference(caches, work, want)
        assert torch.equal(got, want)
    assert all(map(torch.equal, contents(caches), before))


@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatter_equals_reference(shape: tuple[int, ...], dim: int, dtype: torch.dtype, device: torch.device) -> None:
    got, want = (make_caches(shape, dim, dtype, device) for _ in range(2))
    for ids in IDS:
        work = torch.tensor(ids, dtype=torch.int64, device=device)
        data = buffer(len(ids), got, 20 + len(ids))
        before = data.clone()
        scatter_blocks(got, work, data)
        scatter_blocks_reference(want, work, data)
        assert all(map(torch.equal, contents(got), contents(want)))
        assert torch.equal(data, before)


def test_an_id_out_of_range_is_not_accessed(device: torch.device) -> None:
    caches = make_caches((2, 4, 8), 1, torch.float32, device)
    before, data = contents(caches), buffer(2, caches, 1)
    kept = data.clone()
    work = torch.tensor([4, 2**40], device=device)
    gather_blocks(caches, work, data)
    scatter_blocks(caches, work, data)
    assert torch.equal(data, kept) and all(map(torch.equal, contents(caches), before))


def test_memory_between_strided_blocks_is_not_changed(device: torch.device) -> None:
    """The caches are slices of a larger tensor with all layers and other data after every block."""
    got, want = (torch.arange(2 * 4 * 3 * 12, device=device).float().reshape(2, 4, 3, 12) for _ in range(2))
    work = torch.tensor([3, 1], device=device)
    # Dimensions: parts, blocks, layers and other data, elements.
    sets = [CacheSet.of([each[:, :, 0, :8], each[:, :, 2, :8]]) for each in (got, want)]
    data = buffer(2, sets[0], 3)
    scatter_blocks(sets[0], work, data)
    scatter_blocks_reference(sets[1], work, data)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    back = torch.zeros_like(data)
    gather_blocks(sets[0], work, back)
    assert torch.equal(back, data)
