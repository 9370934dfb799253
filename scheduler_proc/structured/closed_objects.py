"""Closes the objects of a JSON schema: an object that names its properties has no others.

JSON Schema allows any further property. Weak models then write keys that the client's code does not expect, up to the
end of the answer. An object stays open where closing it would change what its schema combines:

* ``additionalProperties``, ``unevaluatedProperties``: the schema decides;
* ``allOf``, ``anyOf``, ``oneOf``, ``$ref``, ``if`` and the like beside ``properties`` or each other: several parts may
  name properties of the same object. The parts, and the definitions that they refer to, stay open too;
* within ``not`` and ``if``, where closing would allow more;
* ``required`` or ``minProperties`` that its own properties cannot fulfil.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from quire.protocol.request.plain_schema import target

_DEFINITIONS = ("$defs", "definitions")
_MAPS = ("properties", "patternProperties")
_LISTS = ("prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties", "propertyNames", "unevaluatedItems")
_COMBINED_LISTS = ("allOf", "anyOf", "oneOf")
_PARTS = ("not", "if", "then", "else", "contains")
_COMBINING = ("not", "if", "then", "else", "$ref", "$dynamicRef", "dependentSchemas")

Schema = dict[str, Any]


def close_objects(text: str) -> str:
    """Return the schema with ``additionalProperties`` false in objects that name their properties.

    ``text``: checked by ``grammar_checks.check_schema``, which bounds its size and depth.
    """
    if '"properties"' not in text:
        return text
    schema = msgspec.json.decode(text)
    is_open = _open_nodes(schema)
    for node, _ in _walk(schema, False):
        if id(node) not in is_open and _names_its_properties(node):
            node["additionalProperties"] = False
    return msgspec.json.encode(schema).decode()


def _open_nodes(schema: Schema) -> set[int]:
    """Return the ids of the objects that may describe only a part of a value."""
    found: set[int] = set()
    left: list[tuple[Schema | None, bool]] = [(schema, False)]
    while left:
        start, is_part = left.pop()
        if start is None or id(start) in found:
            continue
        for node, part in _walk(start, is_part):
            if part:
                found.add(id(node))
                left.append((target(schema, node.get("$ref")), True))
    return found


def _walk(schema: Any, is_part: bool) -> Iterator[tuple[Schema, bool]]:
    """Yield (schema, whether it may describe only a part of its value) of a schema and of all schemas in it.

    A value within a part counts as a part, because another part may describe the same value.
    """
    left = [(schema, is_part)]
    while left:
        node, part = left.pop()
        if not isinstance(node, dict):
            continue
        part = part or _combines(node)
        yield node, part
        for key, value in node.items():
            if key in _DEFINITIONS and isinstance(value, dict):
                left += [(each, False) for each in value.values()]
            elif key in (*_MAPS, "dependentSchemas") and isinstance(value, dict):
                left += [(each, part) for each in value.values()]
            elif key in (*_COMBINED_LISTS, *_LISTS) and isinstance(value, list):
                left += [(each, part) for each in value]
            elif key in _PARTS or key in _SINGLE:
                left.append((value, part or key in _PARTS))


def _combines(node: Schema) -> bool:
    """Whether several parts of ``node`` may describe properties of the same object."""
    num_parts = sum(key in node for key in (*_COMBINING, "anyOf", "oneOf")) + any(key in node for key in _MAPS)
    all_of = node.get("allOf")
    return num_parts + (len(all_of) if isinstance(all_of, list) else 0) > 1


def _names_its_properties(node: Schema) -> bool:
    properties = node.get("properties")
    if not isinstance(properties, dict) or {"additionalProperties", "unevaluatedProperties"} & node.keys():
        return False
    required, least = node.get("required", []), node.get("minProperties", 0)
    can_have = isinstance(required, list) and all(name in properties for name in required if isinstance(name, str))
    return can_have and isinstance(least, int | float) and least <= len(properties)
