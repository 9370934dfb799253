"""Block copy without triton: the references and the launchers' argument checks."""

import pytest
import torch

from quire.kernels.cache.block_copy import (
    CacheSet,
    check_blocks,
    check_copies,
    copy_blocks,
    copy_blocks_reference,
    zero_blocks,
    zero_blocks_reference,
)


def cache_of(*blocks: float) -> torch.Tensor:
    """Keys and values of one-slot blocks; values are the negative keys."""
    keys = torch.tensor(blocks).view(-1, 1, 1, 1)
    return torch.stack([keys, -keys])


def test_copies_keys_and_values_in_every_layer() -> None:
    layers = [cache_of(1, 2, 3, 4), cache_of(5, 6, 7, 8)]
    copy_blocks_reference(CacheSet.of(layers), torch.tensor([(0, 3), (0, 2)]))
    assert layers[0].flatten().tolist() == [1, 2, 1, 1, -1, -2, -1, -1]
    assert layers[1].flatten().tolist() == [5, 6, 5, 5, -5, -6, -5, -5]


def test_zeroing_replaces_nan() -> None:
    cache = cache_of(1, torch.nan, 3)
    zero_blocks_reference(CacheSet.of([cache]), torch.tensor([1]))
    assert cache.flatten().tolist() == [1, 0, 3, -1, 0, -3]


def test_copies_blocks_in_dimension_0() -> None:
    state = torch.arange(6.0).view(3, 2)
    copy_blocks_reference(CacheSet.of([state], block_dim=0), torch.tensor([(2, 0)]))
    assert state.tolist() == [[4, 5], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(1, 2), (2, 3)], "both source and target"),
        ([(1, 1)], "both source and target"),
        ([(1, 3), (2, 3)], "is a duplicate"),
        ([(4, 0)], "source block ids must be between 0 and 3"),
        ([(-1, 0)], "source block ids must be between 0 and 3"),
        ([(0, 4)], "target block ids must be between 0 and 3"),
        ([(0, -1)], "target block ids must be between 0 and 3"),
    ],
)
def test_rejects_copies_whose_order_matters(pairs: list[tuple[int, int]], message: str) -> None:
    caches = CacheSet.of([cache_of(1, 2, 3, 4)])
    for copy in (copy_blocks, copy_blocks_reference):
        with pytest.raises(ValueError, match=message):
            copy(caches, torch.tensor(pairs))
    assert caches.caches[0].flatten().tolist() == [1, 2, 3, 4, -1, -2, -3, -4]


@pytest.mark.parametrize("zero", [zero_blocks, zero_blocks_reference])
def test_zeroing_rejects_invalid_block_ids(zero: object) -> None:
    caches = CacheSet.of([cache_of(1, 2)])
    for ids in ([2], [-1], [0, 0]):
        with pytest.raises(ValueError, match="block_ids"):
            zero(caches, torch.tensor(ids))  # type: ignore[operator]


def test_rejects_wrong_tensors() -> None:
    with pytest.raises(ValueError, match="pairs: dimension 1"):
        check_copies(torch.zeros(2, 3, dtype=torch.int64), 4)
    with pytest.raises(ValueError, match="pairs: dtype"):
        check_copies(torch.zeros(2, 2), 4)
    with pytest.raises(ValueError, match="expected int64"):
        check_blocks(torch.zeros(2, dtype=torch.int32), 4)


def test_cache_set_rejects_unequal_caches() -> None:
    with pytest.raises(ValueError, match="0 caches"):
        CacheSet.of([])
    with pytest.raises(ValueError, match="expected"):
        CacheSet.of([torch.zeros(2, 3, 4), torch.zeros(2, 3, 5)])
    with pytest.raises(ValueError, match="expected"):
        CacheSet.of([torch.zeros(2, 3, 4), torch.zeros(2, 3, 4).half()])
    with pytest.raises(ValueError, match="a block is not contiguous"):
        CacheSet.of([torch.zeros(2, 3, 4, 5).transpose(2, 3)])
    with pytest.raises(ValueError, match="blocks in dimension 2"):
        CacheSet.of([torch.zeros(2, 3, 4, 5)], block_dim=2)


@pytest.mark.parametrize(("width", "word_bytes"), [(8, 16), (12, 8), (6, 4), (5, 2)])
def test_words_are_the_largest_that_divide_a_block(width: int, word_bytes: int) -> None:
    caches = CacheSet.of([torch.zeros(2, 4, width, dtype=torch.float16)])
    assert caches.word_bytes == word_bytes
    assert caches.words() == (width * 2 // word_bytes, 4 * width * 2 // word_bytes, width * 2 // word_bytes)
