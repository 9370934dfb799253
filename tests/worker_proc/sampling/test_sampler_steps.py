"""The sampler over several steps with processors: the order of operations, and the dependencies of a row's tokens."""

from typing import Any

import numpy as np
import pytest
import torch
from processor_plugins import Halve
from sampling_batch import batch_of, make_sampler, sample_each

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.worker_messages import NewRequestData
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.batch.positions import SampledPositions
from quire.worker_proc.sampling.accept import accept_drafts
from quire.worker_proc.sampling.sampler import SampledTokens, Sampler
from quire.worker_proc.sampling.token_masks import TokenMasks

VOCAB = 40
EVERYTHING: dict[str, Any] = {
    "temperature": 0.9,
    "top_k": 30,
    "top_p": 0.95,
    "min_p": 0.01,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.3,
    "logit_bias": {4: 1.0, 7: -2.0},
    "allowed_token_ids": list(range(2, VOCAB)),
    "bad_words_token_ids": [[3], [4, 5]],
    "min_tokens": 4,
    "stop_token_ids": [6],
    "max_tokens": None,
    "logprobs": 2,
}
HALVE = "processor_plugins:Halve"


def some_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def sample(logits: torch.Tensor, rows: list[dict[str, Any]], **settings: Any) -> SampledTokens:
    """Sample rows with seeds 0, 1, ... and three known tokens 0 each, without changing ``logits``."""
    _, sampler = batch_of([(i, 3, params) for i, params in enumerate(rows)], VOCAB, **settings)
    return sample_each(sampler, logits.clone())


def fresh(seed: int, prompt: list[int], answer: list[int], params: dict[str, Any]) -> tuple[InputBatch, Sampler]:
    """Return a row that is added with all of these tokens, as after a resumption."""
    batch, sampler = make_sampler(VOCAB, 2, 64)
    known = np.array(prompt + answer, np.int32)
    new = [NewRequestData(9, "r", len(prompt), len(known), 0, [1], SamplingParams(**params), seed)]
    batch.change_rows([], new, known)
    sampler.update_state(batch.builder.get_and_reset(1))
    return batch, sampler


def tokens_and_logprobs(sampled: SampledTokens) -> tuple[list[int], list[Any]]:
    assert sampled.logprobs is not None
    return sampled.tokens.tolist(), sampled.logprobs.logprobs.values.tolist()


def test_resumed_request_gets_the_same_tokens_and_logprobs() -> None:
    prompt, answer = [1, 4, 4], [8]
    batch, sampler = fresh(5, prompt, answer, EVERYTHING)
    for step in range(10):
        logits = some_logits(1, seed=step)
        resumed = sample_each(fresh(5, prompt, answer, EVERYTHING)[1], logits.clone())
        sampled = sample_each(sampler, logits.clone())
        assert tokens_and_logprobs(sampled) == tokens_and_logprobs(resumed)
        token = int(sampled.tokens[0])
        sampler.accepted(SampledPositions.one_per_row(np.arange(1)), sampled.tokens, None)
        answer.append(token)
        batch.num_known[0] += 1
        output = batch.outputs.data[0]
        assert output is not None
        output.append(token)
        sampler.update_state(None)
    assert len(set(answer)) > 4


def test_position_after_drafts_is_sampled_as_if_they_were_tokens() -> None:
    prompt, answer, drafts = [1, 4, 4], [8], [9, 9, 4, 11]
    logits = some_logits(5)
    positions = SampledPositions.with_drafts(np.array([0]), [drafts])
    _, sampler = fresh(5, prompt, answer, EVERYTHING)
    with_drafts = sampler.sample(logits.clone(), positions)
    one_by_one = [
        sample_each(fresh(5, prompt, answer + drafts[:at], EVERYTHING)[1], logits[at : at + 1].clone())
        for at in range(5)
    ]
    tokens, values = zip(*map(tokens_and_logprobs, one_by_one), strict=True)
    assert tokens_and_logprobs(with_drafts) == ([t for own in tokens for t in own], [v for own in values for v in own])
    assert accept_drafts(with_drafts.tokens.numpy(), positions).drafts.tolist() == [4]


def test_row_with_all_features_does_not_depend_on_the_batch() -> None:
    rows = [EVERYTHING, {}, {"temperature": 0.0, "presence_penalty": 1.0}, {"top_p": 0.5}, EVERYTHING]
    logits = some_logits(5)
    whole = sample(logits, rows).tokens.tolist()
    for i, params in enumerate(rows):
        _, sampler = batch_of([(i, 3, params)], VOCAB)
        assert sample_each(sampler, logits[i : i + 1].clone()).tokens.tolist() == [whole[i]]


def test_bad_rows_are_found_before_edits() -> None:
    logits = some_logits(3)
    logits[0, 5] = torch.nan
    rows = [{"allowed_token_ids": [1, 2]}, {"allowed_token_ids": [1, 2]}, {"logit_bias": {3: 5.0}}]
    assert sample(logits, rows).bad.tolist() == [True, False, False]
    logits[0] = -torch.inf
    assert sample(logits, rows).bad.tolist() == [True, False, False]


def test_only_the_request_without_an_allowed_token_fails() -> None:
    rows = [{"allowed_token_ids": [6], "bad_words_token_ids": [[6]]}, {"allowed_token_ids": [6]}]
    sampled = sample(some_logits(2), rows)
    assert [at for at, _ in sampled.failed] == [0]
    assert sampled.tokens[1] == 6 and not sampled.bad.any()


def test_bitmasks_apply_to_greedy_and_random_rows_only_with_a_mask() -> None:
    logits = some_logits(3)
    _, sampler = batch_of([(i, 3, {"temperature": float(i)}) for i in range(3)], VOCAB)
    words = np.zeros((2, 1), np.int32)  # tokens from 32 on have no bit, so they are forbidden
    words[:, 0] = 1 << 7 | 1 << 9
    words.flags.writeable = False
    masks = TokenMasks(np.array([0, 1]), words)
    tokens = sampler.sample(logits.clone(), SampledPositions.one_per_row(np.arange(3)), masks).tokens.tolist()
    assert tokens[0] == (7 if logits[0, 7] > logits[0, 9] else 9)
    assert tokens[1] in (7, 9)
    assert tokens[2] == sample(logits, [{"temperature": float(i)} for i in range(3)]).tokens[2]


def test_is_plain_with_parameters_that_a_graph_can_sample() -> None:
    rows = np.arange(2)
    for other, plain in [
        ({"temperature": 0.0, "top_k": 5}, True),
        ({"min_p": 0.2}, True),
        ({"top_k": 5}, False),
        ({"top_p": 0.9}, False),
        ({"logprobs": 0}, False),
        ({"presence_penalty": 0.1}, False),
        ({"logit_bias": {1: 1.0}}, False),
    ]:
        _, sampler = batch_of([(0, 1, {}), (1, 1, other)], VOCAB)
        assert sampler.is_plain(rows) is plain
    _, sampler = batch_of([(0, 1, {}), (1, 1, {"top_k": 3})], VOCAB)
    assert sampler.is_plain(rows[:1])


def test_argmax_invariant_plugin_runs_between_temperature_and_cuts() -> None:
    """Halving the scaled logits doubles the temperature; min-p shows that it happens before the cuts."""
    asked = {"extra_args": {"halve": 1}, "temperature": 0.4, "min_p": 0.2}
    logits = some_logits(200).repeat(2, 1)
    rows = [asked | {"temperature": 0.0}, {"temperature": 0.4}] + [asked] * 398
    got = sample(logits, rows, logits_processors=[HALVE]).tokens.tolist()
    as_twice = [{"temperature": 0.0}, {"temperature": 0.4}] + [{"temperature": 0.8, "min_p": 0.2}] * 398
    assert got == sample(logits, as_twice).tokens.tolist()


def test_greedy_rows_do_not_run_an_argmax_invariant_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Halve, "apply", lambda self, logits: 1 / 0)
    logits = some_logits(2)
    rows = [{"temperature": 0.0, "extra_args": {"halve": 1}}] * 2
    sampled = sample(logits, rows, logits_processors=[HALVE])
    assert sampled.tokens.tolist() == logits.argmax(-1).tolist() and not sampled.failed


def test_needs_history_if_a_processor_reads_the_output() -> None:
    assert not batch_of([(0, 1, {"presence_penalty": 1.0})], VOCAB)[1].needs_history
    assert batch_of([(0, 1, {"bad_words_token_ids": [[1, 2]]})], VOCAB)[1].needs_history
