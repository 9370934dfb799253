"""What an engine can do, with models that transformers computes: tokens and numbers are those of transformers."""

import functools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from adapter_steps import AdapterRunner
from checkpoints import greedy_tokens, make_checkpoint
from grammar_cases import DEMO, EOS, text_of
from inprocess import InProcessEngine
from measured_here import measure_here
from peft_adapters import make_peft_adapter
from quantised_checkpoints import FORMATS, quantise_checkpoint
from tiny_models import make_tiny
from transformers import AutoModelForCausalLM

from quire.launch.config.implementation import read_model
from quire.protocol.config import SpeculativeConfig
from quire.protocol.model.checkpoint import stored_tensors, with_stored_format
from quire.protocol.model.weight_format import online_format
from quire.protocol.request.structured_outputs import StructuredOutputs

pytestmark = pytest.mark.full

FAMILIES = ("gpt_neox", "gpt2", "deepseek_v3", "gemma3n_text", "cohere2")
NUM_TOKENS = 14
START = [3 + 7 * i % 90 for i in range(20)]
PROMPTS = [START[: 20 - 3 * n] + [5 + (11 * i + 17 * n) % 90 for i in range(9 * n + 1)] for n in range(6)]
"""With common prefixes of all lengths, and lengths from 21 to 51."""
NGRAM: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}
SUFFIX: dict[str, Any] = {"method": "suffix", "adaptive": False}
WAYS: dict[str, dict[str, Any]] = {
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "synchronous": {"async_scheduling": False, "enable_prefix_caching": False},
    "preempted": {"num_blocks_override": 15},
    "n-grams": {"num_speculative_tokens": 3, "speculative": NGRAM},
    "suffixes, preempted": {"num_speculative_tokens": 3, "speculative": SUFFIX, "num_blocks_override": 13},
}

Checkpoint = Callable[..., tuple[Path, Any]]


@pytest.fixture(scope="module", autouse=True)
def in_process() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        measure_here(patch)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Return a factory of folders with tiny checkpoints, and their models. Quire has code of its own for llama only."""

    @functools.cache
    def make(family: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(family)
        if family == "llama":
            return folder, make_checkpoint(folder, family)
        return folder, make_tiny(folder, family, vocab_size=97, vocab_size_per_layer_input=97)

    return make


@functools.cache
def greedy(model: Any) -> list[list[int]]:
    return [greedy_tokens(model, [prompt], NUM_TOKENS)[0] for prompt in PROMPTS]


def engine_of(folder: Path, **settings: Any) -> InProcessEngine:
    common = {"model_impl": "transformers", "block_size": 8, "max_model_len": 128, "num_blocks_override": 64}
    return InProcessEngine(folder, **(common | settings))


def check_greedy(engine: InProcessEngine, model: Any) -> None:
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt, max_tokens=NUM_TOKENS)
    answers = engine.run()
    assert [answers[str(index)].tokens for index in range(len(PROMPTS))] == greedy(model)


@pytest.mark.parametrize(
    "family, way", [*zip(FAMILIES, WAYS, strict=True), *zip(FAMILIES, [*WAYS][2:] + [*WAYS][:2], strict=True)]
)
def test_greedy_tokens(family: str, way: str, checkpoint: Checkpoint) -> None:
    folder, model = checkpoint(family)
    engine = engine_of(folder, **WAYS[way])
    check_greedy(engine, model)
    statistics = engine.statistics()
    assert statistics.num_preemptions > 0 or "preempted" not in way
    assert statistics.num_draft_tokens > 0 or "speculative" not in WAYS[way]


@pytest.mark.parametrize(
    "target, draft", [("gpt_neox", "llama"), ("llama", "gpt_neox"), ("gemma3n_text", "gemma3n_text")]
)
def test_draft_models(target: str, draft: str, checkpoint: Checkpoint) -> None:
    (folder, model), (draft_folder, _) = checkpoint(target), checkpoint(draft)
    chosen = SpeculativeConfig(
        method="draft_model", model=read_model(draft_folder), model_path=str(draft_folder), adaptive=False
    )
    engine = engine_of(folder, model_impl="auto", speculative=chosen, num_speculative_tokens=3)
    check_greedy(engine, model)
    found = engine.statistics()
    assert found.num_draft_tokens > 0 and (found.num_accepted_tokens > 0 or target != draft)


def test_log_probabilities(checkpoint: Checkpoint) -> None:
    folder, model = checkpoint("cohere2")
    engine = engine_of(folder)
    engine.add("0", PROMPTS[2], max_tokens=NUM_TOKENS, logprobs=1)
    answer = engine.run()["0"]
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPTS[2] + answer.tokens])).logits[0, len(PROMPTS[2]) - 1 : -1]
    wanted = logits.log_softmax(-1)[torch.arange(NUM_TOKENS), torch.tensor(answer.tokens)].numpy()
    found = np.array([np.frombuffer(each, np.float32)[0] for each in answer.logprobs])
    np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"num_blocks_override": 13}], ids=["", "preempted"])
@pytest.mark.parametrize("family", ["gpt2", "deepseek_v3"])
def test_beams(family: str, settings: dict[str, Any], checkpoint: Checkpoint) -> None:
    folder, model = checkpoint(family)
    engine = engine_of(folder, **settings)
    for index, prompt in enumerate(PROMPTS[:2]):
        engine.add(str(index), prompt, max_tokens=8, use_beam_search=True, beam_width=3)
    answers = engine.run()
    for index, prompt in enumerate(PROMPTS[:2]):
        with torch.inference_mode():
            given = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 8, "min_new_tokens": 8}
            ids = torch.tensor([prompt])
            more = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False}
            wanted = model.generate(ids, attention_mask=torch.ones_like(ids), **given, **more)
        assert [each.tokens for each in answers[str(index)].hypotheses] == wanted[:, len(prompt) :].tolist()


def test_forks(checkpoint: Checkpoint) -> None:
    """A child that is forked while its parent decodes has the tokens of a request with the same text."""
    folder, model = checkpoint("gemma3n_text")
    engine = engine_of(folder)
    engine.add("parent", PROMPTS[1], max_tokens=60, temperature=1.2, seed=3)
    while len(engine.answers["parent"].tokens) < 9:
        engine.step()
    known = PROMPTS[1] + engine.answers["parent"].tokens[:7]
    engine.add("child", [], forked_from=("parent", len(known)), max_tokens=8 + 7)
    engine.step()
    assert "child" in {request.request_id for request in engine.scheduler.table.running.values()}, "not forked"
    assert engine.run()["child"].tokens[:8] == greedy_tokens(model, [known], 8)[0]


def test_grammars(tmp_path: Path) -> None:
    make_tiny(tmp_path, "gpt2", vocab_size=1024, eos_token_id=EOS)
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    tokens = []
    for settings in ({}, {"num_blocks_override": 15, **WAYS["n-grams"]}):
        engine = engine_of(tmp_path, **settings)
        for index, prompt in enumerate(PROMPTS):
            wanted = StructuredOutputs(regex="[a-c]{12,30}!")
            engine.add(str(index), prompt, max_tokens=40, temperature=1.0, seed=index, structured_outputs=wanted)
        tokens.append([answer.tokens for answer in engine.run().values()])
        engine.close()
    assert all(re.fullmatch("[a-c]{12,30}!", text_of(each)) for each in tokens[0])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    "family, names",
    [
        ("gpt_neox", ["query_key_value", "dense_4h_to_h"]),
        ("gemma3n_text", ["q_proj", "v_proj", "o_proj", "gate_proj", "per_layer_input_gate"]),
        ("deepseek_v3", ["q_a_proj", "kv_b_proj", "o_proj"]),
    ],
)
def test_adapters(family: str, names: list[str], checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Two adapters and none, in the same steps."""
    folder, model = checkpoint(family)
    tuned = [make_peft_adapter(model, tmp_path / str(n), seed=n, target_modules=names) for n in (1, 2)]
    runner = AdapterRunner(folder, model=read_model(folder, "transformers"))
    for number in (1, 2):
        assert runner.load(tmp_path / str(number), number, number - 1).problem == ""
    answers = runner.generate([(PROMPTS[0], number) for number in (0, 1, 2)], 10)
    wanted = [greedy_tokens(each, [PROMPTS[0]], 10)[0] for each in (model, *tuned)]
    assert [tokens for tokens, _ in answers] == wanted and len({*map(tuple, wanted)}) == 3


@pytest.mark.parametrize("form", ["awq", "gptq-act-order", "w4a16-asymmetric", "int8-weights", "fp8-channel", "nvfp4"])
def test_quantised_checkpoints(form: str, tmp_path: Path) -> None:
    make_tiny(tmp_path / "source", "cohere")
    plain, folder = quantise_checkpoint(tmp_path / "source", tmp_path, FORMATS[form]()), tmp_path / "packed"
    stored = stored_tensors(folder, renamed=False)
    engine = engine_of(folder, model=with_stored_format(folder, stored, read_model(folder, "transformers")))
    check_greedy(engine, AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval())


@pytest.mark.parametrize("family", ["cohere", "deepseek_v3", "falcon_h1"])
def test_weights_rounded_at_the_start(family: str, tmp_path: Path) -> None:
    model = make_tiny(tmp_path, family)
    measured = read_model(tmp_path, "transformers")
    assert measured.transformers is not None
    engine = engine_of(tmp_path, model=msgspec.structs.replace(measured, weight_format=online_format("int8")))
    for name in measured.transformers.linears:
        weight = model.get_submodule(name).weight.data
        scale = weight.abs().amax(1, keepdim=True) / 127
        weight.copy_((weight / scale).round() * scale)
    check_greedy(engine, model)
