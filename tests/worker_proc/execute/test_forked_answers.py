"""A child that is forked in the middle of an answer continues it as a resubmitted request with the same tokens does."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grammar_cases import DEMO, EOS, text_of, tokens_of
from inprocess import InProcessEngine

from quire.protocol.request.structured_outputs import RepetitionDetection, StructuredOutputs

pytestmark = pytest.mark.full

PROMPT = [5, 6, 7, 8, 9, 10, 11]
NUM_FORKED, MAX_TOKENS = 6, 24
FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "presence and frequency": {"presence_penalty": 1.5, "frequency_penalty": 1.0},
    "repetition penalty": {"repetition_penalty": 1.8},
    "bad words": {"bad_words_token_ids": [[at, other] for at in range(12, 60) for other in range(12, 60, 2)]},
    "min_tokens": {"min_tokens": 15, "stop_token_ids": list(range(20, 80)), "temperature": 2.0},
    "repetition detection": {
        "repetition_detection": RepetitionDetection(max_pattern_size=4, min_count=3),
        "allowed_token_ids": [20, 21],
    },
    "log probabilities": {"logprobs": 2},
    "thinking budget": {"thinking_token_budget": 9},
    "custom processor": {"extra_args": {"add_text": True}},
}
SETTINGS: dict[str, Any] = {
    "max_model_len": 96,
    "block_size": 4,
    "deterministic": True,
    "thinking_start_token_ids": [11],
    "thinking_end_token_ids": [12, 13],
    "logits_processors": ["processor_plugins:AddText"],
}

Checkpoints = Callable[..., tuple[Path, Any]]


def fork_and_resubmit(engine: InProcessEngine, prompt: list[int], of_parent: dict[str, Any], **given: Any) -> list[int]:
    """Return the tokens of a request that is forked while its parent decodes, from fewer tokens than that has.

    A request with the same tokens and sampling parameters (``given``) must have the same answer.
    """
    engine.add("parent", prompt, max_tokens=60, temperature=1.2, seed=3, **of_parent)
    while len(engine.answers["parent"].tokens) < NUM_FORKED + 2:
        engine.step()
    known = engine.answers["parent"].tokens[:NUM_FORKED]
    params = {"max_tokens": MAX_TOKENS, "temperature": 1.2, "seed": 9} | given
    engine.add("child", [], forked_from=("parent", len(prompt) + NUM_FORKED), **params)
    engine.step()
    assert "child" in {request.request_id for request in engine.scheduler.table.running.values()}, "not forked"
    engine.run()
    engine.add("resubmitted", prompt, known, **params)
    forked, resubmitted = (engine.run()[name] for name in ("child", "resubmitted"))
    assert forked.tokens == resubmitted.tokens and forked.logprobs == resubmitted.logprobs
    assert forked.tokens and forked.ended is not None and resubmitted.ended is not None
    assert (forked.ended.reason, forked.ended.detail) == (resubmitted.ended.reason, resubmitted.ended.detail)
    assert forked.ended.num_output_tokens == resubmitted.ended.num_output_tokens
    return known + forked.tokens


@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
def test_child_equals_a_resubmitted_request(checkpoint_factory: Checkpoints, feature: dict[str, Any]) -> None:
    engine = InProcessEngine(checkpoint_factory("llama")[0], **SETTINGS)
    tokens = fork_and_resubmit(engine, PROMPT, {}, **feature)
    if "thinking_token_budget" in feature:
        assert tokens[9:11] == [12, 13]


def test_child_with_a_grammar_equals_a_resubmitted_request(checkpoint_factory: Checkpoints, tmp_path: Path) -> None:
    """The tokens of the parent are of the grammar, and those of the child continue them."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint_factory("llama", vocab_size=1024, eos_token_id=EOS)[0], folder)
    shutil.copy(DEMO / "tokenizer.json", folder)
    engine = InProcessEngine(folder, **SETTINGS)
    grammar = {"structured_outputs": StructuredOutputs(regex="([a-z] ){12,40}!")}
    tokens = fork_and_resubmit(engine, tokens_of("Tell me"), grammar, **grammar)
    engine.close()
    assert len(tokens) == MAX_TOKENS and re.fullmatch("([a-z] )+[a-z]?", text_of(tokens))
