"""Parses the text of a ``--set`` to the type of its setting."""

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from quire.launch.config.sizes import parse_size
from quire.protocol.errors import ConfigError
from quire.protocol.settings import Setting

WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NOTHING = ("", "~", "null", "none")


def parse_setting(name: str, text: str, hint: Any) -> Any:
    """Parse ``text`` to the type ``hint``, with YAML's words for booleans and null. A list may omit its brackets.

    Raises:
        ConfigError: wrong type; names the key and the expected type.
    """
    alternatives = _alternatives(hint)
    if type(None) in alternatives and text.lower() in NOTHING:
        return None
    kind = next(each for each in alternatives if each is not type(None))
    if get_origin(kind) is Literal:
        return _choice(name, text, get_args(kind))
    if kind is bool:
        if text.lower() not in WORDS:
            raise ConfigError(f"--set {name} must be true or false (got {text!r})")
        return WORDS[text.lower()]
    unit = _unit(hint)
    if unit:
        return _size(name, text, unit)
    if kind in (int, float):
        return _number(name, text, kind)
    return text if kind is str else _structure(name, text, kind)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _unit(hint: Any) -> str:
    """Return what the setting counts, if it may be given as a size."""
    more = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((each.unit for each in more if isinstance(each, Setting)), "")


def _size(name: str, text: str, unit: str) -> int:
    try:
        return parse_size(text, unit)
    except ConfigError as error:
        raise ConfigError(f"--set {name} {error}") from None


def _choice(name: str, text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise ConfigError(f"--set {name} must be one of {', '.join(choices)} (got {text!r})")
    return text


def _number(name: str, text: str, kind: Any) -> int | float:
    try:
        number: int | float = kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(f"--set {name} must be {what} (got {text!r})") from None
    return number


def _structure(name: str, text: str, kind: Any) -> Any:
    try:
        if get_origin(kind) is list and not text.startswith("["):
            return msgspec.convert([part.strip() for part in text.split(",")], kind, strict=False)
        return msgspec.json.decode(text.encode(), type=kind)
    except (msgspec.DecodeError, RecursionError):
        raise ConfigError(f"--set {name} must be JSON (got {text[:64]!r})") from None
