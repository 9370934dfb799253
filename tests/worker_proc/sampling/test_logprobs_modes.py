"""Log probabilities of the model's own distribution, or of the distribution that is sampled from."""

from typing import Any

import numpy as np
import pytest
import torch
from sampling_batch import batch_of, sample_each

from quire.worker_proc.batch.positions import SampledPositions
from quire.worker_proc.sampling.logprobs import token_logprobs
from quire.worker_proc.sampling.sampler import SampledTokens

VOCAB = 24
EDITS: dict[str, Any] = {"logit_bias": {3: 1.5, 4: -1.0}, "allowed_token_ids": list(range(2, VOCAB))}


def some_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 2


def sample(logits: torch.Tensor, rows: list[dict[str, Any]], mode: str, **settings: Any) -> SampledTokens:
    _, sampler = batch_of([(i, 3, params) for i, params in enumerate(rows)], VOCAB, logprobs_mode=mode, **settings)
    return sample_each(sampler, logits.clone())


def check(sampled: SampledTokens, distributions: torch.Tensor, at: list[int]) -> None:
    """``distributions``: float64 logits ``[num_rows, vocab]``."""
    assert sampled.logprobs is not None and sampled.logprobs.at == at
    reported = sampled.logprobs.logprobs
    values = torch.log_softmax(distributions, -1)
    for i, row in enumerate(at):
        own = values[row]
        assert reported.token_ids[i, 0] == sampled.tokens[row]
        torch.testing.assert_close(reported.values[i].double(), own[reported.token_ids[i]], rtol=1e-5, atol=1e-5)
        best = own.sort(descending=True, stable=True).indices[: reported.token_ids.shape[1] - 1]
        assert reported.token_ids[i, 1:].tolist() == best.tolist()
        assert reported.ranks[i] == 1 + int((own > own[sampled.tokens[row]]).sum())


def edited(logits: torch.Tensor) -> torch.Tensor:
    out = logits.double().clone()
    out[:, 3] += 1.5
    out[:, 4] -= 1.0
    out[:, :2] = -torch.inf
    return out


def test_raw_logprobs_are_of_unedited_logits() -> None:
    logits = some_logits(4)
    rows = [EDITS | {"logprobs": 5, "top_k": 2}, EDITS, {"logprobs": 0, "temperature": 0.3}, {"temperature": 0.0}]
    check(sample(logits, rows, "raw_logprobs"), logits.double(), [0, 2])
    check(sample(logits, [EDITS | {"logprobs": 5}] * 4, "raw_logprobs"), logits.double(), [0, 1, 2, 3])


def test_processed_logprobs_are_of_the_drawn_distribution() -> None:
    logits = some_logits(3)
    rows = [
        EDITS | {"logprobs": 3, "temperature": 0.5, "top_k": 4},
        EDITS | {"logprobs": 3, "temperature": 0.0, "top_k": 4},
        EDITS | {"logprobs": 3, "top_p": 1e-6},
    ]
    want = edited(logits)
    fourth = want[0].sort(descending=True).values[3]
    want[0] = torch.where(want[0] >= fourth, want[0] / 0.5, -torch.inf)
    want[2] = torch.where(want[2] == want[2].max(), want[2], -torch.inf)
    sampled = sample(logits, rows, "processed_logprobs")
    assert sampled.logprobs is not None
    reported = sampled.logprobs.logprobs
    assert torch.isfinite(reported.values[0]).all() and torch.isfinite(reported.values[1]).all()
    assert reported.values[2].tolist() == [0.0, 0.0, -torch.inf, -torch.inf]
    check(sampled, want, [0, 1, 2])


def test_processed_logprobs_are_of_a_plugins_result() -> None:
    logits = some_logits(2)
    asked = {"logprobs": 4, "extra_args": {"halve": 1}}
    rows = [asked | {"temperature": 0.5}, asked | {"temperature": 0.0}]
    sampled = sample(logits, rows, "processed_logprobs", logits_processors=["processor_plugins:Halve"])
    check(sampled, logits.double(), [0, 1])  # logits halved at temperature 0.5


def test_probabilities_are_of_the_drawn_distribution() -> None:
    logits = some_logits(3)
    rows = [{"temperature": 0.5, "top_k": 4}, {"temperature": 0.0}, {"min_p": 0.3}]
    _, sampler = batch_of([(i, 3, params) for i, params in enumerate(rows)], VOCAB)
    got = sampler.probabilities(logits, SampledPositions.one_per_row(np.arange(3))).double()
    want = torch.softmax(logits.double(), -1)
    want[0] = torch.softmax(logits[0].double() / 0.5, -1)
    want[0][want[0] < want[0].sort(descending=True).values[3]] = 0
    want[1] = torch.nn.functional.one_hot(logits[1].argmax(), VOCAB)
    want[2][want[2] < 0.3 * want[2].max()] = 0
    torch.testing.assert_close(got / got.sum(-1, keepdim=True), want / want.sum(-1, keepdim=True), rtol=1e-5, atol=1e-7)


def test_torch_gives_the_same_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the native library, with equal logits, zeros of both signs and forbidden tokens."""
    logits = some_logits(6).round()
    logits[0, ::3] = -torch.inf
    logits[1, :4] = torch.tensor([0.0, -0.0, 0.0, -0.0])
    tokens = logits.argmax(-1)
    native = token_logprobs(logits, tokens, 20)
    monkeypatch.setenv("QUIRE_CPU_NATIVE", "0")
    fallback = token_logprobs(logits, tokens, 20)
    assert torch.equal(native.token_ids, fallback.token_ids)
    assert torch.equal(native.ranks, fallback.ranks)
    torch.testing.assert_close(native.values, fallback.values)


def test_given_tokens_are_reported_instead_of_the_most_likely() -> None:
    """Beside them, others get their most likely tokens, and fewer than the lists are long."""
    logits = some_logits(4)
    rows = [{"logprob_token_ids": [7, 1, 20, 3]}, {"logprobs": 2}, EDITS | {"logprob_token_ids": [0]}, {}]
    sampled = sample(logits, rows, "raw_logprobs")
    assert sampled.logprobs is not None and sampled.logprobs.at == [0, 1, 2]
    assert sampled.logprobs.num_best.tolist() == [4, 2, 1]
    want, found = torch.log_softmax(logits, -1), sampled.logprobs.logprobs
    for i, ids in enumerate(([7, 1, 20, 3], logits[1].topk(2).indices.tolist(), [0])):
        assert found.token_ids[i, : 1 + len(ids)].tolist() == [int(sampled.tokens[i]), *ids]
        torch.testing.assert_close(found.values[i, 1 : 1 + len(ids)], want[i, ids])
