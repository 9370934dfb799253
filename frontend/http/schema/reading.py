"""Conversion of JSON objects to msgspec structs, and of msgspec's errors to InvalidRequest with field and range."""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from quire.frontend.http.schema.foreign_fields import UNSUPPORTED, check_supported
from quire.frontend.http.schema.unknown_fields import Ignored, unknown_field
from quire.protocol.errors import InvalidRequest, wrong_value

T = TypeVar("T", bound=msgspec.Struct)


def read(
    kind: type[T],
    raw: Mapping[str, Any],
    where: str = "",
    besides: Iterable[str] = (),
    *,
    ignored: Ignored | None = None,
) -> T:
    """Convert a JSON object to a struct. Nested objects stay dicts, which their own calls convert.

    Args:
        where: path of the field that holds the object, or "" for the whole body.
        besides: names of further allowed fields, which are dropped.
        ignored: gets unknown fields; None refuses them.

    Raises:
        InvalidRequest: a field is unknown (names the closest known one), missing, of a wrong type, or out of range.
    """
    given = members(kind, raw, where, besides, ignored=ignored)
    try:
        try:
            return msgspec.convert(given, kind)
        except UnicodeEncodeError:  # msgspec cannot write its error about a lone surrogate
            plain = {name: ascii(value) if isinstance(value, str) else value for name, value in given.items()}
            return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        # "Expected `int`, got `str` - at `$.seed`". The name is a known field: ``members`` has refused all others.
        name = re.findall(r"missing required field `(\w+)`|at `\$\.(\w+)", str(error))[0]
    field = name[0] or name[1]
    if name[0] and not where:
        raise InvalidRequest(f"{field} is required", field, "missing_required_parameter")
    place = f"{where}.{field}" if where else field
    allowed = _describe(_types(kind)[field])
    if name[0]:
        raise InvalidRequest(f"{place} is required, and must be {allowed}", place)
    value = given[field]
    if isinstance(value, str) and "characters" in allowed:
        raise InvalidRequest(f"{place} must be {allowed} (got {len(value)} characters)", place)
    raise wrong_value(place, allowed, value)


def members(
    kind: type[msgspec.Struct],
    raw: Mapping[str, Any],
    where: str,
    besides: Iterable[str] = (),
    *,
    ignored: Ignored | None = None,
) -> dict[str, Any]:
    """Return the known members of an object that are not null: null counts as absent, as in OpenAI's API.

    Raises:
        InvalidRequest: a member is neither a field of ``kind`` nor in ``besides``, and ``ignored`` does not take it, or
            it asks for something that is not supported.
    """
    known = _types(kind)
    prefix = f"{where}." if where else ""
    allowed = {*known, *besides}
    unknown = [name for name, value in raw.items() if name not in allowed and value is not None]
    if where in ("", "structured_outputs"):  # deeper, the names may be those of a schema or of a tool
        for name in unknown:
            check_supported(name, raw[name], prefix)
        unknown = [name for name in unknown if name not in UNSUPPORTED]
    if unknown:
        paths = [prefix + name for name in allowed]
        for name in unknown:
            if ignored is None:
                raise unknown_field(prefix + name, paths)
            ignored.add(prefix + name, paths)
    return {name: value for name, value in raw.items() if value is not None and name in known}


@cache
def _types(kind: type[msgspec.Struct]) -> dict[str, inspect.Type]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: field.type for field in info.fields}


def _describe(info: inspect.Type) -> str:
    match info:
        case inspect.Metadata(extra_json_schema={"description": str(description)}):
            return description
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return f"an integer from {info.ge} to {info.le}"
        case inspect.StrType(max_length=None):
            return "a string"
        case inspect.StrType():
            return f"a string of {info.min_length} to {info.max_length} characters"
        case inspect.ListType():
            return "a list of objects" if isinstance(info.item_type, inspect.DictType) else "a list of strings"
        case inspect.UnionType():
            kinds = [each for each in info.types if not isinstance(each, inspect.NoneType)]
            return " or ".join(map(_describe, kinds))
    return "an object"
