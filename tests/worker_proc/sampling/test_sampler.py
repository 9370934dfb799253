"""The sampler against known distributions, and the independence of its rows."""

from typing import Any

import numpy as np
import pytest
import torch
from sampling_batch import batch_of, sample_each
from tiers import covering, thinned

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.worker_messages import NewRequestData
from quire.worker_proc.batch.positions import SampledPositions
from quire.worker_proc.sampling.noise import uniform
from quire.worker_proc.sampling.sampler import SampledTokens

VOCAB = 24


def sample(logits: torch.Tensor, rows: list[tuple[int, int, dict[str, Any]]]) -> SampledTokens:
    return sample_each(batch_of(rows, logits.shape[-1])[1], logits)


def some_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def test_greedy_takes_the_best_token_with_any_other_parameters() -> None:
    logits = some_logits(8)
    rows = [(s, 3, {"temperature": 0.0, "top_k": 5 * (s % 2), "top_p": 0.5, "min_p": 0.1}) for s in range(8)]
    assert sample(logits, rows).tokens.tolist() == logits.argmax(-1).tolist()


TINY = [{"temperature": t} | cut for t in (1e-5, 1e-30, 1e-39, 1e-44) for cut in ({}, {"top_k": 5}, {"min_p": 0.1})]


@pytest.mark.parametrize("sampling", [*thinned(TINY, keep=3), {"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}], ids=str)
def test_parameters_that_keep_one_token_equal_greedy(sampling: dict[str, Any]) -> None:
    logits = some_logits(40) * 50
    rows = [(seed, 2, sampling) for seed in range(40)]
    assert sample(logits, rows).tokens.tolist() == logits.argmax(-1).tolist()


def test_forbidden_token_is_never_drawn() -> None:
    """Rounding could put the target past the last token with mass."""
    logits = torch.full((500, VOCAB), -torch.inf)
    logits[:, [3, 7]] = 0.0
    for cut in ({}, {"top_p": 0.999999}, {"top_k": 9}):
        tokens = sample(logits, [(seed, 1, cut) for seed in range(500)]).tokens
        assert set(tokens.tolist()) == {3, 7}


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_k": 3},
    {"temperature": 1.2, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs": 3},
]


def test_row_draws_the_same_token_in_any_batch_and_order() -> None:
    """Logits have 16 bits, so that many are equal; other rows' parameters must not change the order of equal ones."""
    count, rng = 30, np.random.default_rng(1)
    logits = some_logits(count, vocab=512).bfloat16().float()
    rows = [(1000 + i, 1 + i % 5, MIXED[i % len(MIXED)]) for i in range(count)]
    alone = [int(sample(logits[i : i + 1], [rows[i]]).tokens[0]) for i in range(count)]
    assert sample(logits, rows).tokens.tolist() == alone
    for _ in range(5):
        order = rng.permutation(count)[: rng.integers(1, count)]
        assert sample(logits[order], [rows[i] for i in order]).tokens.tolist() == [alone[i] for i in order]


def test_only_some_rows_of_a_batch_may_sample() -> None:
    logits = some_logits(4)
    rows = [(i, 2, {"temperature": 1.0, "top_k": i}) for i in range(4)]
    whole = sample(logits, rows).tokens.tolist()
    _, sampler = batch_of(rows, VOCAB)
    some = sampler.sample(logits[[1, 3]], SampledPositions.one_per_row(np.array([1, 3])))
    assert some.tokens.tolist() == [whole[1], whole[3]]
    assert sample_each(sampler, logits).tokens.tolist() == whole


def test_new_request_in_a_reused_row_uses_its_own_parameters() -> None:
    logits = some_logits(1, seed=8)
    batch, sampler = batch_of([(1, 1, {"temperature": 2.0})], VOCAB)
    sample_each(sampler, logits)
    new = NewRequestData(9, "new", 1, 1, 0, [1], SamplingParams(temperature=0.0, logprobs=1), 5)
    batch.change_rows([0], [new], np.zeros(1, np.int32))
    sampler.update_state(batch.builder.get_and_reset(1))
    sampled = sample_each(sampler, logits)
    assert sampled.tokens.tolist() == logits.argmax(-1).tolist() and sampled.logprobs is not None


def test_logits_are_unchanged_without_processors() -> None:
    logits = some_logits(len(MIXED))
    before = logits.clone()
    sample(logits, [(i, 1, params) for i, params in enumerate(MIXED)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("asked", [0, 1, 5, 20])
def test_logprobs_are_of_the_raw_distribution(asked: int) -> None:
    logits = some_logits(6)
    rows = [(i, 1, {"temperature": 0.7, "top_k": 2} | ({"logprobs": asked} if i % 2 else {})) for i in range(6)]
    sampled = sample(logits, rows)
    assert sampled.logprobs is not None and sampled.logprobs.at == [1, 3, 5]
    reported = sampled.logprobs.logprobs
    reference = torch.log_softmax(logits.double(), dim=-1)
    for i, row in enumerate(sampled.logprobs.at):
        token = int(sampled.tokens[row])
        assert reported.token_ids.shape[1] == reported.values.shape[1] == 1 + asked
        assert reported.token_ids[i, 0] == token
        assert reported.token_ids[i, 1:].tolist() == reference[row].argsort(descending=True)[:asked].tolist()
        assert torch.allclose(reported.values[i].double(), reference[row][reported.token_ids[i]], atol=1e-5)
        assert reported.ranks[i] == 1 + int((reference[row] > reference[row, token]).sum())


def test_no_logprobs_without_a_row_that_asks() -> None:
    assert sample(some_logits(2), [(1, 1, {}), (2, 1, {"temperature": 0.0})]).logprobs is None


def test_logprobs_are_limited_to_the_vocabulary() -> None:
    reported = sample(some_logits(1, vocab=3), [(1, 1, {"logprobs": 20})]).logprobs
    assert reported is not None and reported.logprobs.values.shape == (1, 4)
    assert sorted(reported.logprobs.token_ids[0, 1:].tolist()) == [0, 1, 2]


@pytest.mark.parametrize(("poison", "place"), covering([float("nan"), float("inf"), "all -inf"], [0, 11, VOCAB - 1]))
def test_non_finite_row_is_flagged_and_others_are_unaffected(poison: Any, place: int) -> None:
    logits = some_logits(len(MIXED))
    rows = [(i, 1, params) for i, params in enumerate(MIXED)]
    good = sample(logits, rows)
    assert not good.bad.any()
    for row in range(len(MIXED)):
        damaged = logits.clone()
        damaged[row, place if poison != "all -inf" else slice(None)] = -torch.inf if poison == "all -inf" else poison
        sampled = sample(damaged, rows)
        assert sampled.bad.tolist() == [i == row for i in range(len(MIXED))]
        others = [i for i in range(len(MIXED)) if i != row]
        assert sampled.tokens[others].tolist() == good.tokens[others].tolist()
        assert 0 <= int(sampled.tokens[row]) < VOCAB


def test_noise_is_uniform_over_seeds_and_over_positions() -> None:
    n = 50_000
    for seeds, positions in (
        (np.arange(n, dtype=np.uint64), np.full(n, 5)),
        (np.full(n, 7, np.uint64), np.arange(n)),
        (np.full(n, 2**64 - 1, np.uint64), np.arange(n)),
        (np.arange(n, dtype=np.uint64) << np.uint64(48), np.arange(n) % 3),
    ):
        noise = uniform(seeds, positions)
        assert noise.min() >= 0.0 and noise.max() < 1.0
        counts = np.bincount((noise * 100).astype(int), minlength=100)
        chi2 = ((counts - n / 100) ** 2 / (n / 100)).sum()
        assert 99 - 5 * np.sqrt(198) < chi2 < 99 + 5 * np.sqrt(198)
        assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.02


def test_noise_of_neighbouring_seeds_is_independent() -> None:
    positions = np.arange(20_000)
    a, b = (uniform(np.full(len(positions), seed, np.uint64), positions) for seed in (41, 42))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.03
    # The two-argument form must not be a sum: seed + 1 is not position + 1.
    assert not np.isin(a[1:2000], b).any()


@pytest.mark.full
def test_noise_has_fixed_values() -> None:
    got = uniform(np.array([0, 1, 2**64 - 1], np.uint64), np.array([0, 1, 2**31 - 1]))
    assert got.tolist() == [0.28176129772258496, 0.34362312686658336, 0.09495736683503364]
