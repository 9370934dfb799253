"""Text and images in the parts of a message, for APIs that give each kind of part a type of its own."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from quire.frontend.text.image_parts import PartAt, is_image
from quire.frontend.text.message_checks import joined
from quire.protocol.errors import InvalidRequest, printable, wrong_value


def object_at(value: Any, where: str) -> Mapping[str, Any]:
    """Return the object at the path ``where``; raise InvalidRequest for any other value."""
    if not isinstance(value, dict):
        raise wrong_value(where, "an object", value, "invalid_type")
    return value


def list_at(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise wrong_value(where, "a list", value, "invalid_type")
    return value


def string_at(value: Mapping[str, Any], name: str, where: str, *, default: str | None = None) -> str:
    """Return a member that is a string. ``default``: returned for null and a missing member, which None refuses."""
    found = value.get(name)
    if found is None and default is not None:
        return default
    if not isinstance(found, str):
        raise wrong_value(f"{where}.{name}", "a string", found, "invalid_type")
    return found


def encoded(value: Any, where: str) -> bytes:
    """Return JSON from a request as JSON again."""
    try:
        return msgspec.json.encode(value)
    except (RecursionError, ValueError):
        raise InvalidRequest(f"{where} is nested too deeply, or not valid Unicode text", where) from None


def joined_text(content: Any, where: str, kinds: Collection[str] = ("text",)) -> str:
    """Return the text of a string or of a list of parts, joined by newlines as in chat.

    Args:
        kinds: types of parts that have their text in ``text``, or in a member named as the type, or are
            ``input_json``.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong_value(where, "a string or a list of parts", content, "invalid_type")
    return "\n".join(_text(part, f"{where}[{i}]", kinds) for i, part in enumerate(content))


def joined_parts(content: Any, where: str, kinds: Collection[str] = ("text",)) -> str | list[Any]:
    """Return the content of a message of chat: as ``joined_text``, or a list if it has images."""
    if not isinstance(content, list):
        return joined_text(content, where, kinds)
    places = [(part, f"{where}[{i}]") for i, part in enumerate(content)]
    return joined([PartAt(at, part) if is_image(part) else _text(part, at, kinds) for part, at in places])


def _text(part: Any, where: str, kinds: Collection[str]) -> str:
    fields = object_at(part, where)
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        text = f"{where}.type must be one of {', '.join(kinds)} (got {printable(kind)}): this server reads text only"
        raise InvalidRequest(text, f"{where}.type", "unsupported")
    if kind == "input_json":
        return encoded(fields.get("data"), f"{where}.data").decode()
    return string_at(fields, "text" if "text" in fields else kind, where)
