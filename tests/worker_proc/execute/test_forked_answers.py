"""A child that is forked in the middle of an answer continues it as a resubmitted request with the same tokens does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from inprocess import Answer, InProcessEngine

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.request.structured_outputs import RepetitionDetection
from quire.protocol.wire.front_end_messages import AddRequest

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
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder, "llama")
    return folder


@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
def test_child_equals_a_resubmitted_request(folder: Path, feature: dict[str, Any]) -> None:
    """Forked while the parent decodes, from fewer tokens than it has."""
    engine = InProcessEngine(folder, max_model_len=96, block_size=4, deterministic=True)
    engine.add("parent", PROMPT, max_tokens=60, temperature=1.2, seed=3)
    while len(engine.answers["parent"].tokens) < NUM_FORKED + 2:
        engine.step()
    known = engine.answers["parent"].tokens[:NUM_FORKED]
    params = {"max_tokens": MAX_TOKENS, "temperature": 1.2, "seed": 9, "ignore_eos": True} | feature
    sampling = SamplingParams(**params)
    engine.answers["child"] = Answer()
    no_tokens, num_known = np.zeros(0, np.int32), len(PROMPT) + NUM_FORKED
    child = AddRequest("child", no_tokens, sampling, 9, forked_from="parent", num_forked_tokens=num_known)
    engine.scheduler.consume(child)
    engine.step()
    assert "child" in {request.request_id for request in engine.scheduler.table.running.values()}, "not forked"
    engine.run()
    engine.add("resubmitted", PROMPT, known, **params)
    forked, resubmitted = (engine.run()[name] for name in ("child", "resubmitted"))
    assert forked.tokens == resubmitted.tokens and forked.logprobs == resubmitted.logprobs
    assert forked.tokens and forked.ended is not None and resubmitted.ended is not None
    assert forked.ended.reason == resubmitted.ended.reason
    assert forked.ended.num_output_tokens == resubmitted.ended.num_output_tokens
