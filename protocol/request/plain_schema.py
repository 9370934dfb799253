"""Writes a JSON schema with the keywords that a library has.

The written schema refuses each value that the given one refuses. ``not``, ``if``, ``oneOf`` and dependencies become
choices of schemas, because grammars cannot say that a value does not fit. A keyword stays, and the library refuses it,
if no such choice is found.
"""

from collections.abc import Collection
from typing import Any

import msgspec

from quire.protocol.request.grammar_checks import DATA

MAX_STEPS = 200_000
"""Most schemas that are compared, within a second or so; a schema that needs more is not rewritten."""
MAX_DEPTH = 6
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"} | {
    list: "array",
    dict: "object",
}
Schema = dict[str, Any]


def plain_schema(text: str, formats: Collection[str], *, keeps_unique: bool = False) -> str:
    """Return an equal or narrower schema, without annotations and without ``uniqueItems``.

    Args:
        text: checked by ``grammar_checks.check_schema``: every reference begins with ``#``, so it needs no ``$id``.
        formats: those that the library knows.
        keeps_unique: keep a ``uniqueItems`` that is true, for a library that refuses it.
    """
    schema = msgspec.json.decode(text)
    try:
        return msgspec.json.encode(_Writer(schema, formats, keeps_unique).write(schema)).decode()
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return text  # not a valid schema, or too many steps: the library says what it refuses


def target(schema: Any, reference: Any) -> Schema | None:
    """Return the schema that a reference such as ``#/$defs/item`` names; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node: Any = schema
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            node = node[int(name)] if name.isdecimal() and int(name) < len(node) else None
        else:
            node = node.get(name) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else None


class _Writer:
    """Writes one schema. Proofs about its parts read the schema as given."""

    def __init__(self, root: Any, formats: Collection[str], keeps_unique: bool) -> None:
        self._root = root
        self._formats = formats
        self._keeps_unique = keeps_unique
        self._steps = 0

    def write(self, node: Any, is_map: bool = False) -> Any:
        self._step()
        if isinstance(node, list):
            return [self.write(each) for each in node]
        if not isinstance(node, dict):
            return node
        return {
            key: value if key in DATA and not is_map else self.write(value, key in _MAPS and not is_map)
            for key, value in (node if is_map else self._plain(node)).items()
        }

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise ValueError("too many steps")

    def _plain(self, given: Schema) -> Schema:
        node = dict(given)
        for key in ("$schema", "$id", "id"):
            name = node.get(key)
            if isinstance(name, str) and (key == "$schema" or given is self._root or name.startswith("#")):
                del node[key]
        if isinstance(node.get("format"), str) and node["format"] not in self._formats:
            del node["format"]
        if node.get("uniqueItems") is False or (node.get("uniqueItems") is True and not self._keeps_unique):
            del node["uniqueItems"]
        more = [{"anyOf": choice} for choice in self._choices(node, given)]
        if (names := self._names(node.get("propertyNames"))) is not None:
            del node["propertyNames"]
            more.append(names)
        return {**node, "allOf": [*node.get("allOf", ()), *more]} if more else node

    def _choices(self, node: Schema, given: Schema) -> list[list[Any]]:
        """Return choices that hold instead of keywords of ``node``, and remove these."""
        found = []
        for key in _DEPENDENCIES:
            for name, needed in node.pop(key, {}).items():
                needs = {"required": needed} if isinstance(needed, list) else needed
                found.append([*self._others({"required": [name]}, given), needs])
        if "not" in node and (others := self._others(node["not"], given)):
            found.append(others)
            del node["not"]
        if "if" in node and (others := self._others(node["if"], given)):
            test, then, otherwise = node.pop("if"), node.pop("then", True), node.pop("else", True)
            found.append([{"allOf": [test, then]}, {"allOf": [{"anyOf": others}, otherwise]}])
        parts = node.get("oneOf", [])
        alone = [self._alone(index, parts, {**given, "oneOf": None}) for index in range(len(parts))]
        if alone and None not in alone:
            found.append(alone)
            del node["oneOf"]
        return found

    def _names(self, names: Any) -> Schema | None:
        """Return an object schema instead of a ``propertyNames``, or None."""
        names = target(self._root, names.get("$ref")) or names if isinstance(names, dict) else {"type": names}
        if names.get("type", "string") != "string":
            return None
        keys = names.keys() - {"title", "description", "$comment", "type"}
        if keys == {"pattern"}:
            return {"patternProperties": {names["pattern"]: {}}, "additionalProperties": False}
        if keys == {"enum"}:
            return {"properties": {name: {} for name in names["enum"]}, "additionalProperties": False}
        return None if keys else {}

    def _alone(self, index: int, parts: list[Any], around: Schema) -> Any:
        """Return a schema of values that only this one of ``parts`` allows; None if no other part can be excluded."""
        within, excluded = {"allOf": [around, parts[index]]}, []
        for other in parts[:index] + parts[index + 1 :]:
            if not self._is_empty([within, other]):
                others = self._others(other, within)
                lacking = [each for each in others if False in each.get("properties", {}).values()]
                excluded.append({"anyOf": lacking or others})  # with all of them, grammars become too complex
                if not others:
                    return None
        return {"allOf": [parts[index], *excluded]} if excluded else parts[index]

    def _others(self, node: Any, around: Schema) -> list[Any]:
        """Return schemas of values within ``around`` that ``node`` refuses; as many as are known."""
        return [each for each in self._refused(node) if not self._is_empty([around, each])]

    def _refused(self, node: Any, depth: int = 0) -> list[Any]:
        self._step()
        if not isinstance(node, dict) or depth > MAX_DEPTH:
            return [{}] if node is False else []
        if "$ref" in node:
            return self._refused(target(self._root, node["$ref"]), depth + 1)
        found: list[Any] = []
        for key, value in node.items():
            match key:
                case "type":
                    found += _of_other_types(value if isinstance(value, list) else [value])
                case "const" | "enum":
                    found += _other_values([value] if key == "const" else value)
                case "required":
                    found += [{"type": "object", "properties": {name: False}} for name in value]
                case "properties":
                    for name, each in value.items():
                        if others := self._refused(each, depth + 1):
                            found.append(
                                {"type": "object", "properties": {name: {"anyOf": others}}, "required": [name]}
                            )
                case "not":
                    found.append(value)
                case "anyOf" | "oneOf":
                    parts = [self._refused(part, depth + 1) for part in value]
                    found += [{"allOf": [{"anyOf": part} for part in parts]}] if all(parts) else []
        return found

    def _is_empty(self, parts: list[Any], depth: int = 0) -> bool:
        """Whether no value can fit all of ``parts``. Objects count as open: ``close_objects`` may have closed them."""
        nodes: list[Schema] = []
        left, types, values = list(parts), {*_TYPES.values()}, None
        while left:
            self._step()
            node = left.pop()
            if node is False:
                return True
            if isinstance(node, dict):
                left += [target(self._root, node["$ref"])] if "$ref" in node else node.get("allOf", ())
                nodes += [] if "$ref" in node else [node]
        for node in nodes:
            types &= {*_types(node["type"])} if "type" in node else types
            for own in ([node["const"]] if "const" in node else None, node.get("enum")):
                if own is not None:
                    types &= {*map(_type, own)}
                    self._steps += len(own) * len(values or ())
                    values = own if values is None else [value for value in values if value in own]
        if types != {"object"} or depth > MAX_DEPTH:
            return not types or values == []
        for name in {name for node in nodes for name in node.get("required", ())}:
            schemas = [node["properties"][name] for node in nodes if name in node.get("properties", ())]
            if self._is_empty(schemas, depth + 1):
                return True
        return values == []


def _type(value: Any) -> str:
    return "integer" if isinstance(value, float) and value.is_integer() else _TYPES[type(value)]


def _types(names: str | list[str]) -> list[str]:
    """Return the types of a ``type``. An integer is a number too."""
    named = names if isinstance(names, list) else [names]
    return [*named, "integer"] if "number" in named else named


def _of_other_types(names: list[str]) -> list[Schema]:
    both = {"integer", "number"}
    excluded = {*names} | (both if both & {*names} else set())
    return [{"type": [name for name in _TYPES.values() if name not in excluded]}]


def _other_values(values: list[Any]) -> list[Schema]:
    found = _of_other_types([_type(value) for value in values])
    if strings := {value for value in values if isinstance(value, str)}:
        found.append({"type": "string", "pattern": f"^({_other_strings(strings)})$"})
    flags = {value for value in values if isinstance(value, bool)}
    return [*found, *({"const": flag} for flag in {True, False} - flags if flags)]


def _other_strings(words: set[str]) -> str:
    """Return a regular expression of all strings but these."""
    codes = {word[0]: f"\\x{{{ord(word[0]):x}}}" for word in sorted(words) if word}
    follow = [
        f"{code}({_other_strings({word[1:] for word in words if word[:1] == first})})" for first, code in codes.items()
    ]
    other = f"[^{''.join(codes.values())}]" if codes else r"[\s\S]"
    return "|".join([*follow, rf"{other}[\s\S]*", *([] if "" in words else [""])])
