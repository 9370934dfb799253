"""Typed look-ups in a request's JSON object. Null counts as absent, as it does for OpenAI."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from quire.launch.http.schema.errors import shorten
from quire.protocol.errors import InvalidRequest, did_you_mean
from quire.protocol.request.sampling_params import check_int

Check: TypeAlias = Callable[[str, Any], object]


class Fields:
    """A decoded object; every look-up refuses a value of the wrong type with the field's name."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw

    def refuse_unknown(self, known: Iterable[str]) -> None:
        names = frozenset(known)
        for name in self._raw:
            if name not in names:
                word = name[:64]
                raise InvalidRequest(
                    f"unknown field {shorten(name)}{did_you_mean(word, names)}", word, "unknown_parameter"
                )

    def has(self, name: str) -> bool:
        return self._raw.get(name) is not None

    def get(self, name: str) -> Any:
        return self._raw.get(name)

    def require(self, name: str) -> Any:
        value = self._raw.get(name)
        if value is None:
            raise InvalidRequest(f"{name} is required", name, "missing_required_parameter")
        return value

    def integer(self, name: str, low: int, high: int, default: int) -> int:
        value = self._raw.get(name)
        return default if value is None else check_int(name, value, low, high)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._raw.get(name)
        return default if value is None else boolean(name, value)

    def string(self, name: str, default: str, *, max_length: int) -> str:
        value = self._raw.get(name)
        return default if value is None else string(name, value, 1, max_length)

    def present(self, names: Iterable[str]) -> dict[str, Any]:
        """Those of the named fields that have a value."""
        return {name: self._raw[name] for name in names if self._raw.get(name) is not None}

    def check(self, checks: Mapping[str, Check]) -> None:
        """Look at fields that are accepted and not used: a wrong type is refused all the same."""
        for name, check in checks.items():
            if self.has(name):
                check(name, self._raw[name])


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false", name)
    return value


def string(name: str, value: Any, min_length: int = 0, max_length: int = 2**25) -> str:
    if not isinstance(value, str) or not min_length <= len(value) <= max_length:
        raise InvalidRequest(f"{name} must be a string of {min_length} to {max_length} characters", name)
    return value


def anything(name: str, value: Any) -> None:
    """For fields whose value has many forms and no effect."""


def any_object(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object", name)


def string_or_object(name: str, value: Any) -> None:
    if not isinstance(value, str | dict):
        raise InvalidRequest(f"{name} must be a string or an object", name)


def objects(name: str, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidRequest(f"{name} must be a list of objects", name)


def strings(name: str, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidRequest(f"{name} must be a list of strings", name)
