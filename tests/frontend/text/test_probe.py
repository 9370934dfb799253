"""What a chat template loses of requests: small templates with the demands of real ones, and the real ones."""

import contextlib
import re
from collections.abc import Mapping
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.text.message_checks import check_messages
from quire.frontend.text.parsing.choose_format import choose_format
from quire.frontend.text.probe import Probe, probe
from quire.frontend.text.text_in import ChatOptions, TextIn
from quire.protocol.errors import InvalidRequest

TAGS = re.compile(r"<[|｜][^<>\s'\"{}]+>|<[^<>\s'\"{}]+[|｜]>|<(?:start|end)_of_turn>|\[/?[A-Z_]+\]")
MARKS = re.compile("[\ue0f0\ue0f1]")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
MARKERS = ("<think>", "</think>")
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
CALL = '{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}'
CALL_OF_TEXT = """{{ '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments + '}' }}"""
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>" + CALL + "</tool_call>{% endfor %}"
THOUGHTS = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
CONTENT = "<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
TURN = CONTENT + THOUGHTS


def loop(turn: str, before: str = "") -> str:
    """Return a template that writes ``turn`` for each message ``m``, and opens an answer."""
    opening = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    return f"{TOOLS}{before}{{% for m in messages %}}{turn}<|im_end|>\n{{% endfor %}}{opening}"


def refuses(condition: str, text: str) -> str:
    return f"{{% if {condition} %}}{{{{ raise_exception('{text}') }}}}{{% endif %}}"


class Spy(ChatTemplate):
    """Keeps what is rendered, in the form that the template gets."""

    def __init__(self, source: str) -> None:
        super().__init__(source, SPECIAL, "test")
        self.seen: list[tuple[Mapping[str, Any], str | None]] = []

    def _run(self, values: Mapping[str, Any], max_chars: int) -> str:
        self.seen.append((values, None))
        text = super()._run(values, max_chars)
        self.seen[-1] = (values, text)
        return text


def probed(source: str) -> tuple[Probe, TextIn, Spy]:
    """Probe a template with a tokenizer that has its tags as special tokens."""
    tokenizer = Tokenizer(
        models.BPE({char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(tag) for tag in (*SPECIAL.values(), *sorted({*TAGS.findall(source)}))])
    tokenizer.add_tokens([AddedToken(tag) for tag in MARKERS])
    spy = Spy(source)
    text_in = TextIn(tokenizer, spy)
    text_in.protect(MARKERS)
    form = choose_format(text_in.special_tokens, source, None, markers=MARKERS)
    return probe(text_in, form), text_in, spy


LEAVES, REFUSES = "the chat template leaves out ", "the chat template refuses "
UNREAD = "tool calls of this chat template cannot be read"
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "everything": (loop(TURN + CALLS), [], []),
    "no developer": (loop("{% if m.role != 'developer' %}" + TURN + CALLS + "{% endif %}"), [], []),
    "no instructions": (
        loop("{% if m.role in ('user', 'assistant', 'tool') %}" + TURN + CALLS + "{% endif %}"),
        [LEAVES + "system messages, developer messages"],
        [],
    ),
    "instructions only before an answer to a user": (
        loop("{% if m.role != 'system' or messages[-1].role == 'user' %}" + TURN + CALLS + "{% endif %}"),
        [LEAVES + "system messages, developer messages in a conversation with everything in it"],
        [],
    ),
    "refuses system": (
        loop(refuses("m.role == 'system'", "System role not supported") + TURN + CALLS),
        [REFUSES + "system messages, developer messages: System role not supported"],
        [],
    ),
    "one system message": (
        loop(refuses("m.role in ('system', 'developer') and not loop.first", "only one") + TURN + CALLS),
        [],
        [],
    ),
    "only the last message": (
        "{{ messages[-1].content }}",
        [LEAVES + "system messages, developer messages, assistant messages, offered tools, tool calls", LEAVES],
        [],
    ),
    "no tools": (loop(TURN).removeprefix(TOOLS), [LEAVES + "offered tools, tool calls"], []),
    "refuses results": (
        loop(refuses("m.role == 'tool'", "no such role") + TURN + CALLS),
        [REFUSES + "tool calls, tool messages: no such role"],
        [],
    ),
    "one call only": (
        loop(refuses("(m.tool_calls or []) | length > 1", "one at once") + TURN + CALLS),
        [REFUSES + "several calls in one answer: one at once"],
        [],
    ),
    "ids of nine letters": (
        loop(refuses("m.tool_calls and m.tool_calls[0].id | length != 9", "Tool call IDs") + TURN + CALLS),
        [],
        [],
    ),
    "calls only without content": (
        loop(TURN + "{% if m.content is none %}" + CALLS + "{% endif %}"),
        [],
        [],
    ),
    "arguments as text": (
        loop(TURN + CALLS.replace(CALL, CALL_OF_TEXT)),
        [],
        [],
    ),
    "an unknown format": (loop(TURN + CALLS.replace("tool_call>", "invoke>")), [UNREAD], []),
    "another format than it seems": (
        loop(TURN + CALLS.replace("<tool_call>", "<invoke>") + "{# <tool_call> #}"),
        ["format hermes does not read tool calls as"],
        [],
    ),
    "no thoughts": (loop(CONTENT + CALLS), [], ["assistant messages and tool calls"]),
    "later thoughts": (
        loop(CONTENT + "{% if m.tool_calls %}" + THOUGHTS + "{% endif %}" + CALLS),
        [],
        ["assistant messages"],
    ),
    "nothing": (refuses("true", "no"), [REFUSES + "user messages: no"], []),
}


@pytest.mark.parametrize("name", CASES)
def test_losses(name: str) -> None:
    source, losses, notes = CASES[name]
    found, *_ = probed(source)
    assert [line[: len(start)] for line, start in zip(found.losses, losses, strict=True)] == losses, found.losses
    assert list(found.notes) == [LEAVES + "thoughts in earlier " + note for note in notes]


def test_images_are_tried_if_the_model_reads_them() -> None:
    parts = "{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}"
    writes = "{% if m.content is string or m.content is none %}" + TURN + "{% else %}" + parts + "{% endif %}" + CALLS
    for source, lost in ((loop(writes), []), (loop(TURN + CALLS), [LEAVES + "images"])):
        text_in = TextIn(Tokenizer(models.BPE()), ChatTemplate(source, SPECIAL, "test"))
        assert probe(text_in, None).losses[:-1] == [], "a line about calls is the last one"
        text_in.image_token_id = 7
        assert probe(text_in, None).losses[:-1] == lost


TEXTS = {"zqsystem": "system messages", "zqdeveloper": "developer messages", "zqanswer": "assistant messages"}
TEXTS |= {"zqabout": "offered tools", "zqargument1": "tool calls", "zqargument2": "calls", "zqresult1": "tool messages"}
TEXTS |= {"zqthought1": "messages", "zqthought2": "calls", "zqpart1": "user messages", "zqpart2": "user messages"}
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nso"}
THINKING = [[USER, ANSWER, USER], [USER, {**ANSWER, "content": "so", "reasoning_content": "\nwhy\n"}, USER]]


@pytest.mark.slow
def test_real_templates(real_templates: dict[str, str]) -> None:
    """Each renders as in transformers, and each text of a conversation is in the prompt or in a line."""
    from transformers.utils.chat_template_utils import render_jinja_template

    assert len(real_templates) > 60
    differ = []
    for name, source in sorted(real_templates.items()):
        found, text_in, spy = probed(source)
        lines = " ".join([*found.losses, *found.notes])
        print(name, *found.losses, *found.notes, sep="\n    ")
        for text, kind in TEXTS.items():
            assert text in found.rendered or kind in lines or "user messages" in lines, (name, text)
        seen = [({**values}, text) for values, text in spy.seen]
        for thoughts in map(check_messages, THINKING):
            with contextlib.suppress(InvalidRequest):
                text = MARKS.sub("", text_in.render_chat(thoughts, ChatOptions(), 10_000))
                seen.append(({**spy.seen[-1][0], "messages": thoughts, "tools": None}, text))
        for values, text in seen:
            given = {key: value for key, value in values.items() if key not in ("messages", "documents")}
            try:
                (expected,), _ = render_jinja_template([values["messages"]], chat_template=source, **given)
            except Exception:  # a template can raise any error
                expected = None
            if text != expected:
                differ.append((name, values["messages"], text, expected))
    assert not differ, differ[0]
