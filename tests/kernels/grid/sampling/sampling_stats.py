"""The statistics and noise kernels against their references; run by test_triton.py."""

import numpy as np
import pytest
import torch

from quire.kernels.sampling.sampling_noise import uniform
from quire.kernels.sampling.sampling_stats import CHUNK, TOLERANCE, row_statistics, row_statistics_reference
from quire.worker_proc.sampling import noise


@pytest.mark.parametrize("vocab", [1, 100, CHUNK, 2 * CHUNK + 7])
def test_statistics_equal_reference(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    rng = torch.Generator().manual_seed(vocab)
    memory = (torch.randn(3, vocab + 8, generator=rng) * 9).to(dtype).to(device)
    logits = memory[:, :vocab]
    logits[1] = logits[1].round()  # many equal logits
    result, expected = row_statistics(logits), row_statistics_reference(logits)
    assert torch.equal(result.tokens, expected.tokens)
    assert torch.equal(result.best, expected.best)
    assert not result.bad.any()
    torch.testing.assert_close(result.log_sum_exp, expected.log_sum_exp, rtol=TOLERANCE[0], atol=TOLERANCE[1])


def test_rows_that_cannot_be_sampled(device: torch.device) -> None:
    inf, nan = torch.inf, torch.nan
    rows = [[-inf, -inf], [inf, 1], [1, nan], [nan, inf], [-inf, 2], [-0.0, 0.0], [-2, -1]]
    logits = torch.full((len(rows), CHUNK + 2), -inf, device=device)
    logits[:, CHUNK - 1 : CHUNK + 1] = torch.tensor(rows, device=device)
    result = row_statistics(logits)
    assert result.bad.tolist() == [True, True, True, True, False, False, False]
    assert result.tokens.tolist() == [0, CHUNK - 1, CHUNK, CHUNK - 1, CHUNK, CHUNK - 1, CHUNK]
    expected = row_statistics_reference(logits)
    assert torch.equal(result.tokens, expected.tokens)
    torch.testing.assert_close(result.best, expected.best, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(result.log_sum_exp[4:], expected.log_sum_exp[4:])


def test_noise_equals_the_cpu_sampler(device: torch.device) -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 130, dtype=np.uint64)
    seeds[:3] = [0, 2**64 - 1, 2**63]
    positions = rng.integers(0, 2**20, 130, dtype=np.int32)
    positions[:2] = 0
    result = uniform(torch.from_numpy(seeds).to(device), torch.from_numpy(positions).to(device))
    assert result.tolist() == noise.uniform(seeds, positions).tolist()
