"""The declarations of a struct of settings as data, for flags, documentation and range checks."""

import inspect
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from quire.protocol.errors import ConfigError
from quire.protocol.settings import Setting


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


def check_ranges(options: msgspec.Struct) -> None:
    """Raise ConfigError for a number outside its declared range, with flag, value and range."""
    for each in declared(type(options)):
        if each.setting.range is not None:
            check_range(each.name, getattr(options, each.name), *each.setting.range)


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(f"--{name.replace('_', '-')} must be from {low} to {high}, not {value}")
