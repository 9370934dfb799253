"""Answers that are an object by a schema, or calls: what their grammar allows, and what the parser reads of it."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from grammar_cases import fits
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quire.frontend.text.parsing.answer_parser import AnswerParser, CallDelta, Content, Event, Thought
from quire.frontend.text.parsing.choose_format import AnswerFormat, choose_format
from quire.frontend.text.parsing.formats import CALL_FORMATS, THOUGHT_FORMATS, between_markers
from quire.frontend.text.parsing.writing import MAX_DEFINITIONS, WRITINGS
from quire.protocol.request.output_form import Form, schemas_in
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.scheduler_proc.structured.llguidance_backend import LLGuidanceBackend

TOOLS: dict[str, dict[str, Any]] = {
    "find": {
        "type": "object",
        "properties": {
            "place": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
        },
        "required": ["place"],
        "$defs": {"tag": {"type": "string", "maxLength": 3}},
    },
    "find_all": {"type": "object", "properties": {}, "additionalProperties": False},
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
ANSWER = {"name": "A <tool_call>", "age": 3}
FIND: dict[str, Any] = {"place": "Rome\nnorth", "days": 2, "unit": "C", "tags": ["x"]}
SPECIALS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|start|>",
    "<|end|>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<|channel>",
    "<channel|>",
    "<think>",
    "</think>",
]
MARKERS = ("<think>", "</think>")
NONE: Mapping[int, str] = {}

_TAGGED = "<parameter=place>\nRome\nnorth\n</parameter>\n<parameter=days>\n{days}\n</parameter>\n"
_TAGGED += '<parameter=unit>\nC\n</parameter>\n<parameter=tags>\n["x"]\n</parameter>\n'
_GLM = "<arg_key>place</arg_key>\n<arg_value>Rome\nnorth</arg_value>\n<arg_key>days</arg_key>\n<arg_value>{days}"
_GLM += "</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n"
_GLM += '<arg_key>tags</arg_key>\n<arg_value>["x"]</arg_value>\n'
_GEMMA = 'place:<|"|>Rome\nnorth<|"|>,days:2,unit:<|"|>C<|"|>,tags:[<|"|>x<|"|>]'

# The text before, between and after the calls, and that of a call of each tool. {find} are the arguments as JSON.
WRITTEN: dict[str, tuple[str, str, str, str, str]] = {
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{find}\n```<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>find_all\n```json\n{}\n```<｜tool▁call▁end｜>",
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜>",
        "",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>find<｜tool▁sep｜>{find}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>find_all<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    ),
    "gemma4": ("", "", "", f"<|tool_call>call:find{{{_GEMMA}}}<tool_call|>", "<|tool_call>call:find_all{}<tool_call|>"),
    "glm45": ("", "\n", "", f"<tool_call>find\n{_GLM}</tool_call>", "<tool_call>find_all\n</tool_call>"),
    "harmony": (
        "",
        "",
        "",
        "<|channel|>commentary to=functions.find <|constrain|>json<|message|>{find}",
        "<|channel|>commentary to=functions.find_all <|constrain|>json<|message|>{}",
    ),
    "hermes": (
        "",
        "\n",
        "",
        '<tool_call>\n{"name": "find", "arguments": {find}}\n</tool_call>',
        '<tool_call>\n{"name": "find_all", "arguments": {}}\n</tool_call>',
    ),
    "llama3_json": (
        "",
        "; ",
        "",
        '{"name": "find", "parameters": {find}}',
        '{"name": "find_all", "parameters": {}}',
    ),
    "mistral": ("", "", "", "[TOOL_CALLS]find[ARGS]{find}", "[TOOL_CALLS]find_all[ARGS]{}"),
    "mistral_list": (
        "[TOOL_CALLS][",
        ", ",
        "]",
        '{"name": "find", "arguments": {find}}',
        '{"name": "find_all", "arguments": {}}',
    ),
    "qwen3_coder": (
        "",
        "\n",
        "",
        f"<tool_call>\n<function=find>\n{_TAGGED}</function>\n</tool_call>",
        "<tool_call>\n<function=find_all>\n</function>\n</tool_call>",
    ),
}
UNCHECKED = "gemma4"
ONE_CALL = "harmony"


def chosen(name: str, specials: Mapping[int, str] = NONE) -> AnswerFormat:
    thoughts = name if name in THOUGHT_FORMATS else "markers"
    form = choose_format(specials, "", None, calls=name, thoughts=thoughts, markers=MARKERS)
    assert form is not None
    return form


def form_of(name: str, specials: Mapping[int, str] = NONE, *, parallel: bool = True) -> Form:
    writer = chosen(name, specials).writer
    assert writer is not None
    return writer.answer_or_calls(json.dumps(PERSON), TOOLS, parallel=parallel)


def calls_text(name: str, *names: str, days: str = "2") -> str:
    """Return calls as the model writes them."""
    before, between, after, find, find_all = WRITTEN[name]
    arguments = json.dumps(FIND).replace('"days": 2', f'"days": {days}')
    found = {"find": find.replace("{find}", arguments).replace("{days}", days), "find_all": find_all}
    return before + between.join(found[each] for each in names) + after


def answer_text(name: str) -> str:
    return ("<|channel|>final<|message|>" if name == "harmony" else "") + json.dumps(ANSWER)


def thought_text(name: str) -> str:
    return {
        "harmony": "<|channel|>analysis<|message|>Well {<|end|><|start|>assistant",
        "gemma4": "<|channel>thought\nWell {<channel|>",
    }.get(name, "<think>Well {</think>\n\n")


def read(name: str, text: str) -> list[Event]:
    """Return the events of a text in pieces of three characters."""
    parser = AnswerParser(
        chosen(name).whole, {key: tool["properties"] for key, tool in TOOLS.items()}, has_only_calls=True
    )
    events = [event for i in range(0, len(text), 3) for event in parser.push(text[i : i + 3])]
    return events + parser.finish()


def calls_in(events: list[Event]) -> list[tuple[str, Any]]:
    found: dict[int, tuple[str, str]] = {}
    for event in events:
        if isinstance(event, CallDelta):
            name, arguments = found.get(event.index, ("", ""))
            found[event.index] = (name + (event.name or ""), arguments + event.arguments)
    return [(name, json.loads(arguments)) for name, arguments in found.values()]


def said(events: list[Event], kind: type[Content] | type[Thought] = Content) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def test_every_writing_is_tested() -> None:
    assert WRITTEN.keys() == WRITINGS.keys() < CALL_FORMATS.keys()


@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_is_the_object_or_calls(name: str) -> None:
    form, thought = form_of(name), thought_text(name)
    answer, call = answer_text(name), calls_text(name, "find")
    assert fits(answer, form=form) and fits(thought + answer, form=form)
    assert fits(call, form=form) and fits(thought + call, form=form)
    assert fits(calls_text(name, "find", "find_all", "find"), form=form) == (name != ONE_CALL)
    assert not fits("I look it up.", form=form) and not fits(thought + "I look it up.", form=form)
    assert not fits(answer.replace("age", "years"), form=form)
    assert not fits(call.replace("find", "fund"), form=form)
    assert not fits(answer + call, form=form) and not fits(call + answer, form=form)
    assert fits(calls_text(name, "find", days='"two"'), form=form) == (name == UNCHECKED)


@pytest.mark.parametrize("name", WRITTEN)
def test_without_parallel_calls_there_is_one(name: str) -> None:
    form = form_of(name, parallel=False)
    assert fits(answer_text(name), form=form) and fits(calls_text(name, "find_all"), form=form)
    assert not fits(calls_text(name, "find", "find_all"), form=form)


@pytest.mark.parametrize("name", WRITTEN)
def test_without_tools_there_are_no_calls(name: str) -> None:
    writer = chosen(name).writer
    assert writer is not None and writer.content_is_bare == (name not in THOUGHT_FORMATS)
    form = writer.answer_or_calls(json.dumps(PERSON), {}, parallel=True)
    assert fits(answer_text(name), form=form) and fits(thought_text(name) + answer_text(name), form=form)
    assert not fits(calls_text(name, "find_all"), form=form)


@pytest.mark.parametrize("name", WRITTEN)
def test_the_parser_reads_the_writing(name: str) -> None:
    thought = thought_text(name)
    events = read(name, thought + calls_text(name, "find"))
    assert (said(events, Thought), said(events), calls_in(events)) == ("Well {", "", [("find", FIND)])
    if name != ONE_CALL:
        events = read(name, calls_text(name, "find_all", "find"))
        assert (said(events), calls_in(events)) == ("", [("find_all", {}), ("find", FIND)])
    events = read(name, thought + answer_text(name))
    assert (said(events, Thought), json.loads(said(events)), calls_in(events)) == ("Well {", ANSWER, [])


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_in_an_object_is_content(name: str) -> None:
    for text in (calls_text(name, "find_all"), '{"name": "find_all", "parameters": {}}'):
        value = {"text": [text], "other": {"name": "find_all", "parameters": {}}}
        prefix = "<|channel|>final<|message|>" if name == "harmony" else ""
        if name in ("harmony", "gemma4"):  # content cannot contain the headers of this format
            value["text"] = []
        events = read(name, prefix + json.dumps(value))
        assert (json.loads(said(events)), calls_in(events)) == (value, [])


def test_an_object_with_the_name_of_no_tool_is_content() -> None:
    for value in ({"name": "Ann", "age": 3}, {"name": "Ann", "parameters": {"a": 1}}):
        events = read("llama3_json", json.dumps(value))
        assert (json.loads(said(events)), calls_in(events)) == (value, [])


@pytest.fixture(scope="module")
def with_specials() -> tuple[Tokenizer, Any]:
    """Return a tokenizer of bytes and the delimiters of all formats, and its grammar library."""
    words = dict.fromkeys(["<end>", *SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in ["<end>", *SPECIALS]])
    return tokenizer, LLGuidanceBackend(tokenizer.to_str(), len(vocabulary), [0])


@pytest.mark.parametrize("name", WRITTEN)
def test_delimiters_may_be_special_tokens(with_specials: tuple[Tokenizer, Any], name: str) -> None:
    tokenizer, backend = with_specials
    form = form_of(name, dict(enumerate(SPECIALS, 1)))
    grammar = backend.compile(StructuredOutputs(form=form))

    def matches(text: str) -> bool:
        matcher = grammar.matcher()
        return all(map(matcher.accept, [*tokenizer.encode(text).ids, 0]))

    thought, answer, call = thought_text(name), answer_text(name).replace("<tool_call>", ""), calls_text(name, "find")
    assert matches(answer) and matches(thought + answer) and matches(call) and matches(thought + call)
    assert not matches("Well.") and not matches(answer + call) and not matches(call.replace("find", "fund"))


def test_definitions_are_not_copied_without_limit() -> None:
    item = {"type": "array", "items": {"$ref": "#/$defs/d"}}
    tool = {"properties": dict.fromkeys(map(str, range(1000)), item), "$defs": {"d": {"const": "x" * 8000}}}
    writer = chosen("qwen3_coder").writer
    assert writer is not None
    form = writer.answer_or_calls(json.dumps(PERSON), {"f": tool}, parallel=True)
    assert sum(map(len, schemas_in(form))) < 2 * MAX_DEFINITIONS


def test_a_template_that_reads_something_else_has_no_writer() -> None:
    fields = {"tool_calls": {"open": "<call>", "close": "</call>", "content": "json"}, "content": {"content": "text"}}
    own = {"fields": fields | {"reasoning_content": between_markers(*MARKERS)}}
    form = choose_format({}, "<tool_call>", own)
    assert form is not None and form.writer is None
    form = choose_format({}, "<tool_call>", own, calls="hermes")
    assert form is not None and form.writer is not None
    assert len(set(schemas_in(form_of("hermes")))) == 3
