"""How a model writes calls: the form of an answer that is either an object by a schema, or calls.

``formats.py`` says how calls are read, with patterns that allow what models write in practice. This is the one way in
which the model's chat template writes them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.frontend.text.parsing.answer_parser import AnswerParser, CallDelta, Event, Thought
from quire.frontend.text.parsing.templates import Format
from quire.frontend.text.parsing.values import schema_types
from quire.protocol.request.output_form import Form, FreeText, InOrder, Json, OneOf, Repeat, Special, Text

Schema = Mapping[str, Any]
MAX_DEFINITIONS = 64 * 1024
"""Bytes of the definitions in the schemas of all tagged arguments of a tool, each of which has its own copy."""
JSON, TAGS, ITEM, LIST, UNCHECKED = "json", "tags", "item", "list", "unchecked"


@dataclass(frozen=True, slots=True)
class Writing:
    """How one model writes an answer.

    Attributes:
        calls: text before the first call and after the last one.
        call: text before the name, between name and arguments, and after these.
        arguments: how they are written: as JSON, in tags, the whole call as one item or all calls as a list of JSON,
            or in a notation that is not checked.
        tag: for ``tags``, text before a key, between key and value, and after the value. For ``item`` and ``list``,
            the key of the arguments.
        separator: text between two calls; None if an answer has one.
        content: text before the content.
        thoughts: text before and after thoughts; None for the thinking markers, if there are any.
        next: text between thoughts and what follows them.
    """

    call: tuple[str, str, str] = ("", "", "")
    arguments: str = JSON
    tag: tuple[str, ...] = ()
    calls: tuple[str, str] = ("", "")
    separator: str | None = ""
    content: str = ""
    thoughts: tuple[str, str] | None = None
    next: str = ""


WRITINGS: Mapping[str, Writing] = {
    "deepseek_v3": Writing(
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
        calls=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        separator="\n",
    ),
    "deepseek_v31": Writing(
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        calls=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "gemma4": Writing(
        ("<|tool_call>call:", "{", "<tool_call|>"),
        UNCHECKED,
        ('<|"|>',),
        thoughts=("<|channel>thought\n", "<channel|>"),
    ),
    "glm45": Writing(
        ("<tool_call>", "\n", "</tool_call>"),
        TAGS,
        ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        separator="\n",
    ),
    # The token that ends a call ends the answer.
    "harmony": Writing(
        ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
        separator=None,
        content="<|channel|>final<|message|>",
        thoughts=("<|channel|>analysis<|message|>", "<|end|>"),
        next="<|start|>assistant",
    ),
    "hermes": Writing(
        ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
        separator="\n",
    ),
    "llama3_json": Writing(arguments=ITEM, tag=("parameters",), separator="; "),
    "mistral": Writing(("[TOOL_CALLS]", "[ARGS]", "")),
    "mistral_list": Writing(arguments=LIST, tag=("arguments",), calls=("[TOOL_CALLS]", "")),
    "qwen3_coder": Writing(
        ("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"),
        TAGS,
        ("<parameter=", ">\n", "\n</parameter>\n"),
        separator="\n",
    ),
}
"""By the names of ``formats.CALL_FORMATS``."""


@dataclass(frozen=True, slots=True)
class AnswerWriter:
    """Builder of forms for one model.

    Attributes:
        thoughts: text before and after the model's thoughts, or None.
        specials: ids of the special tokens by text; these texts stand for their tokens.
    """

    writing: Writing
    thoughts: tuple[str, str] | None
    specials: Mapping[str, int]

    @property
    def content_is_bare(self) -> bool:
        """Whether the content is the whole answer, but for thoughts between the thinking markers."""
        return self.writing.thoughts is None

    def answer_or_calls(self, schema: str, tools: Mapping[str, Schema], *, parallel: bool) -> Form:
        """Return the form of an answer that is content by ``schema``, or calls; thoughts may precede either.

        Args:
            tools: the schema of the arguments of each tool, by name. Without any, there are no calls.
            parallel: allow several calls.
        """
        form = _in_order([*self._fixed(self.writing.content), Json(schema)])
        if tools:
            form = OneOf([form, self.calls(tools, parallel=parallel)])
        if self.thoughts is None:
            return form
        before, after = self.thoughts
        thought = [*self._fixed(before), *self._free(after), *self._fixed(self.writing.next)]
        blank = [] if self.writing.thoughts else [Repeat(OneOf([Text("\n"), Text("\n\n")]), is_once=True)]
        return InOrder([Repeat(InOrder(thought), is_once=True), *blank, form])

    def calls(self, tools: Mapping[str, Schema], *, parallel: bool) -> Form:
        """Return the form of one or several calls."""
        writing = self.writing
        before, after = writing.calls
        parallel = parallel and writing.separator is not None
        if writing.arguments == LIST:
            listed = {"type": "array", "minItems": 1, **call_schema(tools, writing.tag[0], "items")}
            calls: list[Form] = [_json(listed if parallel else {**listed, "maxItems": 1})]
        else:
            call = self._any_call(tools)
            calls = [call]
            if parallel:
                calls.append(Repeat(_in_order([*self._fixed(writing.separator or ""), call])))
        return _in_order([*self._fixed(before), *calls, *self._fixed(after)])

    def _any_call(self, tools: Mapping[str, Schema]) -> Form:
        writing = self.writing
        if writing.arguments == ITEM:
            return _json(call_schema(tools, writing.tag[0]))
        before, between, after = writing.call
        calls: list[Form] = []
        for name, schema in tools.items():
            calls.append(_in_order([*self._fixed(before + name + between), *self._arguments(schema, after)]))
        return OneOf(calls)

    def _arguments(self, schema: Schema, after: str) -> list[Form]:
        match self.writing.arguments:
            case "tags":
                return [*self._tagged(schema), *self._fixed(after)]
            case "unchecked":
                quoted = [*self._free(self.writing.tag[0]), *self._free(self.writing.tag[0])]
                return [Repeat(_in_order(quoted)), *self._free(after)]
            case _:
                return [_json(schema), *self._fixed(after)]

    def _tagged(self, schema: Schema) -> list[Form]:
        """Return the arguments in the order of the schema's properties."""
        before, between, after = self.writing.tag
        properties = schema.get("properties")
        required = schema.get("required")
        properties = properties if isinstance(properties, dict) else {}
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        is_small = len(properties) * len(msgspec.json.encode(definitions)) <= MAX_DEFINITIONS
        found: list[Form] = []
        for key, value in properties.items():
            argument = [*self._fixed(before + key + between), *self._value(value, after, definitions, is_small)]
            is_required = isinstance(required, list) and key in required
            found.append(_in_order(argument) if is_required else Repeat(_in_order(argument), is_once=True))
        return found

    def _value(self, schema: Any, after: str, definitions: Schema, is_small: bool) -> list[Form]:
        """Return the value of one argument, which is text where the parser reads it as text.

        ``is_small``: each argument may have a copy of the definitions; otherwise all values are free.
        """
        types = schema_types(schema)
        if types and "string" not in types and is_small:
            return [_json({**definitions, **schema}), *self._fixed(after)]
        choices = schema.get("enum") if isinstance(schema, dict) and set(types) == {"string"} else None
        if isinstance(choices, list) and choices and all(isinstance(each, str) and each for each in choices):
            return [OneOf([Text(each) for each in choices]), *self._fixed(after)]
        return self._free(after)

    def _fixed(self, text: str) -> list[Form]:
        """Return the parts of a text, with special tokens for their texts."""
        if not text or not self.specials:
            return [Text(text)] if text else []
        pattern = "|".join(re.escape(each) for each in sorted(self.specials, key=len, reverse=True))
        pieces = [piece for piece in re.split(f"({pattern})", text) if piece]
        return [Special(self.specials[piece]) if piece in self.specials else Text(piece) for piece in pieces]

    def _free(self, end: str) -> list[Form]:
        """Return any text that ends with ``end``."""
        first, *others = self._fixed(end)
        assert isinstance(first, Text | Special)
        return [FreeText(first), *others]


def answer_writer(
    name: str, form: Format, markers: tuple[str, str] | None, special_tokens: Mapping[int, str]
) -> AnswerWriter | None:
    """Return what writes the calls of a format, or None if the checkpoint's own template does not read them so.

    ``markers``: the thinking markers, or None.
    """
    writing = WRITINGS.get(name)
    if writing is None or not _reads_calls(form, writing):
        return None
    thoughts = next((each for each in (writing.thoughts, markers) if each and _reads_thought(form, each)), None)
    texts = "\n".join((*writing.calls, *writing.call, *writing.tag, writing.content, writing.next, *(thoughts or ())))
    return AnswerWriter(writing, thoughts, {text: i for i, text in special_tokens.items() if text and text in texts})


def _reads_calls(form: Format, writing: Writing) -> bool:
    """Return whether the format reads two calls (or one) that are written so as these calls."""
    before, between, after = writing.call
    match writing.arguments:
        case "item" | "list":
            call = msgspec.json.encode({"name": "f", writing.tag[0]: {"k": "v"}}).decode()
        case "tags":
            call = f"{before}f{between}{writing.tag[0]}k{writing.tag[1]}v{writing.tag[2]}{after}"
        case "unchecked":
            call = f"{before}f{between}k:{writing.tag[0]}v{writing.tag[0]}}}{after}"
        case _:
            call = f'{before}f{between}{{"k": "v"}}{after}'
    calls = [call] if writing.separator is None else [call, call]
    joined = f"[{', '.join(calls)}]" if writing.arguments == LIST else (writing.separator or "").join(calls)
    events = _events(form, f"{writing.calls[0]}{joined}{writing.calls[1]}")
    deltas = [event for event in events if isinstance(event, CallDelta)]
    return len(deltas) == len(events) and sum(each.name == "f" for each in deltas) == len(calls)


def _reads_thought(form: Format, thoughts: tuple[str, str]) -> bool:
    return _events(form, "x".join(thoughts)) == [Thought("x")]


def _events(form: Format, text: str) -> list[Event]:
    parser = AnswerParser(form, {"f": {"k": {"type": "string"}}})
    return parser.push(text) + parser.finish()


def call_schema(tools: Mapping[str, Schema], key: str, place: str = "") -> dict[str, Any]:
    """Return the schema of a call ``{"name": ..., key: {...}}``, or of something with such calls at ``place``.

    Each tool's schema becomes a definition of the whole schema, so its references to itself are rewritten. Raises
    RecursionError for a schema that is nested too deeply.
    """
    calls, definitions = [], {}
    for i, (name, schema) in enumerate(tools.items()):
        target = f"#/$defs/parameters_{i}"
        definitions[f"parameters_{i}"] = _moved(schema, target)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [name]}, key: {"$ref": target}},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    either = {"anyOf": calls}
    return {**({place: either} if place else either), "$defs": definitions}


def _moved(schema: Any, place: str) -> Any:
    """Return ``schema`` with references to itself rewritten for its new location ``place``."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = place + target[1:]
    return moved


def _in_order(parts: Sequence[Form]) -> Form:
    return parts[0] if len(parts) == 1 else InOrder(parts)


def _json(schema: Schema) -> Form:
    return Json(msgspec.json.encode(schema).decode())
