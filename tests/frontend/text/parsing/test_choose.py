"""The format of a checkpoint, and what its chat template wrote of the answer."""

from typing import Any

import pytest

from quire.frontend.text.parsing.answer_parser import AnswerParser, CallDelta, Content, Thought
from quire.frontend.text.parsing.choose_format import AnswerFormat, choose_format
from quire.protocol.errors import ConfigError

MARKERS = ("<think>", "</think>")
OWN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "[THINK]", "close": "[/THINK]"},
        "tool_calls": {
            "open_pattern": r"\[CALL\](?P<name>\w+)",
            "close": "[END]",
            "repeats": True,
            "content": "kv-lines",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
    },
}


def chosen(template: str = "", own: Any = None, **names: Any) -> AnswerFormat:
    form = choose_format({1: "<|channel|>", 2: "<|im_end|>", 3: "<|other|>"}, template, own, **names)
    assert form is not None
    return form


def test_plain_text_without_markers_and_calls() -> None:
    assert choose_format({}, "{{ messages }}", None) is None
    assert choose_format({}, "<tool_call>", None, calls="none", thoughts="none", markers=MARKERS) is None
    assert chosen("<tool_call>").without_calls is None
    assert chosen("{{ messages }}", markers=MARKERS).without_calls is not None


def test_named_formats_come_before_the_recognized_ones() -> None:
    form = chosen("<tool_call>", calls="mistral")
    assert AnswerParser(form.whole).push("[TOOL_CALLS]f[ARGS]{}")[0] == CallDelta(0, "f", "{}")
    assert choose_format({}, "<tool_call>", None, calls="none") is None


def test_own_template() -> None:
    form = chosen("<tool_call>", OWN)
    text = "[THINK] hm\n[/THINK]Hi \n[CALL]f\nplace: Rome\nday: 2\n[END]<|im_end|>"
    parser = AnswerParser(form.whole)
    events = [event for char in text for event in parser.push(char)] + parser.finish()
    assert "".join(event.text for event in events if isinstance(event, Thought)) == "hm"
    assert "".join(event.text for event in events if isinstance(event, Content)) == "Hi"
    assert events[-1] == CallDelta(0, "f", '{"place": "Rome", "day": "2"}')
    assert form.special_ids == {2}


def test_own_template_that_cannot_be_used() -> None:
    with pytest.raises(ConfigError, match=r"response_template in tokenizer_config\.json\.fields\.a"):
        chosen("", {"fields": {"a": {"open_pattern": "^x"}}})


def test_special_tokens_of_the_delimiters() -> None:
    assert chosen("<|channel|><|message|>").special_ids == {1}
    assert chosen("<tool_call>").special_ids == frozenset()


@pytest.mark.parametrize(
    ("end", "prefix"),
    [
        ("assistant\n<think>\n", "<think>\n"),
        ("assistant\n<think>", "<think>"),
        ("assistant\n<think>\n\n</think>\n\n", ""),
        ("write <think> first. assistant\n", ""),
        ("<think> </think> assistant\n<think>\n", "<think>\n"),
        ("", ""),
    ],
)
def test_prefix(end: str, prefix: str) -> None:
    assert chosen("", markers=MARKERS).prefix(end) == prefix
