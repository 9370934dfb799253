"""The log-probability kernels against their reference; run by test_triton.py."""

import pytest
import torch

from quire.kernels.sampling.sampling_logprobs import TOLERANCE, top_logprobs, top_logprobs_reference
from quire.kernels.sampling.sampling_stats import CHUNK


@pytest.mark.parametrize(("vocab", "n"), [(3, 3), (300, 0), (CHUNK + 1, 5)])
def test_equals_reference(vocab: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    rng = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(2, vocab + 8, generator=rng) * 3).to(dtype).to(device)[:, :vocab]
    logits[1] = logits[1].round()  # many equal logits
    tokens = torch.tensor([vocab - 1, 1], device=device)
    result, expected = top_logprobs(logits, tokens, n), top_logprobs_reference(logits, tokens, n)
    assert torch.equal(result.token_ids, expected.token_ids)
    assert torch.equal(result.ranks, expected.ranks)
    torch.testing.assert_close(result.values, expected.values, rtol=TOLERANCE[0], atol=TOLERANCE[1])


def test_forbidden_tokens_and_tokens_out_of_range(device: torch.device) -> None:
    logits = torch.full((2, CHUNK + 4), -torch.inf, device=device)
    logits[:, [7, CHUNK]] = torch.tensor([0.0, 1.0], device=device)
    result = top_logprobs(logits, torch.tensor([3, 2**40], device=device), 4)
    assert result.token_ids[:, 1:].tolist() == [[CHUNK, 7, 0, 1]] * 2
    assert result.values[0, 0] == -torch.inf
    assert result.values[1, 0].isnan()
    assert result.ranks.tolist() == [3, 1]
