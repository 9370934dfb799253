"""Sampled tokens follow the exact distribution for each feature, over 20,000 draws with 2,000 seeds.

Seeds are fixed, so that results are reproducible; the bound is that of p = 0.001.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sampling_batch import make_sampler, sample_each
from tiers import thinned

from quire.protocol.request.sampling_params import SamplingParams, seed_for_sample
from quire.protocol.wire.worker_messages import NewRequestData
from quire.worker_proc.batch.positions import SampledPositions

VOCAB = 16
DRAWS = 20_000
REQUESTS = 2_000
PROMPT, ANSWER = [2, 3, 3, 9], [3, 5, 5, 9]
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)).double() * 1.5

Probs = npt.NDArray[np.float64]


def counts_of(params: dict[str, Any]) -> npt.NDArray[np.int64]:
    """Count how often each token is drawn after the same prompt and output."""
    known = PROMPT + ANSWER
    batch, sampler = make_sampler(VOCAB, REQUESTS, len(known))
    sampling = SamplingParams(max_tokens=None, **params)
    seeds = [seed_for_sample(77, i) for i in range(REQUESTS)]
    new = [NewRequestData(i, "r", len(PROMPT), len(known), 0, [1], sampling, seed) for i, seed in enumerate(seeds)]
    batch.change_rows([], new, np.tile(np.array(known, np.int32), REQUESTS))
    sampler.update_state(batch.builder.get_and_reset(REQUESTS))
    counts = np.zeros(VOCAB, np.int64)
    for _ in range(DRAWS // REQUESTS):
        sampled = sample_each(sampler, LOGITS.float().repeat(REQUESTS, 1))
        assert not sampled.bad.any() and not sampled.failed
        counts += np.bincount(sampled.tokens.numpy(), minlength=VOCAB)
        batch.num_known += 1  # changes the noise; no component sees that the output is longer
    return counts


def probs_of(params: dict[str, Any]) -> Probs:
    """Compute the distribution by simple loops, in the documented order: bias, penalties, bans, temperature, cuts."""
    x = LOGITS.tolist()
    for token, bias in params.get("logit_bias", {}).items():
        x[token] += bias
    factor = params.get("repetition_penalty", 1.0)
    for token in set(PROMPT + ANSWER):
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token in set(ANSWER):
        x[token] -= params.get("frequency_penalty", 0.0) * ANSWER.count(token) + params.get("presence_penalty", 0.0)
    allowed = params.get("allowed_token_ids", range(VOCAB))
    x = [value if token in allowed else -math.inf for token, value in enumerate(x)]
    for words in params.get("bad_words_token_ids", []):
        if words[:-1] == (PROMPT + ANSWER)[len(PROMPT + ANSWER) - len(words) + 1 :]:
            x[words[-1]] = -math.inf
    temperature = params.get("temperature", 1.0)
    p = [math.exp((value - max(x)) / temperature) for value in x]
    return cut(p, params.get("top_k", 0), params.get("top_p", 1.0), params.get("min_p", 0.0))


def cut(p: list[float], top_k: int, top_p: float, min_p: float) -> Probs:
    likely = [i for i in range(len(p)) if p[i] >= min_p * max(p)]
    order = sorted(likely, key=lambda i: -p[i])[: top_k if top_k > 0 else None]
    total, before, kept = sum(p[i] for i in order), 0.0, []
    for i in order:
        if before < top_p * total:
            kept.append(i)
        before += p[i]
    out = np.zeros(len(p))
    out[kept] = [p[i] for i in kept]
    return out / out.sum()


def check(counts: npt.NDArray[np.int64], want: Probs) -> None:
    """Check by Pearson's chi-square test; tokens that are expected less than 5 times form one class."""
    assert not counts[want == 0].any(), "sampled a token with probability 0"
    draws = counts.sum()
    common = want * draws >= 5
    observed = np.append(counts[common], counts[~common].sum())
    mean = np.append(want[common], want[~common].sum()) * draws
    observed, mean = observed[mean > 0], mean[mean > 0]
    degrees = len(mean) - 1
    assert degrees > 0, "only one class of tokens"
    # The 0.999 quantile in Wilson and Hilferty's approximation.
    bound = degrees * (1 - 2 / (9 * degrees) + 3.0902 * math.sqrt(2 / (9 * degrees))) ** 3
    assert ((observed - mean) ** 2 / mean).sum() < bound


CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "no top_k": {"top_k": -1, "top_p": 0.6},
    "a top_k beyond the vocabulary": {"top_k": 1000, "top_p": 0.95},
    "all cuts": {"temperature": 1.3, "top_k": 10, "top_p": 0.8, "min_p": 0.05},
    "min_p before top_p": {"temperature": 1.3, "top_p": 0.6, "min_p": 0.2},
    "hot min_p": {"temperature": 1.5, "min_p": 0.1},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": -0.7},
    "repetition": {"repetition_penalty": 1.7},
    "bias": {"logit_bias": {0: 2.5, 3: -1.0, 15: 100.0, 14: 99.0}},
    "allowed": {"allowed_token_ids": [1, 3, 4, 8], "bad_words_token_ids": [[5, 9, 4], [9, 8], [5, 1]]},
    "all": {
        "temperature": 0.8,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.03,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {1: 1.0, 2: 1.5},
        "bad_words_token_ids": [[9, 1]],
        "allowed_token_ids": list(range(1, VOCAB)),
    },
}


@pytest.mark.parametrize("name", thinned(CASES, keep=6))
def test_tokens_follow_the_exact_distribution(name: str) -> None:
    check(counts_of(CASES[name]), probs_of(CASES[name]))


@pytest.mark.full
@pytest.mark.parametrize("name", ["hot", "all"])
def test_tokens_of_torch_follow_the_exact_distribution(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_NATIVE", "0")
    check(counts_of(CASES[name]), probs_of(CASES[name]))


def test_check_detects_a_wrong_distribution() -> None:
    """Each case fails against another case's distribution, so that a similar definition is detected."""
    counts = counts_of({"temperature": 1.0, "top_k": 9, "top_p": 0.8})
    for wrong in ({"top_k": 9, "top_p": 0.8, "temperature": 1.1}, {"top_k": 8}, {"top_p": 0.6}):
        with pytest.raises(AssertionError):
            check(counts, probs_of(wrong))


def test_positions_of_one_seed_follow_the_exact_distribution() -> None:
    """Positions after drafts have their own noise too."""
    batch, sampler = make_sampler(VOCAB, 1, 8)
    batch.change_rows([], [NewRequestData(0, "r", 4, 8, 0, [1], SamplingParams(), 5)], np.zeros(8, np.int32))
    sampler.update_state(batch.builder.get_and_reset(1))
    positions = SampledPositions.with_drafts(np.array([0]), [[0] * (DRAWS - 1)])
    tokens = sampler.sample(LOGITS.float().repeat(DRAWS, 1), positions).tokens
    check(np.bincount(tokens.numpy(), minlength=VOCAB), probs_of({}))


def test_completions_of_one_request_differ_and_the_first_equals_that_of_n_1() -> None:
    seeds = [seed_for_sample(5, i) for i in range(8)]
    assert len(set(seeds)) == 8
    batch, sampler = make_sampler(VOCAB, 8, 4)
    new = [NewRequestData(i, "r", 4, 4, 0, [1], SamplingParams(n=8), seed) for i, seed in enumerate(seeds)]
    batch.change_rows([], new, np.zeros(32, np.int32))
    sampler.update_state(batch.builder.get_and_reset(8))
    texts = []
    for _ in range(12):
        texts.append(sample_each(sampler, LOGITS.float().repeat(8, 1)).tokens.tolist())
        batch.num_known += 1
    assert len({tuple(text) for text in zip(*texts, strict=True)}) == 8
