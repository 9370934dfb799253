"""The parser's result against transformers' ``ResponseParser``, for random answers in every format and random splits.

Where transformers raises an error, or its value is not a call (no object, a number that is not JSON, text beside the
tags of arguments), the text of the region must come back as content. Damaged answers are read otherwise than there:
a call ends unclosed thoughts, ends of tags may be missing, and only tools that were offered are called.
"""

import json
import random
import re
from typing import Any

import pytest
from tiers import examples
from transformers.utils.chat_parsing.response_parser import ResponseParser

from quire.frontend.text.parsing.answer_parser import AnswerParser, CallDelta, CallDropped, Content, Event, Thought
from quire.frontend.text.parsing.formats import THOUGHT_FORMATS, template
from quire.frontend.text.parsing.templates import load_format
from tests.support.launch.answer_texts import TOOLS, WRITERS, answer_text, split

Message = tuple[str, str, list[tuple[str, Any]]]
WITH_TYPES = ("glm45", "qwen3_coder")
"""Formats without types, whose arguments are read by the schemas of the tools."""


def template_of(name: str) -> dict[str, Any]:
    if name == "theirs":
        return THEIRS
    return template(name, name if name in THOUGHT_FORMATS else "markers", ("<think>", "</think>"))


class Oracle(ResponseParser):  # type: ignore[misc]
    """Keeps the text of a region that is not a call, instead of raising an error or losing it."""

    def __init__(self, spec: dict[str, Any], tools: list[dict[str, Any]] | None) -> None:
        self.parts: list[tuple[str, Any]] = []
        self._opening = self._closing = ""
        super().__init__(spec, prefix="", tools=tools)

    def _scan(self, watch: Any, eos: bool) -> Any:
        best, hold = super()._scan(watch, eos)
        self._closing = "" if best is None else best[2].group()
        return best, hold

    def _open_explicit(self, events: Any, field: Any, m: Any) -> None:
        self._opening = m.group()
        super()._open_explicit(events, field, m)

    def _close_current(self, events: Any) -> None:
        name, body, opened = self._current, self._body, self._opened
        text = f"{self._opening}{body}{self._closing}"
        try:
            super()._close_current(events)
        except (ValueError, KeyError):
            self._reset_to_implicit()
            self.parts.append(("content", text))
            return
        if not opened:
            return
        value = events[-1]["value"]
        if name == "tool_calls":
            calls = _calls(value, body, self._spec.fields[name])
            self.parts.append(("content", text) if calls is None else ("calls", calls))
        else:
            self.parts.append((name, value))


def _calls(value: Any, body: str, field: Any) -> list[tuple[str, Any]] | None:
    if field.content == "xml-inline" and re.sub(field.content_args["tag_pattern"], "", body, flags=re.DOTALL).strip():
        return None
    calls = []
    try:
        for each in value if isinstance(value, list) else [value]:
            function = each["function"]
            arguments = function.get("arguments", function.get("parameters", {}))
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            json.dumps(arguments, allow_nan=False)
            if not isinstance(arguments, dict) or not isinstance(function["name"], str) or not function["name"]:
                return None
            calls.append((function["name"], arguments))
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    return calls or None


def expected(name: str, text: str) -> Message:
    tools = [
        {"type": "function", "function": {"name": tool, "parameters": {"type": "object", "properties": properties}}}
        for tool, properties in TOOLS.items()
    ]
    oracle = Oracle(template_of(name), tools if name in WITH_TYPES else None)
    oracle.feed(text)
    oracle.finalize()
    thoughts = "\n".join(value for kind, value in oracle.parts if kind == "reasoning_content")
    content = "".join(value for kind, value in oracle.parts if kind == "content")
    return thoughts, content, [call for kind, calls in oracle.parts if kind == "calls" for call in calls]


def message(events: list[Event]) -> Message:
    """Return what a client has that reads the whole answer."""
    calls: dict[int, tuple[str, list[str]]] = {}
    for event in events:
        if isinstance(event, CallDropped):
            del calls[event.index]
        elif isinstance(event, CallDelta):
            if event.name is not None:
                assert event.index not in calls
                calls[event.index] = (event.name, [])
            calls[event.index][1].append(event.arguments)
    thoughts = "".join(event.text for event in events if isinstance(event, Thought))
    content = "".join(event.text for event in events if isinstance(event, Content))
    return thoughts, content, [(name, json.loads("".join(texts))) for name, texts in calls.values()]


def merged(events: list[Event]) -> list[Event]:
    """Return the events with neighbours of a kind joined."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, CallDelta) and isinstance(last, CallDelta) and event.index == last.index:
            out[-1] = CallDelta(last.index, last.name, last.arguments + event.arguments)
        elif isinstance(event, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + event.text)
        elif isinstance(event, Thought) and isinstance(last, Thought):
            out[-1] = Thought(last.text + event.text)
        else:
            out.append(event)
    return out


def parsed(name: str, pieces: list[str]) -> list[Event]:
    parser = AnswerParser(FORMATS[name], TOOLS)
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged([*events, *parser.finish()])


ENDS_WITH_VALUE = ("llama3_json", "mistral", "mistral_list")
"""Formats in which text after a call is content here, and the end of the call there."""
FORMATS = {name: load_format(template_of(name), name) for name in WRITERS if name not in ENDS_WITH_VALUE}
# Like those that transformers has for Qwen: stripped content, and a close that is the end of the text.
THEIRS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "repeats": True, "join": "\n"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close_pattern": r"(?:</tool_call>|\Z)",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "repeats": True, "join": ""},
    },
}
FORMATS["theirs"] = load_format(THEIRS, "theirs")


def compare(name: str, num_texts: int, num_splits: int, seed: int) -> None:
    rng = random.Random(f"{name} {seed}")
    for _ in range(num_texts):
        is_whole = rng.random() < 0.6
        text = answer_text("hermes" if name == "theirs" else name, rng, is_whole=is_whole)
        whole = parsed(name, [text])
        assert not is_whole or message(whole) == expected(name, text), text
        for _ in range(num_splits):
            pieces = split(text, rng)
            assert parsed(name, pieces) == whole, pieces


@pytest.mark.parametrize("name", FORMATS)
def test_some_texts(name: str) -> None:
    compare(name, examples(60), 2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_many_texts(name: str) -> None:
    compare(name, 1000, 50, 1)
