"""The block copy references, and what is refused on the host. None of this needs triton."""

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


def test_blocks_are_copied_in_every_layer_keys_and_values() -> None:
    layers = [cache_of(1, 2, 3, 4), cache_of(5, 6, 7, 8)]
    copy_blocks_reference(CacheSet.of(layers), torch.tensor([(0, 3), (0, 2)]))
    assert layers[0].flatten().tolist() == [1, 2, 1, 1, -1, -2, -1, -1]
    assert layers[1].flatten().tolist() == [5, 6, 5, 5, -5, -6, -5, -5]


def test_zeroed_blocks_are_zero_even_where_they_held_nan() -> None:
    cache = cache_of(1, torch.nan, 3)
    zero_blocks_reference(CacheSet.of([cache]), torch.tensor([1]))
    assert cache.flatten().tolist() == [1, 0, 3, -1, 0, -3]


def test_blocks_of_states_come_first() -> None:
    state = torch.arange(6.0).view(3, 2)
    copy_blocks_reference(CacheSet.of([state], block_dim=0), torch.tensor([(2, 0)]))
    assert state.tolist() == [[4, 5], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(1, 2), (2, 3)], "both source and target"),
        ([(1, 1)], "both source and target"),
        ([(1, 3), (2, 3)], "a target twice"),
        ([(4, 0)], "a source is not from 0 to 3"),
        ([(-1, 0)], "a source is not from 0 to 3"),
        ([(0, 4)], "a target is not from 0 to 3"),
        ([(0, -1)], "a target is not from 0 to 3"),
    ],
)
def test_copies_whose_order_would_matter_are_refused(pairs: list[tuple[int, int]], message: str) -> None:
    caches = CacheSet.of([cache_of(1, 2, 3, 4)])
    for copy in (copy_blocks, copy_blocks_reference):
        with pytest.raises(ValueError, match=message):
            copy(caches, torch.tensor(pairs))
    assert caches.caches[0].flatten().tolist() == [1, 2, 3, 4, -1, -2, -3, -4]


@pytest.mark.parametrize("zero", [zero_blocks, zero_blocks_reference])
def test_zeroing_what_is_no_block_is_refused(zero: object) -> None:
    caches = CacheSet.of([cache_of(1, 2)])
    for ids in ([2], [-1], [0, 0]):
        with pytest.raises(ValueError, match="block_ids"):
            zero(caches, torch.tensor(ids))  # type: ignore[operator]


def test_wrong_work_is_refused() -> None:
    with pytest.raises(ValueError, match="pairs: dimension 1"):
        check_copies(torch.zeros(2, 3, dtype=torch.int64), 4)
    with pytest.raises(ValueError, match="pairs: dtype"):
        check_copies(torch.zeros(2, 2), 4)
    with pytest.raises(ValueError, match="expected int64"):
        check_blocks(torch.zeros(2, dtype=torch.int32), 4)


def test_caches_that_are_not_alike_are_refused() -> None:
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


@pytest.mark.parametrize(("width", "word_bytes"), [(8, 8), (6, 4), (5, 2)])
def test_words_are_as_long_as_a_block_allows(width: int, word_bytes: int) -> None:
    caches = CacheSet.of([torch.zeros(2, 4, width, dtype=torch.float16)])
    assert caches.word_bytes == word_bytes
    assert caches.words() == (width * 2 // word_bytes, 4 * width * 2 // word_bytes, width * 2 // word_bytes)
