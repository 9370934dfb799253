"""The routing kernels against their references; run by test_triton.py."""

import pytest
import torch

from quire.kernels.moe.moe_routing import (
    SCAN_PAIRS,
    TOLERANCE,
    route,
    route_reference,
    sort_pairs,
    sort_pairs_reference,
)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(67, 8, 2), (3, 60, 5), (2, 128, 8), (1, 1, 1)])
def test_route_equals_reference(
    num_tokens: int, num_experts: int, top_k: int, renormalise: bool, dtype: torch.dtype, device: torch.device
) -> None:
    rng = torch.Generator().manual_seed(0)
    logits = (torch.randn(num_tokens, num_experts + 3, generator=rng) * 2).to(dtype).to(device)[:, :num_experts]
    logits[0] = logits[0].round()  # equal logits
    ids, weights = route(logits, top_k, renormalise=renormalise)
    expected_ids, expected = route_reference(logits, top_k, renormalise=renormalise)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=TOLERANCE[0], atol=TOLERANCE[1])


def test_chosen_experts_are_valid_for_all_logits(device: torch.device) -> None:
    logits = torch.full((2, 6), torch.nan, device=device)
    logits[0, 5] = 1
    logits[1] = -1e30
    ids, weights = route(logits, 4)
    assert ids[0].sort().values.unique().numel() == 4
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 6
    assert weights[0].isnan().all()
    assert weights[1].tolist() == [0.25] * 4


@pytest.mark.parametrize("tile_pairs", [4, 16])
@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), [(1, 2, 5), (50, 3, 6), (SCAN_PAIRS // 2 + 9, 2, 3)])
def test_sort_equals_reference(
    num_tokens: int, top_k: int, num_experts: int, tile_pairs: int, device: torch.device
) -> None:
    rng = torch.Generator().manual_seed(0)
    # Ids of other ranks, below and above the range, and an expert without pairs.
    ids = torch.randint(-1, num_experts + 2, (num_tokens, top_k), generator=rng, dtype=torch.int32).to(device)
    ids[ids == 1] = 0
    result, expected = sort_pairs(ids, num_experts, tile_pairs), sort_pairs_reference(ids, num_experts, tile_pairs)
    assert torch.equal(result.experts, expected.experts)
    assert torch.equal(result.pairs, expected.pairs)


def test_worst_case_fits(device: torch.device) -> None:
    ids = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 1, 2]], dtype=torch.int32, device=device)
    result = sort_pairs(ids, 3, 2)
    assert result.experts.tolist() == [0, 0, 1, 1, 2, 2]
    assert result.pairs.tolist() == [0, 3, 6, -1, 1, 4, 7, -1, 2, 5, 8, -1]
    assert sort_pairs(ids[:0], 3, 2).pairs.numel() == 0
