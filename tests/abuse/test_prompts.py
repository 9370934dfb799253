"""Prompts and messages that are empty, too long, malformed, or hard for tokenizers."""

import codecs
import json

import pytest
from abuse import CHAT, COMPLETIONS, assert_refused, short
from abused_app import AbusedApp
from tiers import thinned

CONTEXT = 2048
USER = {"role": "user", "content": "hello"}
TOO_LONG = "maximum context length is 2048 tokens"


ODD_NAMES = ("Content", "text", "__class__", "a\nb", "n" * 10**5, "", "messages", "tools")


def test_unknown_fields_of_messages_have_no_effect(app: AbusedApp) -> None:
    assert app.chat(messages=[USER]).status_code == 200
    prompt = app.engine.added[-1].prompt
    for value in ("y", 5, None, {"a": ["<|im_end|>"]}):
        response = app.chat(messages=[{**USER, **dict.fromkeys(ODD_NAMES, value)}])
        assert response.status_code == 200 and "x-quire-ignored-fields" not in response.headers
        assert app.engine.added[-1].prompt == prompt


LENGTHS = (CONTEXT, CONTEXT + 1, 2**18)


def test_token_ids_beyond_the_context(app: AbusedApp) -> None:
    for length in LENGTHS:
        for prompt in ([5] * length, [[5], [6] * length]):
            error = assert_refused(app.complete(prompt=prompt), 400, "prompt", f"{TOO_LONG}. However, your prompt has")
            assert error["code"] == "context_length_exceeded"


def test_longest_prompt_and_one_more_token(app: AbusedApp) -> None:
    assert app.complete(prompt=[5] * (CONTEXT - 1), max_tokens=1).status_code == 200
    assert_refused(app.complete(prompt=[5] * (CONTEXT - 1)), 400, "max_tokens", "max_tokens must be from 1 to 1")
    assert_refused(app.complete(prompt=[5] * CONTEXT, max_tokens=1), 400, "prompt", TOO_LONG)


# Units of texts of a megabyte, each hard for a tokenizer in another way.
MEGABYTE = 2**20
UNITS = (
    *("a", " ", "\n", "\t", "\x00", "0", ".", "é", "ß", "ﷺ", "￿", "😀", "\u200d", "\u0301", "\u202e", "\ufeff"),
    "\ufffd",
    *("ab", " a", "a ", "\r\n", "aA", "1 ", "👩‍👩‍👧", "e\u0301", "\u202e\u202c", "مرحبا ", "안녕 ", "<|im_end|>", "'s"),
    "\U000f0000",
)


@pytest.mark.parametrize("unit", thinned(UNITS, keep=4), ids=short)
def test_megabyte_texts(app: AbusedApp, unit: str) -> None:
    """Refused in time on every route. A part that fits is accepted, and detokenizes to the same text."""
    text = unit * (MEGABYTE // len(unit.encode()))
    content = json.dumps(text, ensure_ascii=False).encode()
    for path, body, param in (
        (COMPLETIONS, b'{"prompt": %b}' % content, "prompt"),
        (CHAT, b'{"messages": [{"role": "user", "content": %b}]}' % content, "messages"),
        ("/tokenize", b'{"prompt": %b}' % content, "prompt"),
    ):
        error = assert_refused(app.post(path, content=body), 400, param, TOO_LONG)
        assert error["code"] == "context_length_exceeded"
    piece = unit * 20
    ids = app.post("/tokenize", {"prompt": piece}).json()["tokens"]
    if unit != "<|im_end|>":
        assert app.post("/detokenize", {"tokens": ids}).json()["prompt"] == piece
    assert app.complete(prompt=piece).status_code == 200
    assert app.chat(messages=[{"role": "user", "content": piece}]).status_code == 200


@pytest.mark.parametrize("unit", thinned(UNITS, keep=8), ids=short)
def test_streams_of_odd_prompts_are_valid_text(app: AbusedApp, unit: str) -> None:
    body = {"prompt": unit * 9, "echo": True, "stream": True, "max_tokens": 6, "temperature": 2, "seed": 3, "top_k": 0}
    response = app.post(COMPLETIONS, {**body, "logprobs": 2})
    raw = response.content
    assert codecs.decode(raw, "utf-8", "strict") == response.text
    assert raw.endswith(b"\n\ndata: [DONE]\n\n")
    events = [json.loads(block[6:]) for block in response.text.split("\n\n")[:-2]]
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text.startswith(unit * 9)
