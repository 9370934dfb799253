"""Tools of a chat request: validation, and the output constraint of a required call.

Calls are only parsed from outputs that were constrained to be calls. With ``tool_choice: auto`` the output stays text.
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
    """A required call. ``function``: the function to call, or None for one or several calls of any function."""

    function: str | None
    constraint: StructuredOutputs


def parse_tools(
    given: list[dict[str, Any]] | None, choice: Any, *, parallel: bool
) -> tuple[list[dict[str, Any]] | None, ToolUse | None]:
    """Return the tools for the template (None if unused) and the required call (None if not required).

    Raises:
        InvalidRequest: a tool is not a function, or the choice names an unknown function; names the field.
    """
    tools = _check_tools(given or [])
    if choice is None or choice in ("auto", "none"):
        return (None if choice == "none" else tools or None), None
    if not tools:
        raise InvalidRequest("tool_choice requires tools", "tool_choice")
    schemas = {tool["function"]["name"]: _arguments(tool["function"].get("parameters")) for tool in tools}
    if choice == "required":
        return tools, ToolUse(None, _any_call(schemas, parallel=parallel))
    name = _chosen(choice)
    if name not in schemas:
        raise InvalidRequest(f"tool_choice.function.name {shorten(name)} not found in tools", "tool_choice")
    where = f"tools[{list(schemas).index(name)}].function.parameters"
    return tools, ToolUse(name, schema_constraint(schemas[name], where))


def _arguments(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a call's arguments. A schema without a type gets ``"type": "object"``."""
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
        raise InvalidRequest(f"tools must hold at most {MAX_TOOLS} tools (got {len(tools)})", "tools")
    names: set[str] = set()
    functions = [_check_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    for i, name in enumerate(function.name for function in functions):
        if name in names:
            raise InvalidRequest(f"duplicate function name {name} in tools", f"tools[{i}].function.name")
        names.add(name)
    try:
        size = len(msgspec.json.encode(tools))
    except (RecursionError, TypeError, ValueError):
        raise InvalidRequest("tools are nested too deeply, or not valid Unicode text", "tools") from None
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"tools must have at most {MAX_GRAMMAR_BYTES} bytes together (got {size})", "tools")
    for i, function in enumerate(functions):
        _check_parameters(function.parameters, f"tools[{i}].function.parameters")
    return tools


def _check_tool(tool: dict[str, Any], where: str) -> Function:
    return read(Function, read(Tool, tool, where).function, f"{where}.function")


def _check_parameters(schema: Any, where: str) -> None:
    """Check a schema as the scheduler would for a required call, so that the error does not depend on tool_choice."""
    if schema is None:
        return
    try:
        check_schema(msgspec.json.encode(schema).decode())
    except GrammarRefused as error:
        raise InvalidRequest(f"{where}: {error}", where, "invalid_structured_outputs") from None


def _any_call(schemas: dict[str, Any], *, parallel: bool) -> StructuredOutputs:
    """Return the constraint to a list of calls. Each tool's schema becomes a definition of the whole schema, so its
    references to itself are rewritten."""
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
    """Return ``schema`` with references to itself rewritten for its new location ``place``."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = place + target[1:]
    return moved
