"""The block copy kernel compared with its references; run by test_triton.py."""

import pytest
import torch

from quire.kernels.cache.block_copy import (
    TILE_WORDS,
    CacheSet,
    copy_blocks,
    copy_blocks_reference,
    zero_blocks,
    zero_blocks_reference,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64]
SHAPES = [
    # shape, dimension of the blocks
    ((2, 6, 4, 2, 8), 1),
    ((2, 6, TILE_WORDS + 3), 1),
    ((2, 6, 8 * TILE_WORDS + 8), 1),
    ((6, 5, 1), 0),
    ((3, 6, 1), 1),
]


def make_caches(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[CacheSet, CacheSet]:
    """Make two sets of caches with the same random bytes, including NaN: copies must be exact in every byte."""
    sets: list[list[torch.Tensor]] = [[], []]
    rng = torch.Generator().manual_seed(6)
    for _ in range(3):
        width = shape[-1] * dtype.itemsize
        data = torch.randint(0, 256, (*shape[:-1], width), generator=rng, dtype=torch.uint8)
        for caches in sets:
            caches.append(data.clone().to(device).view(dtype))
    return CacheSet.of(sets[0], dim), CacheSet.of(sets[1], dim)


def assert_same_bytes(got: CacheSet, want: CacheSet) -> None:
    for a, b in zip(got.caches, want.caches, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_equal_reference(shape: tuple[int, ...], dim: int, dtype: torch.dtype, device: torch.device) -> None:
    got, want = make_caches(shape, dim, dtype, device)
    for pairs in ([], [(0, 5)], [(3, 1), (3, 2), (0, 5)]):
        work = torch.tensor(pairs, dtype=torch.int64).reshape(len(pairs), 2)
        copy_blocks(got, work)
        copy_blocks_reference(want, work)
        assert_same_bytes(got, want)


@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
def test_zeroes_equal_reference(shape: tuple[int, ...], dim: int, device: torch.device) -> None:
    got, want = make_caches(shape, dim, torch.float16, device)
    for ids in ([], [4], [1, 5, 0]):
        zero_blocks(got, torch.tensor(ids, dtype=torch.int64))
        zero_blocks_reference(want, torch.tensor(ids, dtype=torch.int64))
        assert_same_bytes(got, want)


def test_memory_between_strided_blocks_is_not_changed(device: torch.device) -> None:
    """The caches are slices of a larger tensor with all layers and other data after every block."""
    got, want = (torch.arange(2 * 4 * 3 * 10, device=device).float().reshape(2, 4, 3, 10) for _ in range(2))
    work = torch.tensor([(0, 3), (1, 2)])
    # Dimensions: parts, blocks, layers and other data, elements.
    copy_blocks(CacheSet.of([got[:, :, 0, :8], got[:, :, 2, :8]]), work)
    copy_blocks_reference(CacheSet.of([want[:, :, 0, :8], want[:, :, 2, :8]]), work)
    assert torch.equal(got, want)
