"""Tools of the Responses API as functions of chat: custom tools, and functions in namespaces."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from quire.frontend.http.schema.errors import shorten
from quire.frontend.http.schema.schema import ChatRequest
from quire.frontend.http.schema.unknown_fields import Ignored
from quire.frontend.text.text_parts import list_at, object_at, string_at
from quire.protocol.errors import InvalidRequest, wrong_value
from quire.protocol.request.structured_outputs import StructuredOutputs

CUSTOM_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""A custom tool takes text: chat sees a function with this one argument."""


@dataclass(frozen=True, slots=True)
class ToolName:
    """The name of a tool as the client knows it. ``namespace``: "" for none."""

    name: str
    namespace: str = ""
    is_custom: bool = False
    is_raw: bool = False
    """The model writes the text of a custom tool as it is, because a grammar constrains it."""

    @property
    def in_chat(self) -> str:
        """The function's name in chat."""
        separator = "" if not self.namespace or self.namespace.endswith("__") else "__"
        return f"{self.namespace}{separator}{self.name}"


@dataclass(slots=True)
class Tools:
    """The tools of one request.

    Attributes:
        functions: in the form of chat.
        places: the path of each in the request.
        names: by the function's name in chat.
        grammars: Lark grammars of custom tools, by the function's name in chat, each with its path.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    names: dict[str, ToolName] = field(default_factory=dict)
    grammars: dict[str, tuple[str, str]] = field(default_factory=dict)

    def name(self, in_chat: str) -> ToolName:
        """Return the client's name of a function that the model calls. It may have invented one."""
        return self.names.get(in_chat) or ToolName(in_chat)


def read_tools(given: list[dict[str, Any]], ignored: Ignored) -> Tools:
    """Return the tools that the client runs. Tools that only run at OpenAI (web search, ...) are ignored.

    Raises:
        InvalidRequest: a tool is malformed; names the field.
    """
    tools = Tools()
    for tool, namespace, where in _flat(given, ignored):
        kind = tool["type"]
        name = ToolName(string_at(tool, "name", where), namespace, kind == "custom")
        function: dict[str, Any] = {"name": name.in_chat}
        if description := string_at(tool, "description", where, default=""):
            function["description"] = description
        if kind == "custom":
            function["parameters"] = CUSTOM_PARAMETERS
            _add_format(tools, function, tool.get("format"), f"{where}.format")
        elif tool.get("parameters") is not None:
            function["parameters"] = object_at(tool["parameters"], f"{where}.parameters")
        if tool.get("strict") is True:
            function["strict"] = True
        tools.functions.append({"type": "function", "function": function})
        tools.places.append(where)
        tools.names[name.in_chat] = name
    return tools


def _flat(given: list[dict[str, Any]], ignored: Ignored) -> Iterator[tuple[Mapping[str, Any], str, str]]:
    """Yield functions and custom tools, each with its namespace and its path."""
    for i, tool in enumerate(given):
        where = f"tools[{i}]"
        kind = tool.get("type")
        if kind in ("function", "custom"):
            yield tool, "", where
        elif kind == "namespace":
            namespace = string_at(tool, "name", where)
            for j, inner in enumerate(list_at(tool.get("tools"), f"{where}.tools")):
                at = f"{where}.tools[{j}]"
                if object_at(inner, at).get("type") in ("function", "custom"):
                    yield inner, namespace, at
                else:
                    ignored.add(f"tools.{inner.get('type')}", ())
        elif not isinstance(kind, str):
            raise wrong_value(f"{where}.type", "function, custom or namespace", kind)
        else:
            ignored.add(f"tools.{kind}", ())


def _add_format(tools: Tools, function: dict[str, Any], given: Any, where: str) -> None:
    """Note the format of a custom tool's text, and describe it to the model.

    The model writes the text as an argument in JSON. A schema can require that it matches a regular expression, but not
    that it matches a grammar.
    """
    if given is None or object_at(given, where).get("type") == "text":
        return
    syntax = given.get("syntax")
    if given.get("type") != "grammar" or syntax not in ("lark", "regex"):
        shown = {"type": given.get("type"), "syntax": syntax}
        raise wrong_value(where, "text, or a grammar with the syntax lark or regex", shown)
    definition = string_at(given, "definition", where)
    if syntax == "regex":
        text = {"type": "string", "pattern": f"^(?:{definition})$"}
        function["parameters"] = {**CUSTOM_PARAMETERS, "properties": {"input": text}}
    else:
        tools.grammars[function["name"]] = (definition, f"{where}.definition")
    described = f"The input must match this {syntax} grammar:\n{definition}"
    function["description"] = f"{function.get('description', '')}\n\n{described}".strip()


def enforce_grammars(chat: ChatRequest, tools: Tools, ignored: Ignored) -> ChatRequest:
    """Constrain the call of one custom tool to its grammar. A grammar is only described where the model may choose.

    Raises:
        InvalidRequest: a call is required and may be of a tool with a grammar or of another one.
    """
    if not tools.grammars or chat.options.tools is None:
        return chat
    if chat.tool_use is None:
        ignored.add("tools.format", ())
        return chat
    name = chat.tool_use.function
    if name is None:
        where = next(iter(tools.grammars.values()))[1]
        text = f"{where} can be enforced only for a tool that tool_choice names: name it, or use auto"
        raise InvalidRequest(text, where, "unsupported")
    if name not in tools.grammars:
        return chat
    definition, where = tools.grammars[name]
    try:
        constraint = StructuredOutputs(grammar=definition)
    except InvalidRequest as error:
        message = error.message.replace("structured_outputs.grammar", where)
        raise InvalidRequest(message, where, error.code) from None
    tools.names[name] = replace(tools.names[name], is_raw=True)
    return replace(chat, params=structs.replace(chat.params, structured_outputs=constraint))


def chat_choice(choice: Any, tools: Tools) -> Any:
    """Return ``tool_choice`` in the form of chat.

    Raises:
        InvalidRequest: it is malformed, or names a tool that the request does not have.
    """
    if choice is None or isinstance(choice, str):
        return choice
    kind = object_at(choice, "tool_choice").get("type")
    if kind == "allowed_tools":
        allowed = list_at(choice.get("tools"), "tool_choice.tools")
        named = [_named(each, tools, f"tool_choice.tools[{i}]") for i, each in enumerate(allowed)]
        return {"type": kind, kind: {"mode": choice.get("mode"), "tools": named}}
    return _named(choice, tools, "tool_choice")


def _named(given: Any, tools: Tools, where: str) -> dict[str, Any]:
    fields = object_at(given, where)
    kind = fields.get("type")
    if kind not in ("function", "custom"):
        raise wrong_value(f"{where}.type", "function, custom or allowed_tools", kind, "unsupported")
    name = ToolName(string_at(fields, "name", where), string_at(fields, "namespace", where, default="")).in_chat
    if name not in tools.names:
        raise InvalidRequest(f"{where}.name {shorten(name)} not found in tools", f"{where}.name")
    return {"type": "function", "function": {"name": name}}
