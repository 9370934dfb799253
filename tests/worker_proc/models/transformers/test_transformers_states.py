"""Models of transformers with recurrent states: tokens are those of transformers, whatever happens to a request."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_table import lose_workers, propose_continuations
from checkpoints import greedy_tokens
from host_pages import host_memory
from inprocess import InProcessEngine
from measured_here import measure_here, measured
from tiny_models import make_tiny, tiny_config

from quire.launch.config.implementation import read_model
from quire.protocol.errors import ConfigError
from quire.protocol.model.measured_config import MeasuredConfig, Refused

pytestmark = pytest.mark.full

HYBRIDS = ("qwen3_next", "qwen3_5_text", "granitemoehybrid", "nemotron_h", "falcon_h1", "lfm2", "kimi_linear")
"""In order: gated delta rule with experts, without; state space with experts, and a dense layer in between; state space
and attention in one layer; a convolution alone; Kimi's delta and latent attention."""
NUM_TOKENS = 16
PROMPTS = [[3 + (7 * i + 11 * n) % 90 for i in range(n)] for n in (5, 21, 70)]
PROMPTS += [PROMPTS[2] + PROMPTS[1], 2 * PROMPTS[2]]
"""The last two begin with the third: their states branch at position 64."""
DRAFTS = {
    "num_speculative_tokens": 3,
    "speculative": {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False},
    "max_num_batched_tokens": 64,
}
WAYS: dict[str, dict[str, Any]] = {
    "chunks of 24": {},
    "whole prompts": {"max_num_batched_tokens": 512, "enable_prefix_caching": False},
    "drafts": DRAFTS,
    "preempted": {"num_blocks_override": 13},
    "drafts, preempted": DRAFTS | {"num_blocks_override": 13},
    "one slot": {"state_slots": 1},
    "synchronous, five slots": {"async_scheduling": False, "state_slots": 5},
}


@pytest.fixture(scope="module", autouse=True)
def in_process() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        measure_here(patch)
        yield


Made = tuple[Path, list[list[int]]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Return a factory of folders with tiny checkpoints, and of transformers' tokens after the prompts."""

    @functools.cache
    def make(family: str) -> Made:
        folder = tmp_path_factory.mktemp(family)
        model = make_tiny(folder, family)
        return folder, [greedy_tokens(model, [prompt], NUM_TOKENS)[0] for prompt in PROMPTS]

    return make


def engine_of(folder: Path, **settings: Any) -> InProcessEngine:
    given = {"block_size": 16, "max_model_len": 192, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    return InProcessEngine(folder, **(given | {"num_blocks_override": 64} | settings))


def propose_answers(engine: InProcessEngine, answers: list[list[int]]) -> None:
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    propose_continuations(engine, lambda: texts)


def check_turns(engine: InProcessEngine, wanted: list[list[int]], turns: int = 2) -> None:
    for turn in range(turns):
        for index, prompt in enumerate(PROMPTS):
            engine.add(f"{turn}.{index}", prompt, max_tokens=NUM_TOKENS)
        answers = engine.run()
        assert [answers[f"{turn}.{index}"].tokens for index in range(len(PROMPTS))] == wanted, f"turn {turn}"


@pytest.mark.parametrize(
    "family, way", [*((family, "chunks of 24") for family in HYBRIDS), *(("qwen3_next", way) for way in [*WAYS][1:])]
)
def test_greedy_tokens(family: str, way: str, checkpoint: Callable[[str], Made]) -> None:
    """The second turn finds states at the last multiple of 64 of each prompt, in every family."""
    folder, wanted = checkpoint(family)
    engine = engine_of(folder, **WAYS[way])
    if "drafts" in way:
        propose_answers(engine, wanted)
    check_turns(engine, wanted)
    cached = [engine.answers[f"1.{index}"].num_cached_tokens for index in range(len(PROMPTS))]
    assert cached == [0, 0, 64, 64, 128] or "chunks" not in way
    statistics = engine.statistics()
    assert statistics.num_preemptions > 0 or "preempted" not in way
    assert 0 < statistics.num_accepted_tokens < statistics.num_draft_tokens or "drafts" not in way


@pytest.mark.parametrize("family", ["falcon_h1", "lfm2", "nemotron_h"])
def test_all_at_once(family: str, checkpoint: Callable[[str], Made]) -> None:
    """Drafts, the prefix cache, chunks, preemption, and new workers in mid-answer."""
    folder, wanted = checkpoint(family)
    engine = engine_of(folder, **WAYS["drafts, preempted"])
    propose_answers(engine, wanted)
    check_turns(engine, wanted, turns=1)
    for index, prompt in enumerate(PROMPTS):
        engine.add(f"again {index}", prompt, max_tokens=NUM_TOKENS)
    while len(engine.answers["again 2"].tokens) < 4:
        engine.step()
    lose_workers(engine)
    answers = engine.run()
    assert [answers[f"again {index}"].tokens for index in range(len(PROMPTS))] == wanted


def test_bits_are_equal_however_states_are_advanced(checkpoint: Callable[[str], Made]) -> None:
    """With ``--deterministic``: log probabilities of all tokens."""
    folder, wanted = checkpoint("qwen3_5_text")
    found = []
    for way in ("chunks of 24", "whole prompts", "drafts, preempted"):
        engine = engine_of(folder, deterministic=True, **WAYS[way])
        if "drafts" in way:
            propose_answers(engine, wanted)
        for index, prompt in enumerate(PROMPTS):
            engine.add(str(index), prompt, max_tokens=NUM_TOKENS, logprobs=0)
        answers = engine.run()
        found.append([answers[str(index)].logprobs for index in range(len(PROMPTS))])
    assert found[0] == found[1] == found[2] and all(len(each) == NUM_TOKENS for each in found[0])


@pytest.mark.parametrize("family, num_blocks", [("qwen3_next", 64), ("lfm2", 15)])
def test_states_come_back_from_host_memory(family: str, num_blocks: int, tmp_path: Path) -> None:
    """Checkpoints of others evict those of a prompt; with few blocks, its keys and values are evicted too."""
    model = make_tiny(tmp_path, family)
    prompts = [[3 + (7 * i + 11 * n) % 90 for i in range(n)] for n in range(70, 90, 4)]
    settings = {"max_num_seqs": 1, "state_slots": 3, "num_blocks_override": num_blocks}
    engine = engine_of(tmp_path, num_host_pages=300, **settings)
    assert engine.mover is not None
    with host_memory(300, engine.mover.page_bytes) as memory:
        engine.mover.map(memory.message)
        for turn in range(2):
            for index, prompt in enumerate(prompts):
                engine.add(f"{turn}.{index}", prompt, max_tokens=8)
                engine.run()
        engine.mover.close()
    for name, answer in engine.answers.items():
        assert answer.tokens == greedy_tokens(model, [prompts[int(name[2:])]], 8)[0]
    groups = len(engine.runner.kv_layout.groups)
    loads = [move for move in engine.moves if move.is_load and move.groups is not None]
    assert any((move.groups >= groups).any() for move in loads)
    # Of the others some are computed, when it is known that this takes less time.
    assert engine.answers["1.0"].num_cached_tokens == 64


def test_beams_copy_states(checkpoint: Callable[[str], Made], tmp_path: Path) -> None:
    model = make_tiny(tmp_path, "qwen3_5_text")
    engine = engine_of(tmp_path)
    engine.add("0", PROMPTS[1], max_tokens=8, use_beam_search=True, beam_width=3)
    ids = torch.tensor([PROMPTS[1]])
    given = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    with torch.inference_mode():
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, pad_token_id=0, **given)
    assert [each.tokens for each in engine.run()["0"].hypotheses] == wanted[:, len(PROMPTS[1]) :].tolist()


def test_a_draft_model_has_no_states(checkpoint: Callable[[str], Made]) -> None:
    folder, model = checkpoint("lfm2")[0], read_model(checkpoint("lfm2")[0])
    drafts = {"method": "draft_model", "model": model, "model_path": str(folder)}
    with pytest.raises(ConfigError, match="layers with recurrent states, which a draft model must not have"):
        engine_of(folder, speculative=drafts, num_speculative_tokens=2)


def test_states_follow_the_dtype_unless_they_are_wider() -> None:
    found = measured(tiny_config("qwen3_5_text").to_json_string(use_diff=False))
    assert isinstance(found, MeasuredConfig) and len(found.layers) == 2
    first = [(state.module, state.kind, state.shape, state.dtype) for state in found.states[:2]]
    assert first == [
        ("model.layers.0.linear_attn", "conv", (128, 4), ""),
        ("model.layers.0.linear_attn", "recurrent", (4, 16, 16), "float32"),
    ]


LINEAR, FULL = "linear_attention", "full_attention"


@pytest.mark.parametrize(
    "family, changes, reason",
    [
        ("qwen3_next", {"layer_types": [LINEAR, FULL]}, r"num_hidden_layers.*\(4\).*layer_types.*\(2\)"),
        ("lfm2", {"layer_types": ["conv"] * 5}, r"num_hidden_layers.*\(4\).*layer_types.*\(5\)"),
        ("qwen3_next", {"layer_types": [LINEAR] * 4}, "does not call attention"),
        ("qwen3_next", {"layer_types": [LINEAR, "new"] * 2}, "layer_types.*must be in"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "split_sizes"),
        ("lfm2", {"conv_L_cache": 0}, "padding"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(family: str, changes: dict[str, Any], reason: str) -> None:
    found = measured(json.dumps(tiny_config(family).to_dict() | changes))
    assert isinstance(found, Refused)
    assert re.search(reason, found.reason) and "\n" not in found.reason


@pytest.mark.parametrize(
    "family, changes", [("falcon_h1", {"mamba_d_conv": 1}), ("qwen3_next", {"partial_rotary_factor": 0.3})]
)
def test_odd_widths(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A convolution without earlier inputs; a rotated part of 4.8 dimensions, which transformers rounds."""
    model = make_tiny(tmp_path, family, **changes)
    check_turns(engine_of(tmp_path), [greedy_tokens(model, [prompt], NUM_TOKENS)[0] for prompt in PROMPTS])


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"state_slots": 10**9}, "recurrent states .* MiB .lower --state-slots"),
        ({"kv_cache_memory_bytes": 1, "num_blocks_override": 0}, "memory does not suffice"),
    ],
)
def test_memory_that_does_not_suffice(
    settings: dict[str, Any], message: str, checkpoint: Callable[[str], Made]
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of(checkpoint("lfm2")[0], **settings)
