"""Llama 4 in the real scheduler and runner: prompts of several chunks, in steps of all sizes, with what reuses KV."""

import logging
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import greedy_tokens
from inprocess import InProcessEngine
from tiers import thinned

from quire.protocol.config import SpeculativeConfig

NGRAMS = SpeculativeConfig(method="ngram", prompt_lookup_min=1, adaptive=False)
VARIANTS: dict[str, dict[str, Any]] = {
    "norms": {},
    "one expert, no norms": {"num_experts_per_tok": 1, "use_qk_norm": False},
    "no scaled queries": {"attn_temperature_tuning": False, "attention_chunk_size": 24},
}
WAYS: dict[str, dict[str, Any]] = {
    "steps of 24": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
    "steps of 64, no prefix cache": {"max_num_batched_tokens": 64, "enable_prefix_caching": False},
    "steps of 512": {"max_num_batched_tokens": 512},
    "small pool": {"num_blocks_override": 44, "block_size": 8, "max_num_batched_tokens": 32, "max_num_seqs": 8},
    "drafts": {"num_speculative_tokens": 3, "speculative": NGRAMS, "block_size": 4},
}
NEW_TOKENS = 24


@pytest.mark.parametrize(("variant", "way"), thinned(product(VARIANTS, WAYS), keep=1))
def test_tokens_equal_transformers(variant: str, way: str, checkpoint_factory: Callable[..., tuple[Path, Any]]) -> None:
    """Prompts of 12 and of 100 tokens, of which 66 are common, one again, and a fork within a chunk of its answer."""
    folder, reference = checkpoint_factory("llama4", **VARIANTS[variant])
    drawn = torch.randint(3, 97, (4, 100), generator=torch.Generator().manual_seed(6))
    drawn[:, :66] = drawn[0, :66]
    prompts = [*drawn[:, 66:78].tolist(), *drawn.tolist()]
    wanted = greedy_tokens(reference, prompts[:4], NEW_TOKENS) + greedy_tokens(reference, prompts[4:], NEW_TOKENS)
    engine = InProcessEngine(folder, max_model_len=128, **WAYS[way])
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, max_tokens=NEW_TOKENS)
    while len(engine.answers["4"].tokens) < 7:
        engine.step()
    engine.add("fork", [], forked_from=("4", 104), max_tokens=NEW_TOKENS)
    answers = engine.run()
    assert [answers[str(index)].tokens for index in range(8)] == wanted
    assert answers["fork"].tokens == wanted[4][4:]
    engine.add("again", prompts[-1], max_tokens=NEW_TOKENS)
    again = engine.run()["again"]
    assert again.tokens == wanted[-1]
    assert (again.num_cached_tokens > 0) == WAYS[way].get("enable_prefix_caching", True)
    assert bool(engine.statistics().num_preemptions) == ("num_blocks_override" in WAYS[way])
    assert bool(engine.statistics().num_accepted_tokens) == ("speculative" in WAYS[way])


def test_a_vision_part_is_not_loaded_and_one_line_says_so(
    checkpoint_factory: Callable[..., tuple[Path, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    folder, reference = checkpoint_factory("llama4_vision")
    with caplog.at_level(logging.INFO, "quire"):
        engine = InProcessEngine(folder, max_model_len=64)
    assert sum("vision part is not loaded" in record.getMessage() for record in caplog.records) == 1
    engine.add("a", [5, 6, 7], max_tokens=4)
    assert [engine.run()["a"].tokens] == greedy_tokens(reference, [[5, 6, 7]], 4)
