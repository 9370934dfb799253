"""The sampling references against the engine's CPU sampler, and errors of launchers. These tests do not need triton."""

import math

import numpy as np
import pytest
import torch

from quire.kernels.common.logits import MAX_VOCAB
from quire.kernels.sampling.sampling import sample
from quire.kernels.sampling.sampling_logprobs import top_logprobs, top_logprobs_reference
from quire.kernels.sampling.sampling_noise import uniform, uniform_reference
from quire.kernels.sampling.sampling_stats import row_statistics, row_statistics_reference
from quire.worker_proc.sampling import noise


def test_statistics_of_a_worked_example() -> None:
    logits = torch.tensor([[1.0, 3, 3], [0, torch.nan, 9], [-torch.inf] * 3])
    result = row_statistics_reference(logits)
    assert result.tokens.tolist() == [1, 1, 0]
    assert result.bad.tolist() == [False, True, True]
    assert result.log_sum_exp[0].item() == pytest.approx(3 + math.log(2 + math.exp(-2)))


def test_noise_reference_equals_the_cpu_sampler() -> None:
    seeds = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
    positions = np.array([0, 7, 2**31 - 1, 5], dtype=np.int32)
    result = uniform_reference(torch.from_numpy(seeds), torch.from_numpy(positions))
    assert result.tolist() == noise.uniform(seeds, positions).tolist()


def test_logprobs_of_a_worked_example() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 5.0]]).log()
    result = top_logprobs_reference(logits, torch.tensor([2]), 3)
    assert result.token_ids.tolist() == [[2, 3, 1, 0]]
    assert result.ranks.tolist() == [3]
    torch.testing.assert_close(result.values.exp(), torch.tensor([[0.1, 0.5, 0.3, 0.1]]))


def test_invalid_arguments_are_rejected() -> None:
    ones = torch.ones(2)
    arguments = [torch.zeros(2, 8), ones.double(), ones, ones.int(), ones, ones]
    for place, wrong, error in [
        (0, torch.zeros(2, 8).double(), "logits: dtype"),
        (0, torch.zeros(2, MAX_VOCAB + 1), "vocab"),
        (1, ones, "noise: dtype"),
        (2, torch.ones(3), "temperature: dimension 0"),
        (3, ones.long(), "top_k: dtype"),
    ]:
        with pytest.raises(ValueError, match=error):
            sample(*[wrong if i == place else argument for i, argument in enumerate(arguments)])
    with pytest.raises(ValueError, match="logits"):
        row_statistics(torch.zeros(8))
    with pytest.raises(ValueError, match="positions"):
        uniform(torch.zeros(2, dtype=torch.uint64), torch.zeros(2))
    with pytest.raises(ValueError, match="n must be between 0 and 8"):
        top_logprobs(arguments[0], torch.zeros(2, dtype=torch.int64), 9)
    with pytest.raises(ValueError, match="tokens: dtype"):
        top_logprobs(arguments[0], ones, 2)
