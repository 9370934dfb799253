"""Worked examples of the routing references, and errors of launchers. These tests do not need triton."""

import math

import pytest
import torch

from quire.kernels.moe.moe_routing import max_tiles, route, route_reference, sort_pairs, sort_pairs_reference


def test_weights_of_a_worked_example() -> None:
    logits = torch.tensor([[0.0, math.log(2), math.log(5), math.log(2)]])
    ids, weights = route_reference(logits, 2)
    assert ids.tolist() == [[2, 1]]
    torch.testing.assert_close(weights, torch.tensor([[5 / 7, 2 / 7]]))
    _, weights = route_reference(logits, 2, renormalise=False)
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.2]]))


def test_tiles_of_a_worked_example() -> None:
    # Expert 7 belongs to another rank; expert 1 has no pair.
    tiles = sort_pairs_reference(torch.tensor([[2, 0], [0, 7], [0, 2]], dtype=torch.int32), 3, 2)
    assert tiles.experts.tolist() == [0, 0, 2, -1]
    assert tiles.pairs.tolist() == [1, 2, 4, -1, 0, 5, -1, -1]


@pytest.mark.parametrize(("num_pairs", "expected"), [(0, 0), (1, 1), (5, 5), (6, 5), (9, 6), (40, 13)])
def test_tiles_of_the_worst_case(num_pairs: int, expected: int) -> None:
    assert max_tiles(num_pairs, 5, 4) == expected


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match="top_k"):
        route(torch.zeros(2, 4), 5)
    with pytest.raises(ValueError, match="num_experts"):
        route(torch.zeros(2, 4096), 2)
    ids = torch.zeros(4, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="power of two"):
        sort_pairs(ids, 4, 12)
    with pytest.raises(ValueError, match="contiguous"):
        sort_pairs(torch.zeros(4, 4, dtype=torch.int32)[:, :2], 4, 16)
    with pytest.raises(ValueError, match="dtype"):
        sort_pairs(ids.long(), 4, 16)
