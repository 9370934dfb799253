"""Typed look-ups in decoded JSON, with errors that name the file and the field."""

import json
from pathlib import Path
from typing import Any, TypeVar

from quire.protocol.errors import ConfigError, printable

MAX_JSON_BYTES = 64 * 2**20

Value = TypeVar("Value", dict[str, Any], list[Any])


class Fields:
    """A JSON object. ``where`` is the prefix of every error. A null field counts as absent."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def has(self, name: str) -> bool:
        return self.raw.get(name) is not None

    def part(self, name: str) -> "Fields":
        """Return the object in a field, without any field if it is absent."""
        value = self.raw.get(name)
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}: {name} must be an object (got {printable(value)})")
        return Fields(value, f"{self.where}: {name}")

    def size(self, name: str, *, default: int | None = None, low: int = 1, high: int = 2**20) -> int:
        value = self.raw.get(name)
        if value is None and default is not None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{self.where}: {name} must be an integer from {low} to {high} (got {printable(value)})")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise ConfigError(f"{self.where}: {name} must be a positive number (got {printable(value)})")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return self.number(name, 1.0) if self.has(name) else None

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {name} must be true or false (got {printable(value)})")
        return value

    def numbers(self, name: str, count: int) -> list[float]:
        """Return a list of ``count`` positive numbers."""
        value = self.raw.get(name)
        if not isinstance(value, list) or len(value) != count or not all(_is_number(n) and 0 < n < 1e12 for n in value):
            raise ConfigError(f"{self.where}: {name} must be a list of {count} positive numbers")
        return [float(n) for n in value]

    def integers(self, name: str, high: int) -> list[int]:
        """Return a list of integers from 0 to ``high``; empty if the field is absent."""
        value = self.raw.get(name)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(type(n) is int and 0 <= n <= high for n in value):
            raise ConfigError(f"{self.where}: {name} must be a list of integers from 0 to {high}")
        return list(value)

    def choice(self, name: str, value: object, known: tuple[str, ...]) -> str:
        if not isinstance(value, str) or value not in known:
            raise ConfigError(
                f"{self.where}: {name} {printable(value)} is not supported; supported: {', '.join(known)}"
            )
        return value


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ConfigError: the file is not a JSON object, or larger than MAX_JSON_BYTES.
    """
    return _read_value(path, dict, "object")


def read_json_list(path: Path) -> list[Any]:
    """Read a JSON array from a file.

    Raises:
        ConfigError: the file is not a JSON array, or larger than MAX_JSON_BYTES.
    """
    return _read_value(path, list, "array")


def _read_value(path: Path, kind: type[Value], named: str) -> Value:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ConfigError(f"{path}: has more than {MAX_JSON_BYTES} bytes")
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {' '.join(str(error).split())}") from None
    if not isinstance(raw, kind):
        raise ConfigError(f"{path}: must hold a JSON {named}")
    return raw


def token_ids(value: Any, where: str) -> list[int]:
    """Return a list from a token id, a list of token ids or None."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ConfigError(f"{where} must be a token id or a list of token ids (got {printable(value)})")
    return list(ids)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
