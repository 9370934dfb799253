"""Greedy tokens equal those of transformers under all scheduling settings.

64 prompts of mixed lengths at once, half of them sharing prefixes, through the real scheduler, codec and model runner
over an in-memory channel. Invariants of both sides are checked after every step.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import greedy_tokens
from inprocess import InProcessEngine
from tiers import thinned

MODELS: dict[str, dict[str, Any]] = {
    "llama-gqa": {"family": "llama"},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
}
OTHER_HEADS: dict[str, dict[str, Any]] = {
    "llama-mha": {"family": "llama", "num_key_value_heads": 4, "tie_word_embeddings": True},
    "llama-mqa": {"family": "llama", "num_key_value_heads": 1, "head_dim": 16},
}
"""In one way in the full run, and in all of them in the slow run."""

# Settings that must not change the tokens: block sizes 8, 16 and 32, both pipeline depths, chunks of 7 tokens.
WAYS: dict[str, dict[str, Any]] = {
    "one chunk": {},
    "one chunk, synchronous": {"async_scheduling": False, "block_size": 8},
    "chunks of 7": {"long_prefill_token_threshold": 7, "block_size": 8},
    "chunks of 7, synchronous": {"long_prefill_token_threshold": 7, "async_scheduling": False, "block_size": 32},
    "tight budget": {"max_num_batched_tokens": 24, "max_num_seqs": 24},
    "no prefix cache, no chunks": {
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 256,
        "block_size": 32,
    },
}
PREEMPTED: dict[str, dict[str, Any]] = {
    "blocks of 8": {"block_size": 8, "num_blocks_override": 24},
    "blocks of 8, synchronous, chunks of 7": {
        "block_size": 8,
        "num_blocks_override": 24,
        "async_scheduling": False,
        "long_prefill_token_threshold": 7,
    },
    "blocks of 16, no prefix cache": {"block_size": 16, "num_blocks_override": 14, "enable_prefix_caching": False},
    "blocks of 32": {"block_size": 32, "num_blocks_override": 8},
}
LENGTHS = (1, 2, 7, 16, 17, 33, 48, 63)
PER_LENGTH = 8
NEW_TOKENS = 16
MAX_LEN = 128

Reference = tuple[Path, list[list[int]], list[list[int]]]


def _prompts() -> list[list[int]]:
    """Return eight prompts of each length; every second one shares a prefix with the first of the longest length."""
    rng = random.Random(7)
    longest = [rng.randrange(97) for _ in range(max(LENGTHS))]
    prompts: list[list[int]] = []
    for length in LENGTHS:
        for i in range(PER_LENGTH):
            shared = longest[: length - 1] if i % 2 else []
            prompts.append(shared + [rng.randrange(97) for _ in range(length - len(shared))])
    return prompts


def make_reference(factory: Callable[..., tuple[Path, Any]], model_name: str) -> Reference:
    """Return a checkpoint, the prompts, and the tokens that transformers generates for each."""
    folder, model = factory(**(MODELS | OTHER_HEADS)[model_name])
    prompts = _prompts()
    expected: list[list[int]] = []
    for start in range(0, len(prompts), PER_LENGTH):
        expected += greedy_tokens(model, prompts[start : start + PER_LENGTH], NEW_TOKENS)
    return folder, prompts, expected


@pytest.fixture(
    scope="module",
    params=[*thinned(MODELS, keep=1), *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER_HEADS)],
)
def reference(request: pytest.FixtureRequest, checkpoint_factory: Callable[..., tuple[Path, Any]]) -> Reference:
    return make_reference(checkpoint_factory, request.param)


def _run(engine: InProcessEngine, prompts: list[list[int]], name: str = "r") -> list[list[int]]:
    for i, prompt in enumerate(prompts):
        engine.add(f"{name}{i}", prompt, max_tokens=NEW_TOKENS)
    answers = engine.run()
    return [answers[f"{name}{i}"].tokens for i in range(len(prompts))]


@pytest.mark.parametrize("way", thinned(WAYS, keep=2))
def test_greedy_tokens(reference: Reference, way: str) -> None:
    folder, prompts, expected = reference
    engine = InProcessEngine(folder, max_model_len=MAX_LEN, **WAYS[way])
    assert _run(engine, prompts) == expected
    statistics = engine.statistics()
    assert statistics.num_free_blocks == statistics.num_usable_blocks


@pytest.mark.full
@pytest.mark.parametrize("model_name", OTHER_HEADS)
def test_greedy_tokens_of_other_head_counts(
    model_name: str, checkpoint_factory: Callable[..., tuple[Path, Any]]
) -> None:
    """With preemption and chunks, which covers all ways of writing the cache."""
    folder, prompts, expected = make_reference(checkpoint_factory, model_name)
    way = PREEMPTED["blocks of 8, synchronous, chunks of 7"]
    engine = InProcessEngine(folder, max_model_len=MAX_LEN, max_num_seqs=16, **way)
    assert _run(engine, prompts) == expected
    assert engine.statistics().num_preemptions >= 3


@pytest.mark.parametrize("way", thinned(PREEMPTED, keep=1))
def test_greedy_tokens_under_preemption(reference: Reference, way: str) -> None:
    folder, prompts, expected = reference
    engine = InProcessEngine(folder, max_model_len=MAX_LEN, max_num_seqs=16, **PREEMPTED[way])
    assert _run(engine, prompts) == expected
    statistics = engine.statistics()
    assert statistics.num_preemptions >= 3
    assert statistics.num_free_blocks == statistics.num_usable_blocks


@pytest.mark.parametrize("asynchronous", thinned([True, False], keep=1))
def test_greedy_tokens_from_the_prefix_cache(reference: Reference, asynchronous: bool) -> None:
    folder, prompts, expected = reference
    engine = InProcessEngine(folder, max_model_len=MAX_LEN, async_scheduling=asynchronous)
    assert _run(engine, prompts, "miss") == expected
    assert _run(engine, prompts, "hit") == expected
    long = [i for i, prompt in enumerate(prompts) if len(prompt) > 16]
    assert all(engine.answers[f"hit{i}"].num_cached_tokens >= 16 for i in long)


def test_sampled_tokens_do_not_depend_on_scheduling(reference: Reference) -> None:
    """Seeded sampling gives the same tokens alone or in a batch, preempted or not."""
    folder, prompts, _ = reference
    some = prompts[::9]

    def sample(names: list[int], **settings: Any) -> list[list[int]]:
        engine = InProcessEngine(folder, max_model_len=MAX_LEN, block_size=8, **settings)
        for i in names:
            engine.add(f"s{i}", some[i], max_tokens=NEW_TOKENS, temperature=0.9, top_k=20, top_p=0.9, seed=i)
        answers = engine.run()
        return [answers[f"s{i}"].tokens for i in names]

    together = sample(list(range(len(some))))
    assert sample(list(range(len(some)))[::-1])[::-1] == together
    assert sample(list(range(len(some))), num_blocks_override=12, max_num_seqs=6) == together
    assert [sample([i])[0] for i in (0, len(some) - 1)] == [together[0], together[-1]]
    assert len({tuple(tokens) for tokens in together}) > 1
