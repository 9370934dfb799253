"""Thoughts, content and calls in each format; texts that are not calls; the cost."""

import itertools
import json
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples, thinned

from quire.frontend.text.parsing.answer_parser import AnswerParser, CallDelta, CallDropped, Content, Event, Thought
from quire.frontend.text.parsing.formats import CALL_FORMATS, THOUGHT_FORMATS, recognized, template
from quire.frontend.text.parsing.templates import Format, load_format
from quire.protocol.errors import ConfigError
from tests.support.launch.answer_texts import answer_text, split

TOOLS = {"f": {"n": {"type": "integer"}, "s": {"type": "string"}}, "g": {}}


def form(name: str) -> Format:
    thoughts = name if name in THOUGHT_FORMATS else "markers"
    return load_format(template(name, thoughts, ("<think>", "</think>")), name)


FORMATS = {name: form(name) for name in CALL_FORMATS}


def parse(name: str | Format, pieces: list[str] | str, prefix: str = "") -> list[Event]:
    parser = AnswerParser(FORMATS[name] if isinstance(name, str) else name, TOOLS, prefix)
    events = [event for piece in ([pieces] if isinstance(pieces, str) else pieces) for event in parser.push(piece)]
    merged: list[Event] = []
    for event in [*events, *parser.finish()]:
        last = merged[-1] if merged else None
        if isinstance(event, Content | Thought) and type(last) is type(event):
            merged[-1] = type(event)(last.text + event.text)
        elif isinstance(event, CallDelta) and isinstance(last, CallDelta) and last.index == event.index:
            merged[-1] = CallDelta(last.index, last.name, last.arguments + event.arguments, last.id)
        else:
            merged.append(event)
    return merged


TWO = [CallDelta(0, "f", '{"n": 1}'), CallDelta(1, "g", "{}")]
EXAMPLES: dict[str, tuple[str, list[Event]]] = {
    "hermes": (
        '<think>\nhm\n</think>\n\nHi\n<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        [Thought("hm"), Content("Hi"), *TWO],
    ),
    "qwen3_coder": (
        "Hi\n<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>\n"
        "<function=g></function>",
        [Content("Hi"), *TWO],
    ),
    "glm45": (
        "<think>hm</think>Hi\n<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
        "<tool_call>g\n</tool_call>",
        [Thought("hm"), Content("Hi"), *TWO],
    ),
    "llama3_json": ('{"name": "f", "parameters": {"n": 1}}; {"name": "g", "parameters": {}}', [*TWO]),
    "mistral": ('Hi[TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]g[ARGS]{}', [Content("Hi"), *TWO]),
    "mistral_list": (
        '[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}}, {"name": "g", "arguments": {}}]',
        [*TWO],
    ),
    "harmony": (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Hi<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"n": 1}<|call|><|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>',
        [Thought("hm"), Content("Hi"), *TWO],
    ),
    "gemma4": (
        "<|channel>thought\nhm<channel|>Hi<|tool_call>call:f{n:1}<tool_call|><|tool_call>call:g{}<tool_call|>",
        [Thought("hm"), Content("Hi"), CallDelta(0, "f", '{"n":1}'), CallDelta(1, "g", "{}")],
    ),
    "deepseek_v3": (
        "Hi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"n": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [Content("Hi"), *TWO],
    ),
    "deepseek_v31": (
        'Hi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"n": 1}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [Content("Hi"), *TWO],
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    text, events = EXAMPLES[name]
    assert parse(name, text) == parse(name, list(text)) == events


@pytest.mark.parametrize("name", ["llama3_json", "mistral", "mistral_list"])
def test_result_does_not_depend_on_the_split(name: str) -> None:
    """test_transformers.py compares the other formats, split at random too."""

    @given(seed=st.integers(0, 2**32), cuts=st.integers(0, 2**32))
    @settings(max_examples=examples(40), deadline=None)
    def check(seed: int, cuts: int) -> None:
        text = answer_text(name, random.Random(seed))
        assert parse(name, split(text, random.Random(cuts))) == parse(name, text)

    check()


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_no_text_is_lost_without_markers(name: str) -> None:
    @given(st.text(alphabet='a<>|{}"[]:, \n\\', max_size=60))
    @settings(max_examples=examples(60), deadline=None)
    def check(text: str) -> None:
        said = "".join(event.text for event in parse(name, list(text)) if isinstance(event, Content))
        assert said == text

    check()


@pytest.mark.parametrize(
    "inside",
    [
        *("", "{", "x", '{"name": "f"', '{"name": "f", "arguments": {"n": }}', '{"name": 7, "arguments": {}}'),
        *('{"arguments": {}}', '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": {"n": NaN}}'),
        *('["f", {}]', '{"name": "f", "arguments": "{"}', "[" * 5000, '{"name": "", "arguments": {}}'),
        *('{"name": "f", "arguments": {}} x', '{"name": "f", "arguments": {}, "arguments": {"n": 2}}'),
    ],
)
def test_malformed_calls_are_text(inside: str) -> None:
    text = f"a\n<tool_call>\n{inside}\n</tool_call> b"
    events = parse("hermes", list(text))
    assert "".join(event.text for event in events if isinstance(event, Content)) == text
    calls = {event.index for event in events if isinstance(event, CallDelta)}
    assert calls == {event.index for event in events if isinstance(event, CallDropped)}


def test_a_damaged_call_does_not_change_the_next_one() -> None:
    text = '<tool_call>{"name": "f", "arguments": {x}}</tool_call><tool_call>{"name": "g"}</tool_call>'
    events = parse("hermes", text)
    assert events[1:] == [CallDropped(0), Content(text[: text.index("<tool_call>", 9)]), CallDelta(1, "g", "{}")]


@pytest.mark.parametrize("text", ["<tool_call>", '<tool_call>{"name": "f", "argum', "<tool_call>\n<function=f"])
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45"])
def test_a_call_that_never_ends_is_text(name: str, text: str) -> None:
    assert [event for event in parse(name, text) if isinstance(event, Content)] == [Content(text)]


def test_a_whole_call_needs_no_closing() -> None:
    assert parse("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1}}') == TWO[:1]


def test_arguments_are_reported_as_they_are_written() -> None:
    parser = AnswerParser(FORMATS["hermes"])
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == []
    assert parser.push('{"s": "lo') == [CallDelta(0, "f", '{"s": "lo')]
    assert parser.push("ng") == [CallDelta(0, None, "ng")]
    parser = AnswerParser(FORMATS["qwen3_coder"], TOOLS)
    assert parser.push("<function=f><parameter=s>\nlo") == [CallDelta(0, "f", '{"s": "lo')]
    assert parser.push('n"g') == [CallDelta(0, None, 'n\\"g')]


def test_the_id_that_the_model_wrote_is_reported() -> None:
    text = '[TOOL_CALLS]f[CALL_ID]abc123xyz[ARGS]{"n": 1}[TOOL_CALLS]g[ARGS]{}'
    calls = [CallDelta(0, "f", '{"n": 1}', "abc123xyz"), CallDelta(1, "g", "{}")]
    assert parse("mistral", text) == parse("mistral", list(text)) == calls


def test_tagged_arguments_have_the_types_of_the_schema() -> None:
    text = "<function=f><parameter=n>7</parameter><parameter=s>8</parameter><parameter=z>9</parameter></function>"
    (call,) = parse("qwen3_coder", text)
    assert isinstance(call, CallDelta)
    assert json.loads(call.arguments) == {"n": 7, "s": "8", "z": "9"}


def test_prefix_of_the_chat_template() -> None:
    assert parse("hermes", "hm</think>\n\nHi", prefix="<think>\n") == [Thought("hm"), Content("Hi")]
    assert parse("hermes", "Hi", prefix="<think>\n\n</think>\n\n") == [Content("Hi")]


def test_without_tools_calls_are_text() -> None:
    text = EXAMPLES["hermes"][0]
    assert parse(FORMATS["hermes"].without_calls(), text) == [Thought("hm"), Content(text[text.index("Hi") :])]


@pytest.mark.parametrize(
    "field",
    [
        *({"open": "a", "open_pattern": "b"}, {"open": ""}, {"open": []}, {"open_pattern": "(?i)a"}, {"close": "x"}),
        *({"open": "a", "content": "yaml"}, {"open": "a", "more": 1}, {"open": "a", "content": "xml-inline"}, 7),
        *({"open_pattern": "(?=a)b"}, {"open_pattern": r"\s*(?=a)", "close_pattern": r"\s*(?=a)"}),
    ],
)
def test_templates_that_are_refused(field: Any) -> None:
    with pytest.raises(ConfigError, match=r"fields\.tool_calls"):
        load_format({"fields": {"tool_calls": field}}, "here")


@pytest.mark.parametrize("value", [7, {}, {"fields": {}}, {"fields": {"a": {}, "b": {}}}, {"fields": 1}, {"x": 1}])
def test_values_that_are_no_templates(value: Any) -> None:
    with pytest.raises(ConfigError, match="here"):
        load_format(value, "here")


def test_recognized() -> None:
    assert recognized("... <tool_call> ...") == "hermes"
    assert recognized("... <tool_call> <function= ...") == "qwen3_coder"
    assert recognized("{{ messages }}") == ""


HOSTILE = (" ", "\n", "<", "<tool_call>", "<function=f>", "<parameter=a>", "{", "[", '"', "\\", "</", '{"name":')
HOSTILE += ("<think><tool_call></tool_call>",)


@pytest.mark.parametrize(
    ("name", "unit"),
    thinned(itertools.product(("hermes", "qwen3_coder", "llama3_json", "gemma4"), HOSTILE), keep=6),
)
def test_time_grows_with_the_text_only(name: str, unit: str) -> None:
    start = "<function=f>" if name == "qwen3_coder" and unit.startswith("<p") else ""
    begin = time.process_time()
    parse(name, start + unit * (40_000 // len(unit)))
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    ("name", "start", "unit"),
    [("functionary_v31", "<function=f>{", "\n"), ("gemma4", "<|tool_call>call:f{", "a")],
)
def test_each_text_held_back_is_read_once(name: str, start: str, unit: str) -> None:
    begin = time.process_time()
    parse(name, [start, *([unit * 2] * 20_000)])
    assert time.process_time() - begin < 2


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_cost_of_a_token(name: str) -> None:
    """At most 20 us a token of three characters, over thoughts, content and a call with a long argument."""
    prose = 'The quick brown fox jumps over the "lazy" dog (x < y), then stops.\n\n' * 60
    call = EXAMPLES[name][0].replace("1", json.dumps(prose), 1)
    text = prose + call
    tokens = [text[at : at + 3] for at in range(0, len(text), 3)]
    costs = []
    for _ in range(5):
        begin = time.process_time()
        parser = AnswerParser(FORMATS[name], TOOLS)
        for token in tokens:
            parser.push(token)
        parser.finish()
        costs.append((time.process_time() - begin) / len(tokens) * 1e6)
    print(f"{name}: {min(costs):.1f} us a token")
    assert min(costs) <= 20
