"""The sampling kernels against their reference; run by test_triton.py.

A row is some 20 programs, and the interpreter takes about 20 ms for each: it gets a part of what a device gets.
"""

import numpy as np
import pytest
import torch

from quire.kernels.sampling.sampling import sample, sample_reference
from quire.kernels.sampling.sampling_stats import CHUNK

CASES = [
    # temperature, top_k, top_p, min_p
    (0.8, 50, 0.95, 0.05),
    (0.0, 5, 0.5, 0.2),
    (1.0, 0, 0.9, 0.0),
    (0.7, 0, 1.0, 0.1),
    (3.0, 3000, 0.999, 0.0),
    (1.3, 20, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (1.0, 2**30, 1.0, 0.0),
    (1e-30, 0, 0.5, 0.0),
    (1.0, 7, 0.0, 1.0),
]


def parameters(cases: list[tuple[float, int, float, float]], device: torch.device) -> list[torch.Tensor]:
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*cases, strict=True))
    return [column.to(device) for column in (temperature, top_k.int(), top_p, min_p)]


@pytest.mark.parametrize(
    ("vocab", "equals", "interpreted_cases"), [(300, True, 11), (2 * CHUNK + 9, False, 3), (1, False, 1)]
)
def test_equals_reference(
    vocab: int, equals: bool, interpreted_cases: int, dtype: torch.dtype, device: torch.device
) -> None:
    if device.type == "cpu" and dtype == torch.float16:
        interpreted_cases = 1
    cases = CASES if device.type == "cuda" else CASES[:interpreted_cases]
    rng = torch.Generator().manual_seed(vocab)
    logits = torch.randn(len(cases), vocab + 8, generator=rng) * 3
    logits = (logits.round() if equals else logits).to(dtype).to(device)[:, :vocab]
    noise = torch.rand(len(cases), generator=rng, dtype=torch.float64).to(device)
    arguments = (logits, noise, *parameters(cases, device))
    assert torch.equal(sample(*arguments), sample_reference(*arguments))


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_noise_over_the_whole_interval(case: tuple[float, int, float, float], device: torch.device) -> None:
    rows = 64 if device.type == "cuda" else 3
    rng = torch.Generator().manual_seed(0)
    # Equal logits, and tokens that a grammar forbids.
    logits = (torch.randn(1, 40, generator=rng) * 2).round()
    logits[0, ::5] = -torch.inf
    noise = torch.linspace(0, 1 - 2**-53, rows, dtype=torch.float64)
    arguments = (logits.expand(rows, 40).to(device), noise.to(device), *parameters([case] * rows, device))
    flags = {"any_top_k": case[1] > 0, "any_top_p": case[2] < 1}
    assert torch.equal(sample(*arguments, **flags), sample_reference(*arguments))


def test_bad_rows_do_not_affect_others(device: torch.device) -> None:
    logits = torch.zeros(4, 64, device=device)
    logits[0] = torch.nan
    logits[1] = -torch.inf
    logits[2, 3] = torch.inf
    noise = torch.full((4,), 0.5, dtype=torch.float64, device=device)
    tokens = sample(logits, noise, *parameters([(1.0, 10, 0.9, 0.0)] * 4, device))
    assert tokens.tolist() == [0, 0, 3, 4]


def test_tokens_are_drawn_in_proportion_to_their_weights(device: torch.device) -> None:
    """Stratified noise draws each token in proportion to its weight."""
    logits = torch.tensor([[1.0, 4.0, 2.0, 1.0]]).log().expand(8, 4).to(device)
    noise = torch.from_numpy((np.arange(8) + 0.5) / 8).to(device)
    cases = parameters([(1.0, 0, 1.0, 0.0)] * 8, device)
    tokens = sample(logits, noise, *cases, any_top_k=False, any_top_p=False)
    assert tokens.bincount().tolist() == [1, 4, 2, 1]
