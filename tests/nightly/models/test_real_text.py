"""A trained model, SmolLM2-135M-Instruct: what a server answers equals what transformers generates, and makes sense."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import Served
from smollm2 import GGUF, NotFetched, fetch_smollm2

pytestmark = pytest.mark.slow

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three colours.",
    "What is 2 + 2?",
    "Translate 'good morning' into French.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "Explain gravity to a child.",
)
MORE_QUESTIONS = (
    "Name a fruit that is yellow.",
    "What is the largest planet?",
    "Write a haiku about rain.",
    "How many days are in a week?",
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
    "Count from 1 to 10.",
    "What is the opposite of hot?",
    "Summarise the story of Cinderella.",
    "What does a baker do?",
    "Convert 100 centimetres to metres.",
    "Give three tips for sleeping well.",
)
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return fetch_smollm2(tmp_path_factory.mktemp("smollm2"))
    except NotFetched as error:
        pytest.skip(f"SmolLM2 is not available: {error}")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Iterator[tuple[Any, Any]]:
    """transformers' model in float32, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    yield AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


def _answers(url: str, questions: tuple[str, ...], **fields: Any) -> list[Any]:
    def ask(question: str) -> Any:
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0.0, "max_tokens": NUM_TOKENS}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body | fields, timeout=600)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return [ask(question) for question in questions]


def _expected(reference: tuple[Any, Any], question: str) -> tuple[list[int], list[int], list[float]]:
    """Return transformers' prompt tokens, greedy tokens, and log probabilities of the latter."""
    import torch

    model, tokenizer = reference
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            temperature=None,
            top_p=None,
            top_k=None,
        )
        scores = model(out).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    generated = out[0, len(prompt) :]
    return prompt, generated.tolist(), scores.gather(1, generated[:, None])[:, 0].tolist()


def test_float32_answers_equal_transformers(folder: Path, reference: tuple[Any, Any]) -> None:
    tokenizer = reference[1]
    server = Served(str(folder), "--dtype", "float32", "--max-model-len", "2048")
    try:
        answers = _answers(server.url, QUESTIONS, logprobs=True)
    finally:
        server.stop()
    for question, answer in zip(QUESTIONS, answers, strict=True):
        prompt, tokens, logprobs = _expected(reference, question)
        (choice,) = answer["choices"]
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert choice["message"]["content"] == tokenizer.decode(tokens, skip_special_tokens=True), question
        own = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert own == pytest.approx(logprobs[: len(own)], abs=1e-3)


def test_the_gguf_file_answers_as_its_dequantised_model(folder: Path, reference: tuple[Any, Any]) -> None:
    """Weights, tokenizer and chat template from the file, against transformers' dequantised model in float32."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder.parent / "float32").eval(), reference[1]
    server = Served(str(folder.parent / GGUF), "--dtype", "float32", "--max-model-len", "2048")
    try:
        (named,) = httpx.get(f"{server.url}/v1/models", timeout=10).json()["data"]
        answers = _answers(server.url, QUESTIONS + MORE_QUESTIONS)
    finally:
        server.stop()
    assert named["id"] == "SmolLM2-135M-Instruct.Q4_1"
    for question, answer in zip(QUESTIONS + MORE_QUESTIONS, answers, strict=True):
        _, tokens, _ = _expected((model, tokenizer), question)
        assert answer["choices"][0]["message"]["content"] == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("deterministic", [False, True])
def test_bfloat16_knows_the_capital_of_france(folder: Path, deterministic: bool) -> None:
    """Logits rounded to bfloat16 tied, and the answer was nonsense."""
    server = Served(str(folder), "--dtype", "bfloat16", "--max-model-len", "2048", *["--deterministic"] * deterministic)
    try:
        (answer,) = _answers(server.url, QUESTIONS[:1], logprobs=True, top_logprobs=5)
        completion = httpx.post(
            f"{server.url}/v1/completions",
            json={"prompt": "The capital of France is", "temperature": 0.0, "max_tokens": 8},
            timeout=120,
        ).json()
    finally:
        server.stop()
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert "Paris" in completion["choices"][0]["text"]
    best = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]
    # Logits of this size that are rounded to bfloat16 are multiples of 1/16.
    gaps = [16 * (best[0] - other) for other in best[1:]]
    assert max(abs(gap - round(gap)) for gap in gaps) > 0.01
