"""Decisions over a real engine, beside transformers in float32 over each whole prompt and answer."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pooling_checkpoints import CHAT_VOCABULARY, CHATML, save_chat_tokenizer, save_model

from quire import LLM

pytestmark = pytest.mark.full
TEXT = "the quick brown fox says no to the system " * 12
LEAD = "\n\nRead the question below about the input above. Write one of its allowed answers as listed, and no more.\n\n"
CHOICES: list[str | bool] = ["no", "no end", "none", True, "the end"]
QUESTIONS: list[dict[str, Any]] = [
    {"type": "predicate", "name": "says", "instructions": "The fox says no."},
    {"type": "choice", "instructions": "Which?", "choices": [{"value": each} for each in CHOICES]},
    {"type": "score", "instructions": "How quick?", "levels": [{"label": f"level {i}"} for i in range(12)]},
    *({"type": "predicate", "instructions": f"The system says {i}."} for i in range(5)),
]
ASKED = [
    ("Is this true? The fox says no.\n\nAllowed answers:\n- yes\n- no", ["yes", "no"]),
    (
        "Which?\n\nAllowed answers:\n- no\n- no end\n- none\n- true\n- the end",
        ["no", "no end", "none", "true", "the end"],
    ),
    (
        "How quick?\n\nAllowed answers:\n" + "\n".join(f"- {i}: level {i}" for i in range(12)),
        [str(i) for i in range(12)],
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp("decisions")
    made = save_model(folder, "Qwen3ForCausalLM", vocab_size=CHAT_VOCABULARY, max_position_embeddings=1024)
    save_chat_tokenizer(folder, CHATML)
    yield folder, made


def reference(folder: Path, model: Any, question: str, answers: list[str]) -> dict[str, float]:
    """Return the probability that the model writes each answer, and not a longer one that begins with it."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": TEXT + LEAD + question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    begins: dict[str, float] = {}
    for answer in answers:
        own = tokenizer.encode(answer, add_special_tokens=False)
        with torch.no_grad():
            logits = model(torch.tensor([ids + own])).logits[0].float()
        found = torch.log_softmax(logits[len(ids) - 1 : -1], -1)[torch.arange(len(own)), own]
        begins[answer] = math.exp(float(found.double().sum()))
    exact: dict[str, float] = {}
    for answer in sorted(answers, key=len, reverse=True):
        exact[answer] = begins[answer] - sum(exact[other] for other in exact if other.startswith(answer))
    return exact


def test_probabilities_are_those_of_transformers(model: tuple[Path, Any], lend: Callable[..., LLM]) -> None:
    folder, made = model
    llm = lend(folder, dtype="float32", kv_cache_memory_bytes=2**24)
    says, which, quick, *others = llm.decide(TEXT, QUESTIONS)
    for answer, (question, texts) in zip((says, which, quick), ASKED, strict=True):
        wanted = reference(folder, made, question, texts)
        total = sum(wanted.values())
        each = [wanted[text] / total for text in texts]
        if answer is says:
            assert answer.probability == pytest.approx(each[0], rel=1e-3)
            continue
        found = [of.probability for of in answer.probabilities or ()]
        assert found == pytest.approx(each, rel=1e-3, abs=1e-9) and sum(found) == pytest.approx(1)
        best = max(range(len(each)), key=each.__getitem__)
        assert answer.confidence == pytest.approx(wanted[texts[best]], rel=1e-3)
        if answer is which:
            assert (answer.choice, [of.value for of in answer.probabilities or ()]) == (CHOICES[best], CHOICES)
        else:
            assert answer.score == pytest.approx(sum(i * p for i, p in enumerate(each)), rel=1e-3)
    assert all(0 < (answer.probability or 0) < 1 for answer in others)


def test_the_text_is_computed_once(model: tuple[Path, Any], lend: Callable[..., LLM]) -> None:
    """Twice the text takes as many tokens more as it has, give or take a block for each of the eight prompts."""
    llm = lend(model[0], dtype="float32", kv_cache_memory_bytes=2**24)
    asked = [{"type": "predicate", "instructions": f"The system says {i}."} for i in range(8)]
    computed: list[int] = []
    for text in (TEXT, TEXT * 2):
        before = llm.statistics()
        llm.decide(text, asked)
        after = llm.statistics()
        more = {name: after[name] - before[name] for name in ("prompt_tokens", "prefix_cache_hit_tokens")}
        computed.append(more["prompt_tokens"] - more["prefix_cache_hit_tokens"])
        assert llm.reset_prefix_cache()
    num_more = len(llm._text_in.encode(TEXT, add_special_tokens=False))
    assert abs(computed[1] - computed[0] - num_more) <= 8 * 16 < num_more
