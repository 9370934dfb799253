"""Leaves out of a JSON schema what allows the same values to a library that refuses it."""

from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from quire.protocol.request.grammar_checks import DATA

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_KEYS = ('"$schema"', '"format"', '"uniqueItems"', '"$id"', '"id"')


def plain_schema(text: str, formats: Collection[str], *, keeps_unique: bool = False) -> str:
    """Return the schema without its annotations ``$schema``, ``$id`` and unknown formats, and without ``uniqueItems``.

    Args:
        text: checked by ``grammar_checks.check_schema``: every reference begins with ``#``, so it needs no ``$id``.
        formats: those that the library knows.
        keeps_unique: keep a ``uniqueItems`` that is true, for a library that refuses it.
    """
    if not any(key in text for key in _KEYS):
        return text
    schema = msgspec.json.decode(text)
    for node in _schemas(schema):
        for key in ("$schema", *(("$id", "id") if node is schema else ())):
            if isinstance(node.get(key), str):
                del node[key]
        if isinstance(node.get("format"), str) and node["format"] not in formats:
            del node["format"]
        if node.get("uniqueItems") is False or (node.get("uniqueItems") is True and not keeps_unique):
            del node["uniqueItems"]
    return msgspec.json.encode(schema).decode()


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects that may be schemas, also where only a reference leads."""
    left = [(schema, False)]
    while left:
        node, is_map = left.pop()
        if isinstance(node, dict):
            if not is_map:
                yield node
            left += [(value, not is_map and key in _MAPS) for key, value in node.items() if is_map or key not in DATA]
        elif isinstance(node, list):
            left += [(each, False) for each in node]
