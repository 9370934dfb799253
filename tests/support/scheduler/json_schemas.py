"""Schemas of many kinds whose values are short for any model, and an independent validator."""

import re
from typing import Any

NAME = {"type": "string", "minLength": 1, "maxLength": 8}
AGE = {"type": "integer", "minimum": 0, "maximum": 150}
PERSON = {
    "type": "object",
    "properties": {
        "name": NAME,
        "age": AGE,
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "leaf": {"type": "object", "properties": {"v": AGE}, "required": ["v"], "additionalProperties": False},
        "pair": {
            "type": "object",
            "properties": {"l": {"$ref": "#/$defs/leaf"}, "r": {"$ref": "#/$defs/leaf"}},
            "required": ["l", "r"],
            "additionalProperties": False,
        },
    },
    "$ref": "#/$defs/pair",
}


def schemas(count: int) -> list[dict[str, Any]]:
    """Return ``count`` different schemas: kinds in turn, each time with other numbers and names."""
    return [_kind(index % 12, index) for index in range(count)]


def _kind(kind: int, i: int) -> dict[str, Any]:
    closed = {"additionalProperties": False}
    match kind:
        case 0:
            return PERSON | {"title": f"person {i}"}
        case 1:
            return TREE | {"title": f"tree {i}"}
        case 2:
            return {"enum": [f"v{i}", i, None, True, {"k": [i]}]}
        case 3:
            return {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2 + i}
        case 4:
            return {"type": "string", "pattern": f"^[a-c]{{1,{i + 1}}}-[0-9]{{2}}$"}
        case 5:
            return {"anyOf": [{"type": "integer", "minimum": i, "maximum": 9 * i}, {"type": "null"}]}
        case 6:
            return {"type": "object", "properties": {f"p{i}": NAME, "q": {"const": i}}, "required": ["q"]} | closed
        case 7:
            return {"type": "array", "items": [AGE, NAME, {"const": i}], "minItems": 3, "maxItems": 3}
        case 8:
            return {"type": "string", "format": "date", "description": f"day {i}"}
        case 9:
            inner = {"type": "object", "properties": {"x": AGE, "y": AGE}, "required": ["x", "y"]} | closed
            return {"type": "object", "properties": {f"at{i}": inner}, "required": [f"at{i}"]} | closed
        case 10:
            one, two = ({"properties": {"kind": {"const": k}, k: AGE}, "required": ["kind", k]} for k in ("a", f"b{i}"))
            return {"oneOf": [{"type": "object"} | one | closed, {"type": "object"} | two | closed]}
        case _:
            words = {"type": "array", "items": {"type": "string", "maxLength": 3 + i}, "maxItems": 2}
            return {"type": "object", "properties": {"words": words}, "required": ["words"]} | closed


def validates(value: Any, schema: Any, root: Any = None) -> bool:
    """Return whether ``value`` satisfies ``schema``, for the keywords used here."""
    root = schema if root is None else root
    if "$ref" in schema:
        target = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        return validates(value, target, root)
    if "enum" in schema and not any(_same(value, one) for one in schema["enum"]):
        return False
    if "const" in schema and not _same(value, schema["const"]):
        return False
    if "anyOf" in schema and not any(validates(value, one, root) for one in schema["anyOf"]):
        return False
    if "oneOf" in schema and sum(validates(value, one, root) for one in schema["oneOf"]) != 1:
        return False
    return _is_a(value, schema.get("type")) and _details(value, schema, root)


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


def _is_a(value: Any, kind: str | None) -> bool:
    kinds: dict[str | None, Any] = {"string": str, "array": list, "object": dict, "boolean": bool, "null": type(None)}
    if kind == "integer":
        return type(value) is int
    return kind is None or isinstance(value, kinds[kind])


def _details(value: Any, schema: Any, root: Any) -> bool:
    if isinstance(value, str):
        fits = re.search(schema.get("pattern", ""), value) is not None
        day = r"\d{4}-\d\d-\d\d" if schema.get("format") == "date" else "(?s).*"
        long_enough = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9)
        return fits and re.fullmatch(day, value) is not None and long_enough
    if type(value) is int:
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    if isinstance(value, list):
        items = schema.get("items", {})
        each = items if isinstance(items, list) else [items] * len(value)
        right = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 10**9)
        return right and all(validates(v, s, root) for v, s in zip(value, each, strict=False))
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        known = schema.get("additionalProperties", True) or value.keys() <= properties.keys()
        there = value.keys() >= set(schema.get("required", []))
        return known and there and all(validates(v, properties.get(k, {}), root) for k, v in value.items())
    return True
