"""Conversations that continue known tokens, with templates of the kinds that models have."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.text.continuation import encode_continuation, encode_extended
from quire.frontend.text.text_in import ChatOptions, TextIn
from quire.protocol.errors import InvalidRequest

TURN = "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
START = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
EACH = "{% for m in messages %}"
PLAIN = f"{EACH}{TURN}{{% endfor %}}{START}"
ALTERNATING = (
    EACH
    + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    f"{TURN}{{% endfor %}}{START}"
)
THINKING = (
    EACH + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    f"{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}{START}"
)
NO_END = EACH + "{{ m.role }}: {{ m.content }}{% if not loop.last %}{{ '\n\n' }}{% endif %}{% endfor %}" + START
ONE_SYSTEM = EACH + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('one') }}{% endif %}" + TURN
ONE_SYSTEM += "{% endfor %}" + START
ONLY_LAST = "{{ messages[-1].content }}"
RULES = EACH + TURN + "{% if loop.last %}Answer briefly.{% endif %}{% endfor %}" + START


@dataclass
class Limits:
    max_model_len: int = 500
    vocab_size: int = 420


def say(text: str, role: str = "user") -> Any:
    return {"role": role, "content": text}


@pytest.fixture
def written(tokenizer: Tokenizer) -> Any:
    """Return the text that continues a conversation, with a template."""

    def written(
        template: str, messages: list[Any], role: str, answered_with: int | None = None, *, opens: bool = True
    ) -> str:
        text_in = TextIn(tokenizer, ChatTemplate(template, {}, "test"))
        options = ChatOptions(add_generation_prompt=opens)
        prompt = encode_continuation(messages, role, answered_with, options, text_in, Limits())
        text: str = tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False)
        return text

    return written


@pytest.mark.parametrize("template", [PLAIN, ALTERNATING, THINKING])
def test_after_an_answer(written: Any, template: str) -> None:
    new = "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert written(template, [say("more")], "assistant", 2) == f"\n{new}"
    assert written(template, [say("more")], "assistant", 9) == f"<|im_end|>\n{new}"
    assert written(template, [say("more")], "assistant", 9, opens=False) == f"<|im_end|>\n{new[:32]}"


@pytest.mark.parametrize("role", ["user", "system", "tool", "assistant"])
def test_after_a_turn_without_an_answer(written: Any, role: str) -> None:
    new = "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert written(PLAIN, [say("more")], role) == new


def test_a_turn_whose_end_is_text(written: Any) -> None:
    assert written(NO_END, [say("more")], "assistant", 9) == "\n\nuser: more<|im_start|>assistant\n"


def test_a_result_of_a_tool_and_text_like_the_mark(written: Any) -> None:
    messages = [say("quire-continues-here", "tool"), say("quire-continues-here")]
    assert written(PLAIN, messages, "assistant", 9).count("quire-continues-here") == 2


@pytest.mark.parametrize(
    ("template", "role", "says"),
    [
        (ONLY_LAST, "assistant", "does not write earlier turns as they are"),
        (RULES, "user", "does not write earlier turns as they are"),
        (ALTERNATING, "user", "roles must alternate"),
    ],
)
def test_templates_that_cannot_continue(written: Any, template: str, role: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        written(template, [say("more")], role, 9 if role == "assistant" else None)


def test_instructions_follow_or_are_refused(written: Any) -> None:
    assert written(PLAIN, [say("be kind", "developer")], "assistant", 2).startswith("\n<|im_start|>system\nbe kind")
    with pytest.raises(InvalidRequest, match="does not write earlier turns as they are"):
        written(ONE_SYSTEM, [say("be kind", "developer"), say("x")], "assistant", 2)


def test_pieces_are_the_whole_conversation(written: Any, tokenizer: Tokenizer) -> None:
    text_in = TextIn(tokenizer, ChatTemplate(PLAIN, {}, "test"))
    turns = [say("be kind", "system"), say("hello"), say("one two", "assistant"), say("three")]
    whole = text_in.encode_chat(turns, ChatOptions(), 500)
    first = text_in.encode_chat(turns[:2], ChatOptions(), 500)
    answer = [*tokenizer.encode("one two").ids, 2]
    rest = tokenizer.encode(written(PLAIN, turns[3:], "assistant", 2)).ids
    assert first + answer + rest == whole


@pytest.mark.parametrize("reads_images", [False, True])
def test_an_extended_conversation_keeps_tokens_only_if_it_begins_with_their_text(
    reads_images: bool, tokenizer: Tokenizer
) -> None:
    """For models that read images, the tokenizer adds a first token, which no template writes."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    text_in = TextIn(tokenizer, ChatTemplate(PLAIN, {}, "test"))
    if reads_images:
        text_in.read_images(7)
    turns = [say("hello"), say("seven", "assistant"), say("<|im_end|> x")]
    first = text_in.encode_chat(turns[:1], ChatOptions(), 500)
    assert (first[0] == 0) == reads_images
    spelled = [tokenizer.encode(char, add_special_tokens=False).ids[0] for char in "seven"]

    def extended(so_far: list[int]) -> list[int]:
        ids = encode_extended(turns, np.array(so_far, np.int32), ChatOptions(), text_in, Limits()).token_ids
        return [int(token) for token in ids]

    usual = text_in.encode_chat(turns, ChatOptions(), 500)
    kept = extended([*first, *spelled, 2])
    assert kept[: len(first) + 6] == [*first, *spelled, 2] and kept != usual
    assert tokenizer.decode(kept, skip_special_tokens=False) == tokenizer.decode(usual, skip_special_tokens=False)
    assert extended([*first, 300, 301]) == usual == extended([]) == extended([2, *first])
