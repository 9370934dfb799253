"""The value of a whole call: what its text means once all of it is there."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.frontend.text.parsing.literals import bare_json, python_json
from quire.frontend.text.parsing.templates import Region

PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
BLANKS = re.compile(r"\s*")
NAME = "name"
WHOLE_CALL = {"type": "function", "function": "{content}"}
"""The transform of a region whose value has names: it may have several calls, one after the other or in a list."""
ARGUMENTS = ("arguments", "parameters")
"""Keys of a call's arguments; templates have the first, but some models write the second."""


class Malformed(ValueError):
    """The text of a call is not one."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    name: str
    arguments: Mapping[str, Any]


def decode_json(text: str) -> Any:
    """Return the value of JSON text; raise Malformed for other text, also for NaN and infinities."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise Malformed from None


def as_json(value: Any) -> str:
    """Return the value as JSON text. A half of a surrogate pair, which UTF-8 does not have, stays an escape."""
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", json.dumps(value, ensure_ascii=False))


def _decode_several(text: str) -> Iterator[Any]:
    """Return the values that follow each other in JSON text, and those in lists."""
    at = 0
    while (blanks := BLANKS.match(text, at)) and blanks.end() < len(text):
        try:
            value, at = DECODER.raw_decode(text, blanks.end())
        except (ValueError, RecursionError):
            raise Malformed from None
        yield from value if isinstance(value, list) else [value]


def _refuse(constant: str) -> None:
    raise Malformed


DECODER = json.JSONDecoder(parse_constant=_refuse)


def calls_of(body: str, region: Region, captures: Mapping[str, str]) -> list[ParsedCall]:
    """Return the calls of one region; raise Malformed if it has none, or something else."""
    args, transform = region.args or {}, region.transform
    if region.content == "python" or (transform == WHOLE_CALL and region.content == "json"):
        found = list(_decode_several(python_json(body) if region.content == "python" else plain_json(body, args)))
    elif transform is None:
        value = _content(body, region.content, args)
        found = value if isinstance(value, list) else [value]
    elif region.transform_each:
        value = _content(body, region.content, args)
        if not isinstance(value, list):
            raise Malformed
        found = [transformed(transform, {**captures, **_object(item)}) for item in value]
    else:
        found = [transformed(transform, {**captures, "content": _content(body, region.content, args)})]
    if not found:
        raise Malformed
    return [_call(item, needs_arguments=region.is_bare) for item in found]


def _call(value: Any, *, needs_arguments: bool) -> ParsedCall:
    function = _object(_object(value).get("function", value))
    name = function.get(NAME)
    others = function.keys() - {NAME, "type", "id"}  # such as "args": a call without its arguments would be wrong
    if (needs_arguments or others) and others.isdisjoint(ARGUMENTS):
        raise Malformed
    arguments: Any = next((function[key] for key in ARGUMENTS if key in function), {})
    if isinstance(arguments, str):  # JSON in JSON
        arguments = decode_json(arguments)
    if not isinstance(name, str) or not name:
        raise Malformed
    return ParsedCall(name, _object(arguments))


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise Malformed
    return value


def transformed(transform: Any, scope: Mapping[str, Any]) -> Any:
    """Return the transform with each text ``{name.key}`` replaced by that value of the scope."""
    if isinstance(transform, dict):
        return {key: transformed(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [transformed(value, scope) for value in transform]
    path = placeholder(transform)
    if path is None:
        return transform
    value: Any = scope
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            raise Malformed
        value = value[key]
    return value


def placeholder(value: Any) -> list[str] | None:
    """Return the names of a ``{name.key}``, or None for other values."""
    whole = PLACEHOLDER.fullmatch(value) if isinstance(value, str) else None
    return whole and whole[1].split(".")


def _content(body: str, kind: str, args: Mapping[str, Any]) -> Any:
    if kind == "json":
        return decode_json(plain_json(body, args))
    if kind == "kv-lines":
        return _key_lines(body, args)
    return body.strip() if args.get("strip", True) else body


def plain_json(text: str, args: Mapping[str, Any]) -> str:
    """Return JSON for text of a dialect: with other string delimiters, or keys without quotes."""
    pairs: Sequence[Sequence[str]] = args.get("string_delims", ())
    strings: list[str] = []
    if pairs and ("\x01" in text or "\x02" in text):
        raise Malformed
    for opens, closes in pairs:
        outside: list[str] = []
        inside: list[str] | None = None
        for piece in re.split(f"({re.escape(opens)}|{re.escape(closes)})", text):
            if inside is None and piece == opens:
                inside = []
            elif inside is None:
                outside.append(piece)
            elif piece == closes:
                strings.append("".join(inside))
                outside.append(f"\x01{len(strings) - 1}\x02")
                inside = None
            else:
                inside.append(piece)
        if inside is not None:
            raise Malformed
        text = "".join(outside)
    if args.get("unquoted_keys"):
        text = bare_json(text)
    return re.sub("\x01(\\d+)\x02", lambda found: json.dumps(strings[int(found[1])]), text)


def _key_lines(text: str, args: Mapping[str, Any]) -> dict[str, str]:
    separator, strip = args.get("kv_sep", ":"), args.get("strip", True)
    found: dict[str, str] = {}
    for line in text.split(args.get("line_sep", "\n")):
        line = line.strip() if strip else line
        key, colon, value = line.partition(separator)
        if not colon and line.strip():
            raise Malformed
        if colon:
            found[key.strip() if strip else key] = value.strip() if strip else value
    return found


def schema_types(schema: Any) -> tuple[str, ...]:
    """Return the types that a JSON schema names, in order, with those of its alternatives."""
    if not isinstance(schema, dict):
        return ()
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else []
    types = [each for each in types if isinstance(each, str)]
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            types.extend(schema_types(choice))
    if schema.get("nullable") and "null" not in types:
        types.append("null")
    return tuple(types)


def typed(raw: str, types: Sequence[str]) -> Any:
    """Return the value of an argument given as plain text: of the first type that it fits, otherwise the text."""
    for name in types:
        try:
            return _CASTS[name](raw)
        except (KeyError, ValueError, OverflowError, RecursionError):
            continue
    return raw


def _integer(raw: str) -> int:
    try:
        return int(raw)
    except ValueError:
        number = float(raw)
        if not number.is_integer():
            raise
        return int(number)


def _number(raw: str) -> int | float:
    number = float(raw)
    if number - number != 0:
        raise ValueError
    return int(number) if number.is_integer() and "." not in raw else number


def _boolean(raw: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[raw.strip().lower()]


def _null(raw: str) -> None:
    if raw.strip() not in ("null", "None"):
        raise ValueError


def _container(raw: str, kind: type) -> Any:
    try:
        value = decode_json(raw)
    except Malformed:
        value = decode_json(python_json(raw))
    if not isinstance(value, kind):
        raise ValueError
    return value


ANY_TYPES = ("integer", "number", "boolean", "null", "object", "array")
_CASTS: Mapping[str, Callable[[str], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "null": _null,
    "object": lambda raw: _container(raw, dict),
    "array": lambda raw: _container(raw, list),
}
