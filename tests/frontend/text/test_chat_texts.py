"""Texts that become messages: prompts as system messages, pairs, and truncation, beside transformers."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pooling_checkpoints import CHATML, JUDGE, TYPED, USERS_ONLY, save_chat_tokenizer
from tiers import thinned
from transformers import AutoTokenizer

from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.text.pooling.chat_texts import ChatText
from quire.frontend.text.pooling.inputs import InputEncoder, Truncation
from quire.frontend.text.pooling.pairs import PREFIX, TextPair
from quire.frontend.text.text_in import TextIn
from quire.protocol.errors import InvalidRequest
from quire.protocol.model.pooling_config import PoolingConfig

WORDS = ["the", "user", "and", "yes", "Straße", "你好", "don't", "3,141", "  ", "\n", "😀", "naïve.", "(x)"]
LONG = " ".join(random.Random(1).choices(WORDS, k=4000))


class Limits:
    max_model_len = 300
    vocab_size = 400


class InProcess(ChatTemplate):
    """A template without the process that renders it, which starts anew for each checkpoint."""

    def close(self) -> None:
        pass


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that returns an encoder with a template, and the tokenizer of transformers."""
    opened: list[TextIn] = []
    monkeypatch.setattr("quire.frontend.text.text_in.TemplateHelper", InProcess)

    def make(template: str, form: Any = "flat", limits: Any = None, **fields: Any) -> tuple[InputEncoder, Any]:
        save_chat_tokenizer(tmp_path, template)
        opened.append(TextIn.load(tmp_path))
        judges = {"label_token_ids": [5, 6]} if fields.pop("judges", False) else {}
        config = PoolingConfig(tasks=["embed"], size=8, message_format=form, **judges, **fields)
        return InputEncoder(opened[-1], limits or Limits(), config), AutoTokenizer.from_pretrained(tmp_path)

    yield make
    for each in opened:
        each.close()


def ids(encoder: InputEncoder, given: Any, truncation: Truncation = Truncation()) -> list[int]:  # noqa: B008
    return list(encoder.encode(given, truncation, "input[3]").token_ids.tolist())


def rendered(tokenizer: Any, *messages: tuple[str, Any], **more: Any) -> list[int]:
    chat = [{"role": role, "content": content} for role, content in messages]
    return list(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, **more)["input_ids"])


def test_prompts_are_system_messages(load: Any) -> None:
    encoder, reference = load(CHATML)
    for text in ("the user", " spaces ", "", "你好"):
        assert ids(encoder, ChatText(text)) == rendered(reference, ("user", text))
        wanted = rendered(reference, ("system", "Find:"), ("user", text))
        assert ids(encoder, ChatText(text, "Find:")) == wanted
    assert encoder.encode(ChatText("x", "y"), Truncation(), "input").text == "x"
    assert ids(encoder, [5, 6]) == [5, 6]
    assert ids(encoder, ChatText("a<|im_end|>")).count(2) == 1  # a special token in a text stays text


def test_structured_messages_and_variables(load: Any) -> None:
    encoder, reference = load(TYPED, "structured")
    assert ids(encoder, ChatText("the user")) == rendered(reference, ("user", [{"type": "text", "text": "the user"}]))
    encoder, reference = load(CHATML + "{{ mood }}", template_variables={"add_generation_prompt": True, "mood": "no"})
    wanted = rendered(reference, ("user", "x"), add_generation_prompt=True, mood="no")
    assert ids(encoder, ChatText("x")) == wanted


@pytest.mark.parametrize(
    ("most", "side"), thinned([(most, side) for most in (40, 41, 100, 300) for side in ("left", "right")], keep=3)
)
def test_truncation_cuts_the_text_only(most: int, side: Any, load: Any) -> None:
    encoder, reference = load(CHATML)
    seen: list[int] = []
    encoding, text_in = encoder.text_in.encoding, encoder.text_in
    text_in.encoding = lambda text, **more: seen.append(len(text)) or encoding(text, **more)  # type: ignore
    for text in (LONG, " " * 900 + LONG, LONG + " " * 900):
        whole = rendered(reference, ("system", "Find:"), ("user", text))
        before, after = encoder.chat.frame(1, "Find:")
        assert reference.decode(before) == "<|im_start|>system\nFind:<|im_end|>\n<|im_start|>user\n"
        assert reference.decode(after) == "<|im_end|>\n"
        found = ids(encoder, ChatText(text, "Find:"), Truncation(most, side))
        kept = [*whole[: most - len(after)], *after] if side == "right" else [*before, *whole[len(before) - most :]]
        assert found == kept and len(found) == most
    assert max(seen) < len(LONG) / 4
    assert ids(encoder, ChatText("the"), Truncation(most, side)) == ids(encoder, ChatText("the"))


def test_text_that_the_template_leaves_out(load: Any) -> None:
    """A template may write so little of a long text that the part of it that is read first is not enough."""
    encoder, reference = load("<|im_start|>{{ messages[0].content[-9:] }}<|im_end|>")
    assert ids(encoder, ChatText(LONG), Truncation(20)) == rendered(reference, ("user", LONG))


def test_pairs(load: Any) -> None:
    for judges in (True, False):
        encoder, reference = load(JUDGE, judges=judges)
        pair = ("query", "the user"), ("document", "yes")
        assert ids(encoder, TextPair("the user", "yes")) == rendered(reference, *pair)
        found = ids(encoder, TextPair("the user", "yes", "check"))
        assert found == rendered(reference, ("system", "check"), *pair)
        _, after = encoder.chat.frame(2, "")
        whole = rendered(reference, pair[0], ("document", LONG))
        found = ids(encoder, TextPair("the user", LONG), Truncation(200))
        assert found == [*whole[: 200 - len(after)], *after]
    encoder, reference = load(USERS_ONLY, judges=True, limits=type("", (), {"max_model_len": 900, "vocab_size": 400}))
    assert reference.decode(ids(encoder, TextPair("the user", "yes"))).startswith(PREFIX)
    encoder, reference = load(USERS_ONLY)
    assert ids(encoder, TextPair("the user", "yes", "check ")) == reference("check the user", "yes")["input_ids"]


def test_refusals(load: Any) -> None:
    encoder, _ = load(CHATML)
    with pytest.raises(InvalidRequest, match=r"input\[3\] has more than 300 tokens, and this model reads at most 300"):
        ids(encoder, ChatText(LONG))
    with pytest.raises(InvalidRequest, match=r"truncate_prompt_tokens must be at least \d+: \d+ tokens are in every"):
        ids(encoder, ChatText(LONG, "Find:"), Truncation(5))
    encoder, _ = load("{{ raise_exception('no system') if messages[0].role == 'system' }}" + CHATML)
    with pytest.raises(InvalidRequest, match=r"input\[3\]: the model's chat template refuses .*: no system") as error:
        ids(encoder, ChatText("x", "y"))
    assert error.value.param == "input[3]"
    encoder, _ = load("")
    with pytest.raises(InvalidRequest, match=r"input\[3\]: this model reads texts with its chat template, and it has"):
        ids(encoder, ChatText("x"))
