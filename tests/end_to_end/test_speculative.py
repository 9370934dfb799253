"""Draft tokens change the speed, never the text: it is the same with any proposer and without one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from speculating import METHODS, Speculating, random_prompts
from tiers import examples, thinned

from quire import LLM, SamplingParams

NUM_PROMPTS = examples(200)
# With smaller weights tiny models fall into loops, and repeated tokens make correct drafts.
REPEATING = {"initializer_range": 0.1}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Speculating:
    return Speculating(tmp_path_factory.mktemp("llama"), "llama", **REPEATING)


@pytest.mark.parametrize("method", thinned(METHODS, keep=1))
def test_same_text_for_many_prompts(llama: Speculating, method: str) -> None:
    prompts = random_prompts(NUM_PROMPTS, 8)
    drafted, plain = llama.run(prompts, method, check=False), llama.plain(prompts, check=False)
    assert drafted.tokens == plain.tokens
    assert drafted.endings == plain.endings
    assert drafted.num_accepted > NUM_PROMPTS // 4


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("batch", "count"), [(1, 4), (3, 4), (8, 4), (32, 1), (32, 7)])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_same_text_in_every_batch(
    llama: Speculating, method: str, batch: int, async_scheduling: bool, count: int
) -> None:
    prompts = random_prompts(NUM_PROMPTS, 16)
    settings: dict[str, Any] = {"max_num_seqs": batch, "async_scheduling": async_scheduling, "check": False}
    drafted = llama.run(prompts, method, num_speculative_tokens=count, **settings)
    assert drafted.tokens == llama.plain(prompts, check=False).tokens


@pytest.mark.parametrize("method", thinned(METHODS, keep=1))
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.full), 3])
def test_same_text_without_async_scheduling(llama: Speculating, method: str, batch: int) -> None:
    prompts = random_prompts(9, 12, seed=1)
    drafted = llama.run(prompts, method, max_num_seqs=batch, async_scheduling=False)
    assert drafted.tokens == llama.plain(prompts).tokens
    assert drafted.num_accepted > 0


@pytest.mark.full
@pytest.mark.parametrize("method", thinned(METHODS, keep=1))
def test_same_text_with_changing_numbers_of_drafts(llama: Speculating, method: str) -> None:
    prompts = random_prompts(9, 40, seed=12)
    drafted = llama.run(prompts, method, {"adaptive": True})
    assert drafted.tokens == llama.plain(prompts).tokens
    assert 0 < drafted.engine.statistics().num_draft_tokens < 4 * sum(map(len, drafted.tokens))


@pytest.mark.parametrize("method", thinned(METHODS, keep=1))
def test_same_text_with_chunks_and_preemption(llama: Speculating, method: str) -> None:
    prompts = random_prompts(6, 36, longest=40, seed=2)
    pressed = {"block_size": 4, "num_blocks_override": 36, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    drafted = llama.run(prompts, method, **pressed)
    assert drafted.engine.statistics().num_preemptions > 0
    assert drafted.tokens == llama.plain(prompts).tokens


@pytest.mark.parametrize("method", thinned(METHODS, keep=1))
def test_stop_tokens_within_accepted_drafts(llama: Speculating, method: str) -> None:
    free = llama.plain(random_prompts(16, 24, seed=3))
    stops = sorted({token for tokens in free.tokens for token in tokens[6:20]})[::5]
    prompts = random_prompts(16, 24, seed=3, stop_token_ids=stops)
    expected, drafted = llama.plain(prompts), llama.run(prompts, method)
    assert drafted.tokens == expected.tokens
    assert drafted.endings == expected.endings
    assert len({len(tokens) for tokens in expected.tokens}) > 5


@pytest.mark.parametrize("method", thinned(METHODS, keep=1))
def test_log_probabilities_equal_those_without_drafts(llama: Speculating, method: str) -> None:
    prompts = random_prompts(8, 20, seed=4, logprobs=3)
    expected, drafted = llama.plain(prompts), llama.run(prompts, method)
    assert drafted.tokens == expected.tokens
    for own, other in zip(drafted.logprobs, expected.logprobs, strict=True):
        assert len(own) == 20 * 4
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", thinned(METHODS, keep=1))
def test_same_text_with_prefix_cache_hits(llama: Speculating, method: str) -> None:
    shared = list(range(10, 42))
    prompts = [(shared + tokens, sampling) for tokens, sampling in random_prompts(12, 12, seed=5)]
    drafted = llama.run(prompts, method, max_num_seqs=2, block_size=8)
    assert sum(answer.num_cached_tokens for answer in drafted.answers) >= 10 * len(shared)
    assert drafted.tokens == llama.plain(prompts, enable_prefix_caching=False).tokens


@pytest.mark.parametrize("method", thinned(METHODS, keep=1))
def test_texts_that_reach_max_model_len(llama: Speculating, method: str) -> None:
    prompts = random_prompts(8, 100, longest=30, seed=6)
    expected = llama.plain(prompts, max_model_len=48)
    drafted = llama.run(prompts, method, max_model_len=48)
    assert drafted.tokens == expected.tokens
    assert drafted.endings == expected.endings
    assert all(len(prompt) + len(tokens) == 48 for (prompt, _), tokens in zip(prompts, drafted.tokens, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("family", thinned(["mistral", "gemma3"], keep=1))
def test_sliding_window_layers(tmp_path: Path, family: str) -> None:
    windowed = Speculating(tmp_path, family, **REPEATING)
    prompts = random_prompts(6, 20, longest=30, seed=7)
    for method in METHODS:
        drafted = windowed.run(prompts, method, block_size=4, max_num_seqs=3)
        assert drafted.tokens == windowed.plain(prompts).tokens, method


@pytest.mark.parametrize("method", thinned(METHODS, keep=1))
def test_logits_processors_see_the_drafts_before_a_position(llama: Speculating, method: str) -> None:
    asked = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "min_tokens": 5, "logit_bias": {7: 2.0}}
    prompts = random_prompts(8, 16, seed=8, **asked)
    drafted = llama.run(prompts, method)
    assert drafted.tokens == llama.plain(prompts).tokens


def test_a_correct_draft_model_saves_steps(llama: Speculating) -> None:
    prompts = random_prompts(4, 25, seed=9)
    llama_twice = {"model": llama.config("draft_model").model, "model_path": str(llama.folder)}
    drafted = llama.run(prompts, "draft_model", llama_twice)
    assert drafted.tokens == llama.plain(prompts).tokens
    # The prompt's step returns one token, each other step one token and four accepted drafts.
    assert drafted.engine.statistics().num_steps <= 9


def test_rejection_keeps_greedy_texts_and_is_reproducible(llama: Speculating) -> None:
    prompts = random_prompts(12, 16, seed=10)
    expected = llama.plain(prompts)
    first = llama.run(prompts, "draft_model", {"acceptance": "rejection"})
    again = llama.run(prompts, "draft_model", {"acceptance": "rejection"}, max_num_seqs=3)
    assert first.num_accepted > 20
    assert again.tokens == first.tokens, "a text depends on other requests of the batch"
    for (_, sampling), own, other in zip(prompts, first.tokens, expected.tokens, strict=True):
        assert "temperature" in sampling or own == other


@pytest.mark.slow
@pytest.mark.parametrize("method", thinned(["suffix", "draft_model"], keep=1))
def test_two_ranks_propose_the_same_drafts(llama: Speculating, method: str) -> None:
    """Uses real processes, which compare a digest of every step."""
    named = {"model": str(llama.draft_folder)} if method == "draft_model" else {}
    asked = {"method": method, "num_speculative_tokens": 4, "adaptive": False} | named
    drawn = [SamplingParams(temperature=t, seed=3, max_tokens=24, ignore_eos=True) for t in (0.0, 0.9)] * 4
    prompts = [prompt for prompt, _ in random_prompts(8, 1, seed=11)]
    with LLM(llama.folder, dtype="float32", tensor_parallel_size=2, speculative_config=asked) as llm:
        drafted = [output.outputs[0].token_ids for output in llm.generate(prompts, drawn)]
        assert llm.statistics().num_accepted_tokens > 10
    with LLM(llama.folder, dtype="float32") as llm:
        assert drafted == [output.outputs[0].token_ids for output in llm.generate(prompts, drawn)]
