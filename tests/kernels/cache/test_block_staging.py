"""Block staging without triton: the references and the launchers' argument checks."""

import pytest
import torch

from quire.kernels.cache.block_copy import CacheSet
from quire.kernels.cache.block_staging import (
    bytes_of_block,
    gather_blocks,
    gather_blocks_reference,
    scatter_blocks,
    scatter_blocks_reference,
)


def layers() -> CacheSet:
    """Two layers of three blocks of two bytes: keys count from 0, values from 100."""
    keys = torch.arange(12, dtype=torch.uint8).view(2, 1, 3, 2)
    return CacheSet.of(list(torch.cat([keys, keys + 100], 1)))


def test_a_line_holds_keys_and_values_layer_after_layer() -> None:
    caches, staging = layers(), torch.full((3, 8), 255, dtype=torch.uint8)
    assert bytes_of_block(caches) == 8
    gather_blocks_reference(caches, torch.tensor([2, -1, 0]), staging)
    assert staging.tolist() == [[4, 5, 104, 105, 10, 11, 110, 111], [255] * 8, [0, 1, 100, 101, 6, 7, 106, 107]]


def test_scattered_lines_are_what_was_gathered() -> None:
    caches, staging = layers(), torch.zeros(2, 8, dtype=torch.uint8)
    gather_blocks_reference(caches, torch.tensor([0, 1]), staging)
    scatter_blocks_reference(caches, torch.tensor([2, -1]), staging)
    assert caches.caches[1].tolist() == [[[6, 7], [8, 9], [6, 7]], [[106, 107], [108, 109], [106, 107]]]


@pytest.mark.parametrize(
    "copy", [gather_blocks, scatter_blocks, gather_blocks_reference, scatter_blocks_reference], ids=lambda f: f.__name__
)
def test_rejects_wrong_tensors(copy: object) -> None:
    caches, ids, staging = layers(), torch.tensor([0, 1]), torch.zeros(2, 8, dtype=torch.uint8)
    for wrong_ids, wrong_staging, message in (
        (ids.int(), staging, "block_ids: dtype"),
        (ids, staging[:1], "staging: dimension 0"),
        (ids, staging[:, :4], "staging: dimension 1"),
        (ids, staging.float(), "staging: dtype"),
        (ids, torch.zeros(2, 16, dtype=torch.uint8)[:, :8], "staging: must be contiguous"),
        (ids, torch.zeros(17, dtype=torch.uint8)[1:].view(2, 8), "staging: must be contiguous, at a multiple of 2"),
    ):
        with pytest.raises(ValueError, match=message):
            copy(caches, wrong_ids, wrong_staging)  # type: ignore[operator]


def test_references_reject_blocks_that_do_not_exist() -> None:
    for copy in (gather_blocks_reference, scatter_blocks_reference):
        with pytest.raises(ValueError, match="must be below 3"):
            copy(layers(), torch.tensor([3]), torch.zeros(1, 8, dtype=torch.uint8))
