"""Tools of a chat request: checked, given to the template, and the constraint that a demanded call puts on the answer.

A call is only ever parsed out of an answer that was constrained to be one: what a model writes by itself, under
``tool_choice: auto``, stays text.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from quire.launch.http.schema.bodies import Function, Tool
from quire.launch.http.schema.errors import shorten
from quire.launch.http.schema.reading import read
from quire.launch.http.schema.sampling_fields import schema_constraint
from quire.protocol.errors import InvalidRequest
from quire.protocol.request.grammar_checks import GrammarRefused, check_schema
from quire.protocol.request.structured_outputs import MAX_GRAMMAR_BYTES, StructuredOutputs

MAX_TOOLS = 128
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A call that the answer has to be. ``function``: the one to call; None: any, and perhaps several."""

    function: str | None
    constraint: StructuredOutputs


def parse_tools(
    given: list[dict[str, Any]] | None, choice: Any, *, parallel: bool
) -> tuple[list[dict[str, Any]] | None, ToolUse | None]:
    """The tools for the template, none where they are not to be used, and what is demanded of the answer.

    Raises:
        InvalidRequest: a tool is not a function, or the choice names none of them; names the field.
    """
    tools = _check_tools(given or [])
    if choice is None or choice in ("auto", "none"):
        return (None if choice == "none" else tools or None), None
    if not tools:
        raise InvalidRequest("tool_choice needs tools", "tool_choice")
    schemas = {tool["function"]["name"]: _arguments(tool["function"].get("parameters")) for tool in tools}
    if choice == "required":
        return tools, ToolUse(None, _any_call(schemas, parallel=parallel))
    name = _chosen(choice)
    if name not in schemas:
        raise InvalidRequest(f"tool_choice.function.name {shorten(name)} is none of the tools", "tool_choice")
    where = f"tools[{list(schemas).index(name)}].function.parameters"
    return tools, ToolUse(name, schema_constraint(schemas[name], where))


def _arguments(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of a call's arguments, which are an object even where ``parameters`` forget to say so."""
    if not parameters:
        return NO_PARAMETERS
    return parameters if {"type", "$ref"} & parameters.keys() else {"type": "object", **parameters}


def _chosen(choice: Any) -> str:
    good = isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict)
    name = choice["function"].get("name") if good else None
    if not isinstance(name, str):
        raise InvalidRequest(
            'tool_choice must be none, auto, required or {"type": "function", "function": {"name": "..."}}',
            "tool_choice",
        )
    return name


def _check_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools must hold at most {MAX_TOOLS} tools", "tools")
    names: set[str] = set()
    functions = [_check_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    for i, name in enumerate(function.name for function in functions):
        if name in names:
            raise InvalidRequest(f"tools must not have two functions of the name {name}", f"tools[{i}].function.name")
        names.add(name)
    try:
        size = len(msgspec.json.encode(tools))
    except (RecursionError, TypeError, ValueError):
        raise InvalidRequest("tools are nested too deeply, or not valid Unicode text", "tools") from None
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"tools must have at most {MAX_GRAMMAR_BYTES} bytes together", "tools")
    for i, function in enumerate(functions):
        _check_parameters(function.parameters, f"tools[{i}].function.parameters")
    return tools


def _check_tool(tool: dict[str, Any], where: str) -> Function:
    return read(Function, read(Tool, tool, where).function, f"{where}.function")


def _check_parameters(schema: Any, where: str) -> None:
    """As the scheduler would where a call is demanded: a client is to learn of its mistake before it demands one."""
    if schema is None:
        return
    try:
        check_schema(msgspec.json.encode(schema).decode())
    except GrammarRefused as refused:
        raise InvalidRequest(f"{where}: {refused}", where, "invalid_structured_outputs") from None


def _any_call(schemas: dict[str, Any], *, parallel: bool) -> StructuredOutputs:
    """A list of calls; each tool's schema stands under the whole's definitions, so its own references are moved."""
    calls, definitions = [], {}
    for i, (name, schema) in enumerate(schemas.items()):
        place = f"#/$defs/parameters_{i}"
        try:
            definitions[f"parameters_{i}"] = _moved(schema, place)
        except RecursionError:
            raise InvalidRequest("tools are nested too deeply", "tools") from None
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [name]}, "parameters": {"$ref": place}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    whole = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    return schema_constraint(whole if parallel else {**whole, "maxItems": 1}, "tools")


def _moved(schema: Any, place: str) -> Any:
    """``schema`` with its references to itself as they are once it stands at ``place``."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = place + target[1:]
    return moved
