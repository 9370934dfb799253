"""Beam search with a grammar finds what a plain search over the masked logits of transformers finds."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lent_engines import DEMO
from tiers import thinned
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from quire.launch.config.model_folder import DEMO_MODEL
from quire.protocol.request.structured_outputs import StructuredOutputs

pytestmark = pytest.mark.full

PROMPTS = ["Once upon a time", "The dog said", "x"]
LETTERS = "abcdeht "
REGEX = "[abcdeht ]{2,9}!"


def allowed(text: str) -> bool:
    """Whether a text begins a match of REGEX, or is one."""
    body, mark, rest = text.partition("!")
    return set(body) <= set(LETTERS) and not rest and (len(body) <= 9 if not mark else 2 <= len(body) <= 9)


@pytest.fixture
def llm(lend: Callable[..., LLM]) -> LLM:
    return lend(**DEMO)


def plain_search(llm: LLM, model: Any, prompt: str, width: int) -> list[tuple[list[int], float]]:
    """Return the best outputs with their mean log probabilities. It ends when no beam is left."""
    tokenizer: Any = llm._text_in.tokenizer
    stops = list(llm.config.model.eos_token_ids)
    start = tokenizer.encode(prompt).ids
    texts = {token: tokenizer.decode([token], skip_special_tokens=False) for token in range(llm.vocab_size)}
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[list[int], float]] = []
    while beams:
        found = []
        for total, tokens in beams:
            written = "".join(texts[token] for token in tokens)
            fits = [t for t in texts if t not in stops and texts[t] and allowed(written + texts[t])]
            fits += stops * written.endswith("!")
            with torch.inference_mode():
                logits = model(torch.tensor([start + tokens])).logits[0, -1].double()
            values = torch.log_softmax(logits[fits], dim=-1).tolist()
            found += [(total + value, [*tokens, token]) for token, value in zip(fits, values, strict=True)]
        found.sort(key=lambda each: -each[0])
        ended += [(tokens, total / len(tokens)) for total, tokens in found[:width] if tokens[-1] in stops]
        beams = [each for each in found if each[1][-1] not in stops][:width]
        ended = sorted(ended, key=lambda each: -each[1])[:width]
        if (
            len(ended) == width
            and max((total / len(tokens) for total, tokens in beams), default=-math.inf) <= ended[-1][1]
        ):
            break
    return ended


@pytest.mark.parametrize(("prompt", "width"), thinned([(p, w) for p in PROMPTS for w in (3, 2, 8)], keep=1))
def test_outputs_are_those_of_a_plain_search(llm: LLM, prompt: str, width: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    grammar = StructuredOutputs(regex=REGEX)
    other = SamplingParams(temperature=1.0, seed=3, max_tokens=30)
    search = SamplingParams(use_beam_search=True, beam_width=width, max_tokens=30, structured_outputs=grammar)
    (alone,) = llm.generate(prompt, other)
    found, beside = llm.generate([prompt, prompt], [search, other])
    expected = plain_search(llm, model, prompt, width)
    assert [each.token_ids for each in found.outputs] == [tokens for tokens, _ in expected]
    assert [each.score for each in found.outputs] == pytest.approx([score for _, score in expected], abs=1e-4)
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_grammar_with_fewer_outputs_than_beams(llm: LLM) -> None:
    grammar = StructuredOutputs(choice=["yes", "no"])
    params = SamplingParams(use_beam_search=True, beam_width=8, max_tokens=8, structured_outputs=grammar)
    (found,) = llm.generate("Is it?", params)
    assert {each.text for each in found.outputs} == {"yes", "no"}
