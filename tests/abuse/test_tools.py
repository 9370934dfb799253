"""Malicious tools, and outputs that are slow to parse."""

import itertools
import time
from typing import Any

import pytest
from abuse import MESSAGES, assert_refused, check_error
from abused_app import AbusedApp

from quire.frontend.http.routes.tool_calls import AnyCalls, NamedCall, RequiredCalls
from quire.frontend.http.schema.tools import ToolUse
from quire.protocol.request.structured_outputs import StructuredOutputs


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def with_parameters(**parameters: Any) -> dict[str, Any]:
    return tool(parameters=parameters)


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"properties": {"a": value}}
    return value


BAD_PARAMETERS: list[dict[str, Any]] = [
    *(with_parameters(type=kind) for kind in (7, ["string", 7], True, 1.5)),
    *(with_parameters(properties={"a": {"type": kind}}) for kind in (7, [7], False)),
    *(with_parameters(properties={"a": {"pattern": text}}) for text in ("(?R)", "a" * 9000, "a\\", "(?1)", "(?&x)")),
    *(with_parameters(properties={"a": {"$ref": to}}) for to in ("http://x/y", "file:///etc/passwd", "x.json")),
    with_parameters(properties={f"p{i}": {} for i in range(5000)}),
    with_parameters(properties={f"p{i}": {} for i in range(900)}),
    with_parameters(patternProperties={f"^a{i}": {} for i in range(200)}),
    with_parameters(properties={"a": {"const": "a" * 10_000}}),
    with_parameters(properties={"a": {"enum": ["a" * 10_000]}}),
    with_parameters(properties={"a": {"multipleOf": 0}}),
    tool(parameters=deep(60)),
    tool(parameters={"x-guidance": {}}),
]
ONLY_DEMANDED: list[dict[str, Any]] = [
    *(with_parameters(properties={"a": {"pattern": text}}, required=["a"]) for text in ("[", "(?=a)b", "(", "*")),
    *(
        with_parameters(properties={"a": schema}, required=["a"])
        for schema in ({"$ref": "#/q"}, {"not": {}}, {"enum": []})
    ),
    with_parameters(type="object", required=["a"], additionalProperties=False),
    with_parameters(type="foo"),
]


REQUIRED_CHOICES: tuple[Any, ...] = ("required", {"type": "function", "function": {"name": "f"}})


def test_invalid_parameters(app: AbusedApp) -> None:
    """The error does not depend on whether a call is required."""
    for given, choice in zip(BAD_PARAMETERS, itertools.cycle((None, "none", *REQUIRED_CHOICES)), strict=False):
        error = assert_refused(app.chat(tools=[given], tool_choice=choice), 400)
        assert error["param"].startswith(("tools", "structured_outputs"))


def test_unsatisfiable_parameters(app: AbusedApp) -> None:
    for given, choice in zip(ONLY_DEMANDED, itertools.cycle(REQUIRED_CHOICES), strict=False):
        assert_refused(app.chat(tools=[given], tool_choice=choice), 400)


# ---- outputs


N = 50_000
TEXTS = {
    "nothing but quotes": '"' * N,
    "nothing but backslashes": "\\" * N,
    "a string without an end": '[{"name": "' + "x" * N,
    "a name without an end": '[{"' + "x" * N,
    "escapes": '[{"name": "f", "parameters": {"a": "' + '\\"' * (N // 2),
    "brackets": '[{"name": "f", "parameters": ' + "[" * N,
    "braces": '[{"name": "f", "parameters": ' + '{"a":' * (N // 5),
    "closing braces": "}" * N,
    "opening braces": "{" * N,
    "empty calls": "{}," * (N // 3),
    "calls": '{"name":"f","parameters":{}},' * (N // 29),
    "calls in calls": '{"name":{"name":' * (N // 16),
    "colons": ":" * N,
    "commas in a call": "{" + "," * N,
    "blanks": " " * N,
    "blanks before a value": '[{"name":' + " " * N,
    "keys": "{" + '"name":' * (N // 7),
    "names": "{" + '"name":"f",' * (N // 11),
    "numbers": '[{"name": ' + "1" * N,
    "text": "the quick brown fox " * (N // 20),
    "almost the marker": "</thin" * (N // 6),
    "almost the marker, again": "<" * N,
    "the marker over and over": "</think>" * (N // 8),
    "surrogates": '[{"name": "' + "\\ud800" * (N // 6),
}


@pytest.mark.parametrize("size", [pytest.param(3, marks=pytest.mark.full), N])
@pytest.mark.parametrize("case", TEXTS)
def test_call_parsing_takes_linear_time(case: str, size: int) -> None:
    """50 KB take much less than a second, in parts of any size."""
    text = TEXTS[case]
    use = ToolUse(None, StructuredOutputs(json_object=True))
    for end in ("", "</think>"):
        parser, num_chars = RequiredCalls(use, end), 0
        began = time.process_time()
        for place in range(0, len(text), size):
            events = parser.push(text[place : place + size], last=place + size >= len(text))
            num_chars += sum(len(getattr(event, "arguments", getattr(event, "text", ""))) for event in events)
        assert time.process_time() - began < 1.0
        assert num_chars <= len(text)
    named = NamedCall("f")
    assert sum(len(delta.arguments) for delta in named.push(text)) == len(text)


class CountingText(str):
    """A str that counts the characters read from it."""

    def __iter__(self) -> Any:
        CountingText.taken += len(self)
        return super().__iter__()

    taken = 0


@pytest.mark.parametrize("case", TEXTS)
def test_each_character_is_read_once(case: str) -> None:
    CountingText.taken = 0
    AnyCalls().push(CountingText(TEXTS[case]))
    assert CountingText.taken <= N + 100


EARLIER: list[Any] = [
    *(7, "x", {}, [7], [None], ["x"]),
    *([{"function": {"name": "f", "arguments": text}}] for text in ("{" * 50_000, "[" * 50_000, '{"a":' * 50_000, "{")),
    *([{"function": {"name": "f", "arguments": value}}] for value in (7, [], {}, None, "NaN", '{"a": 1e999}', "\x00")),
    *([{"function": value}] for value in (7, [], "x", None)),
    *([{}], [{"id": "x" * 10**6}], [{"a": {"b": {"c": []}}}], [{"function": {}}] * 5000),
]


def test_earlier_calls_of_any_form(app: AbusedApp) -> None:
    for calls in EARLIER:
        messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": calls}, *MESSAGES]
        response = app.chat(messages=messages)
        assert response.status_code in (200, 400)
        assert response.status_code == 200 or check_error(response)["param"].startswith("messages")
