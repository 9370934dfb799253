"""Beam search finds the outputs and scores of transformers, through scheduler and model runner, in tiny pools too."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inprocess import InProcessEngine
from tiers import thinned

STOPS = list(range(2, 97, 9))
WAYS: dict[str, dict[str, Any]] = {
    "asynchronous": {},
    "synchronous, chunks": {"async_scheduling": False, "long_prefill_token_threshold": 7},
    "preempted": {"block_size": 8, "num_blocks_override": 24},
    "preempted, synchronous, no prefix cache": {
        "async_scheduling": False,
        "block_size": 8,
        "num_blocks_override": 24,
        "enable_prefix_caching": False,
    },
}


def expected(model: Any, prompt: list[int], width: int, params: dict[str, Any]) -> list[tuple[list[int], float]]:
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=params["max_tokens"],
            length_penalty=params["length_penalty"],
            early_stopping=params["early_stopping"],
            eos_token_id=STOPS,
            pad_token_id=0,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
    outputs = [row[len(prompt) :] for row in found.sequences.tolist()]
    return list(zip(map(until_stop, outputs), found.sequences_scores.tolist(), strict=True))


def until_stop(tokens: list[int]) -> list[int]:
    ends = [at for at, token in enumerate(tokens, 1) if token in STOPS]
    return tokens[: ends[0]] if ends else tokens


@pytest.fixture(scope="module", params=thinned(["llama", "gemma3"], keep=1))
def checkpoint(request: pytest.FixtureRequest, checkpoint_factory: Callable[..., tuple[Path, Any]]) -> tuple[Path, Any]:
    folder, model = checkpoint_factory(family=request.param)
    return folder, model


@pytest.mark.parametrize("way", thinned(WAYS, keep=2))
@pytest.mark.parametrize("seed", thinned(range(20), keep=1))
def test_outputs_and_scores_are_those_of_transformers(checkpoint: tuple[Path, Any], way: str, seed: int) -> None:
    """Three searches and another request at a time. Stop tokens are frequent, so that outputs of all lengths end."""
    folder, model = checkpoint
    engine = InProcessEngine(folder, max_num_seqs=9, max_model_len=64, **WAYS[way])
    rng = random.Random(seed)
    searches: dict[str, tuple[list[int], int, dict[str, Any]]] = {}
    for width in rng.sample((2, 4, 8, 3), 3):
        prompt = [rng.randrange(3, 97) for _ in range(rng.randrange(1, 34))]
        params = {
            "length_penalty": rng.choice((-1.0, 0.0, 1.0, 2.0)),
            "early_stopping": rng.choice((True, False, "never")),
            "max_tokens": rng.choice((1, 5, 20)),
        }
        searches[f"width {width}"] = prompt, width, params
        engine.add(f"width {width}", prompt, use_beam_search=True, beam_width=width, stop_token_ids=STOPS, **params)
    engine.add("other", [5, 6, 7], max_tokens=20)
    answers = engine.run()
    for name, (prompt, width, params) in searches.items():
        found = answers[name].hypotheses
        longest = engine.scheduler.kv.max_tokens + 1 - len(prompt)  # a tiny pool limits the length, too
        want = expected(model, prompt, width, params | {"max_tokens": min(params["max_tokens"], longest)})
        assert [each.tokens for each in found] == [tokens for tokens, _ in want], params
        assert [each.score for each in found] == pytest.approx([score for _, score in want], abs=1e-4, rel=1e-6)
    assert len(answers["other"].tokens) == 20
