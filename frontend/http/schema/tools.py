"""Tools of a chat request: validation, and the output constraint of a required call.

With ``tool_choice: auto`` the output is constrained only if there is a ``response_format`` too. The calls in it are
read by ``routes/conversation.py``.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from quire.frontend.http.schema.bodies import Function, Tool
from quire.frontend.http.schema.errors import shorten
from quire.frontend.http.schema.reading import members, read
from quire.frontend.http.schema.sampling_fields import schema_constraint
from quire.frontend.http.schema.unknown_fields import Ignored
from quire.frontend.text.parsing.writing import AnswerWriter, call_schema
from quire.protocol.errors import InvalidRequest, printable
from quire.protocol.request.grammar_checks import GrammarRefused, check_schema
from quire.protocol.request.structured_outputs import MAX_GRAMMAR_BYTES, StructuredOutputs

MAX_TOOLS = 128
MAX_FORM_BYTES = 2 * MAX_GRAMMAR_BYTES
"""A form has each schema twice: for the first call, and for those after it."""
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A required call. ``function``: the function to call, or None for one or several calls of any function."""

    function: str | None
    constraint: StructuredOutputs


def parse_tools(
    given: list[dict[str, Any]] | None, choice: Any, *, parallel: bool, ignored: Ignored | None = None
) -> tuple[list[dict[str, Any]] | None, ToolUse | None]:
    """Return the tools for the template (None if unused) and the required call (None if not required).

    ``ignored``: as in ``read``; unknown fields of a tool do not reach the template.

    Raises:
        InvalidRequest: a tool is not a function, or the choice names an unknown function; names the field.
    """
    tools = _check_tools(given or [], ignored)
    allowed = tools
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, allowed = _allowed_tools(choice, tools)
    if choice is None or choice in ("auto", "none"):
        return (None if choice == "none" else allowed or None), None
    if not tools:
        raise InvalidRequest("tool_choice requires tools", "tool_choice")
    schemas = {tool["function"]["name"]: _arguments(tool["function"].get("parameters")) for tool in allowed}
    if choice == "required":
        return tools, ToolUse(None, _any_call(schemas, parallel=parallel))
    name = _chosen(choice)
    if name not in schemas:
        raise InvalidRequest(f"tool_choice.function.name {shorten(name)} not found in tools", "tool_choice")
    where = f"tools[{list(schemas).index(name)}].function.parameters"
    return tools, ToolUse(name, schema_constraint(schemas[name], where))


def _allowed_tools(choice: dict[str, Any], tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Return the mode (auto or required) of a choice among some of the tools, and these tools.

    The model is shown only these tools for ``auto``, and all of them for ``required``, which constrains the output.
    """
    name = "tool_choice.allowed_tools"
    inner = choice.get("allowed_tools")
    mode, named = (inner.get("mode"), inner.get("tools")) if isinstance(inner, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(named, list) or not named or len(named) > MAX_TOOLS:
        raise InvalidRequest(f"{name} must have mode (auto or required) and tools (1 to {MAX_TOOLS} tools)", name)
    by_name = {tool["function"]["name"]: tool for tool in tools}
    found: dict[str, dict[str, Any]] = {}
    for i, each in enumerate(named):
        wanted = _function_name(each)
        if wanted is None or wanted not in by_name:
            shown = "" if wanted is None else f" (got {shorten(wanted)})"
            raise InvalidRequest(f"{name}.tools[{i}] must name one of tools{shown}", f"{name}.tools[{i}]")
        found[wanted] = by_name[wanted]
    return mode, list(found.values())


def _function_name(tool: Any) -> str | None:
    """Return the name in ``{"type": "function", "function": {"name": ...}}``; None in anything else."""
    good = isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("function"), dict)
    name = tool["function"].get("name") if good else None
    return name if isinstance(name, str) else None


def _arguments(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a call's arguments. A schema without a type gets ``"type": "object"``."""
    if not parameters:
        return NO_PARAMETERS
    return parameters if {"type", "$ref"} & parameters.keys() else {"type": "object", **parameters}


def _chosen(choice: Any) -> str:
    name = _function_name(choice)
    if name is None:
        raise InvalidRequest(
            'tool_choice must be none, auto, required, {"type": "function", "function": {"name": "..."}} or '
            f'{{"type": "allowed_tools", ...}} (got {printable(choice)})',
            "tool_choice",
        )
    return name


def _check_tools(tools: list[dict[str, Any]], ignored: Ignored | None) -> list[dict[str, Any]]:
    """Return the tools without null and unknown fields."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools must hold at most {MAX_TOOLS} tools (got {len(tools)})", "tools")
    names: set[str] = set()
    functions = [_check_tool(tool, f"tools[{i}]", ignored) for i, tool in enumerate(tools)]
    for i, name in enumerate(function["name"] for function in functions):
        if name in names:
            raise InvalidRequest(f"duplicate function name {name} in tools", f"tools[{i}].function.name")
        names.add(name)
    checked = [{"type": "function", "function": function} for function in functions]
    try:
        size = len(msgspec.json.encode(checked))
    except (RecursionError, TypeError, ValueError):
        raise InvalidRequest("tools are nested too deeply, or not valid Unicode text", "tools") from None
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"tools must have at most {MAX_GRAMMAR_BYTES} bytes together (got {size})", "tools")
    for i, function in enumerate(functions):
        _check_parameters(function.get("parameters"), f"tools[{i}].function.parameters")
    return checked


def _check_tool(tool: dict[str, Any], where: str, ignored: Ignored | None) -> dict[str, Any]:
    given = read(Tool, tool, where, ignored=ignored).function
    read(Function, given, f"{where}.function", ignored=ignored)
    return members(Function, given, f"{where}.function", given)


def _check_parameters(schema: Any, where: str) -> None:
    """Check a schema as the scheduler would for a required call, so that the error does not depend on tool_choice."""
    if schema is None:
        return
    try:
        check_schema(msgspec.json.encode(schema).decode())
    except GrammarRefused as error:
        raise InvalidRequest(f"{where}: {error}", where, "invalid_structured_outputs") from None


def _any_call(schemas: dict[str, Any], *, parallel: bool) -> StructuredOutputs:
    """Return the constraint to a list of calls."""
    try:
        whole = {"type": "array", "minItems": 1, **call_schema(schemas, "parameters", "items")}
    except RecursionError:
        raise InvalidRequest("tools are nested too deeply", "tools") from None
    return schema_constraint(whole if parallel else {**whole, "maxItems": 1}, "tools")


def answer_or_calls(
    writer: AnswerWriter | None, content: StructuredOutputs | None, tools: list[dict[str, Any]], *, parallel: bool
) -> StructuredOutputs | None:
    """Return the constraint to ``content``, that of ``response_format``, or calls as the model writes them.

    None if the request has no such content, or the model's answer has only this content.
    """
    if writer is None or content is None or (not tools and writer.content_is_bare):
        return None
    schema = '{"type":"object"}' if content.json_object else str(content.json)
    schemas = {tool["function"]["name"]: _arguments(tool["function"].get("parameters")) for tool in tools}
    try:
        form = writer.answer_or_calls(schema, schemas, parallel=parallel)
        size = len(msgspec.json.encode(form))
    except RecursionError:
        raise InvalidRequest("tools are nested too deeply", "tools") from None
    if size > MAX_FORM_BYTES:
        text = f"the grammar of tools and response_format must have at most {MAX_FORM_BYTES} bytes (got {size})"
        raise InvalidRequest(f"{text}: send fewer tools, or shorter schemas", "tools", "invalid_structured_outputs")
    return StructuredOutputs(form=form)
