"""The declarations of a struct of settings as data, for flags, documentation, conversion and range checks."""

import inspect
import re
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from quire.launch.config.sizes import FORMS, parse_size
from quire.protocol.errors import ConfigError, printable
from quire.protocol.settings import Setting

T = TypeVar("T", bound=msgspec.Struct)
PLAIN_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


class Declared(NamedTuple):
    """One setting. ``kind`` is its type without the annotation and without None."""

    name: str
    kind: Any
    default: Any
    setting: Setting

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def metavar(self) -> str:
        return self.setting.metavar or self.setting.unit.upper()

    @property
    def allowed(self) -> str:
        """What a value must be, in words."""
        if self.setting.unit:
            return FORMS[self.setting.unit]
        if get_origin(self.kind) is Literal:
            return f"one of {', '.join(get_args(self.kind))}"
        if get_origin(self.kind) is list:
            return "a list of strings"
        return PLAIN_KINDS.get(self.kind, "an object")

    @property
    def default_text(self) -> str:
        if self.setting.default:
            return self.setting.default
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return "none" if self.default is None else str(self.default)


def declared(options: type[msgspec.Struct]) -> list[Declared]:
    """Return a struct's settings grouped by topic; within a topic, those of the subclass before those of its base."""
    hints = get_type_hints(options, include_extras=True)
    defaults = {field.name: field.default for field in msgspec.structs.fields(options)}
    names = [name for each in options.__mro__ for name in inspect.get_annotations(each)]
    found = [
        Declared(name, _kind(get_args(hints[name])[0]), defaults[name], setting)
        for name in names
        if get_origin(hints[name]) is Annotated
        for setting in hints[name].__metadata__
        if isinstance(setting, Setting)
    ]
    topics = list(dict.fromkeys(each.setting.topic for each in found))
    return sorted(found, key=lambda each: topics.index(each.setting.topic))


def _kind(hint: Any) -> Any:
    is_optional = get_origin(hint) in (Union, UnionType)
    return next(arg for arg in get_args(hint) if arg is not NoneType) if is_optional else hint


def convert(values: Mapping[str, Any], options: type[T], where: str) -> T:
    """Convert values by name to a struct of settings; sizes may be text.

    Raises:
        ConfigError: a value has the wrong type. ``where`` begins the message.
    """
    by_name = {each.name: each for each in declared(options)}
    found = {name: _number(by_name[name], value, where) for name, value in values.items()}
    try:
        return msgspec.convert(found, options)
    except msgspec.ValidationError as error:
        match = re.search(r"at `\$\.(\w+)", str(error))
        if match is None:
            raise ConfigError(f"{where}: {error}") from None
        name = match[1]
        shown = "" if name == "api_key" else f" (got {printable(found[name])})"
        raise ConfigError(f"{where}: {name} must be {by_name[name].allowed}{shown}") from None


def _number(each: Declared, value: Any, where: str) -> Any:
    """Return a size given as text as its number, and any other value as it is."""
    if not each.setting.unit or not isinstance(value, str):
        return value
    try:
        return parse_size(value, each.setting.unit)
    except ConfigError as error:
        raise ConfigError(f"{where}: {each.name} {error}") from None


def check_ranges(options: msgspec.Struct) -> None:
    """Raise ConfigError for a number outside its declared range, with flag, value and range."""
    for each in declared(type(options)):
        if each.setting.range is not None:
            check_range(each.name, getattr(options, each.name), *each.setting.range)


def check_needs(options: msgspec.Struct) -> None:
    """Raise ConfigError for a setting without the one that it needs."""
    for each in _changed(type(options), options):
        needed, _, why = each.setting.needs.partition(":")
        if needed and not getattr(options, needed):
            raise ConfigError(f"{each.flag} needs --{needed.replace('_', '-')}{':' * bool(why)}{why}")


def check_fit(options: msgspec.Struct, other: str, declaring: type[msgspec.Struct] | None = None) -> None:
    """Raise ConfigError for a setting that cannot be used with ``other``, one of the texts of ``Setting.not_with``.

    ``declaring``: the struct that declares the settings, if it is not that of ``options``.
    """
    for each in _changed(declaring or type(options), options):
        if other in each.setting.not_with:
            raise ConfigError(f"{each.flag} cannot be used with {other}")


def _changed(declaring: type[msgspec.Struct], options: msgspec.Struct) -> list[Declared]:
    """Return the settings that have another value than by default."""
    return [each for each in declared(declaring) if getattr(options, each.name) != each.default]


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(f"--{name.replace('_', '-')} must be from {low} to {high}, not {value}")
