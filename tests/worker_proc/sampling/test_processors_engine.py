"""Processors in the whole engine: outputs equal those of a simple loop over one request."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inprocess import InProcessEngine
from processor_plugins import Lengths
from tiers import covering

VOCAB = 97
NEW_TOKENS = 20
START, END = [11], [12, 13]
MODES: dict[str, dict[str, Any]] = {
    "asynchronous": {},
    "synchronous, chunks of 7": {"async_scheduling": False, "long_prefill_token_threshold": 7, "block_size": 8},
    "preempted": {"num_blocks_override": 20, "block_size": 8},
}
DRAFTS: dict[str, Any] = {
    "num_speculative_tokens": 3,
    "speculative": {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False},
}

Sampling = dict[str, Any]


def requests() -> list[tuple[list[int], Sampling]]:
    rng = random.Random(3)
    kinds: list[Sampling] = [
        {},
        {"frequency_penalty": 1.5},
        {"frequency_penalty": -1.0, "logit_bias": {5: 3.0, 6: 2.5}},
        {"allowed_token_ids": list(range(40, 60)), "frequency_penalty": 0.7},
        {"bad_words_token_ids": [[5, 5], [6, 6], [5, 6]], "logit_bias": {5: 100.0, 6: 99.0}},
        {"thinking_token_budget": 6, "logit_bias": {5: 100.0}},
        {"thinking_token_budget": 0},
        {"ignore_eos": False, "min_tokens": 9, "stop_token_ids": [20, 21], "logit_bias": {20: 100.0, 30: 99.0}},
        {"extra_args": {"add_text": True}},
    ]
    made = []
    for index in range(18):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([2, 9, 17, 33]))]
        made.append((prompt + START, {"ignore_eos": True, **kinds[index % len(kinds)]}))
    return made


def plain(model: Any, prompt: list[int], sampling: Sampling) -> list[int]:
    """Generate token by token, with each rule as docs/sampling.md defines it."""
    output: list[int] = []
    while len(output) < NEW_TOKENS:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0, -1].float()
        for token, bias in sampling.get("logit_bias", {}).items():
            logits[token] += bias
        logits -= sampling.get("frequency_penalty", 0.0) * torch.bincount(
            torch.tensor(output, dtype=torch.long), minlength=VOCAB
        )
        if "allowed_token_ids" in sampling:
            logits[[token for token in range(VOCAB) if token not in sampling["allowed_token_ids"]]] = -torch.inf
        for word in sampling.get("bad_words_token_ids", []):
            if output[len(output) - len(word) + 1 :] == word[:-1] and len(output) >= len(word) - 1:
                logits[word[-1]] = -torch.inf
        if len(output) < sampling.get("min_tokens", 0):
            logits[sampling["stop_token_ids"]] = -torch.inf
        if "add_text" in sampling.get("extra_args", {}):
            logits += torch.bincount(torch.tensor(prompt + output), minlength=VOCAB)
        token = int(logits.argmax())
        budget = sampling.get("thinking_token_budget")
        if budget is not None and budget <= len(output) < budget + len(END) and END[0] not in output[:budget]:
            token = END[len(output) - budget]
        output.append(token)
        if token in sampling.get("stop_token_ids", []):
            break
    return output


@pytest.fixture(scope="module")
def wanted(checkpoint_factory: Callable[..., tuple[Path, Any]]) -> tuple[Path, list[list[int]]]:
    folder, model = checkpoint_factory("llama")
    return folder, [plain(model, prompt, sampling) for prompt, sampling in requests()]


def run(folder: Path, **settings: Any) -> tuple[InProcessEngine, list[list[int]]]:
    engine = InProcessEngine(
        folder, max_model_len=96, thinking_start_token_ids=START, thinking_end_token_ids=END, **settings
    )
    for index, (prompt, sampling) in enumerate(requests()):
        engine.add(str(index), prompt, max_tokens=NEW_TOKENS, **sampling)
    answers = engine.run()
    return engine, [answers[str(index)].tokens for index in range(len(answers))]


@pytest.mark.parametrize(("mode", "drafts"), covering(MODES, [False, True]))
def test_outputs_equal_a_simple_loop(mode: str, drafts: bool, wanted: tuple[Path, list[list[int]]]) -> None:
    folder, answers = wanted
    plugins = {"logits_processors": ["processor_plugins:AddText"]}
    engine, found = run(folder, **plugins, **MODES[mode], **(DRAFTS if drafts else {}))
    assert found == answers
    numbers = engine.statistics()
    assert (numbers.num_accepted_tokens > 0) == drafts and (numbers.num_preemptions > 0) == (mode == "preempted")


def test_outputs_without_plugins_equal_a_simple_loop(wanted: tuple[Path, list[list[int]]]) -> None:
    """The host then waits only for tokens of requests whose lists are read."""
    folder, answers = wanted
    found = run(folder)[1]
    own = [index for index, (_, sampling) in enumerate(requests()) if "extra_args" not in sampling]
    assert [found[index] for index in own] == [answers[index] for index in own]


def test_output_lists_are_complete_while_the_scheduler_is_ahead(wanted: tuple[Path, list[list[int]]]) -> None:
    engine = InProcessEngine(wanted[0], max_model_len=96, logits_processors=["processor_plugins:Lengths"])
    assert engine.config.pipeline_depth == 2
    for name, length in (("a", 6), ("b", 9)):
        engine.add(name, [3, 4, 5], max_tokens=length, extra_args={"name": name})
    engine.run()
    (lengths,) = [p for p in engine.runner.sampler.processors.all if isinstance(p, Lengths)]
    assert lengths.seen == {"a": list(range(6)), "b": list(range(9))}


def test_request_that_breaks_a_plugin_fails_alone(wanted: tuple[Path, list[list[int]]]) -> None:
    engine = InProcessEngine(wanted[0], max_model_len=96, logits_processors=["processor_plugins:Breaks"])
    engine.add("good", [3, 4, 5], max_tokens=8)
    alone = engine.run()["good"].tokens
    engine.add("beside", [3, 4, 5], max_tokens=8)
    engine.add("breaks", [3, 4, 5], max_tokens=8, extra_args={"break": "raise", "from": 3})
    answers = engine.run()
    assert answers["beside"].tokens == alone and len(alone) == 8
    ended = answers["breaks"].ended
    assert ended is not None and ended.detail.endswith("logits processor Breaks failed: ZeroDivisionError")
    assert answers["breaks"].tokens == alone[:3]
