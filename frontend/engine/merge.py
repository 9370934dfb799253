"""The statistics of several engines as those of one."""

from functools import reduce
from typing import Any

import msgspec

from quire.protocol.wire.front_end_messages import Histogram, Statistics

MAX_REQUESTS = 100
"""Most requests of the merged list, the oldest."""
LARGEST = ("query", "block_size", "pin_seconds")
"""Fields that are no sums: the largest value counts."""


def merge_statistics(parts: list[Statistics]) -> Statistics:
    """Return the sums; ``parts`` must not be empty. ``done`` if all are."""
    return reduce(_merged, parts)


def _merged(one: Statistics, other: Statistics) -> Statistics:
    values: dict[str, Any] = {}
    for name in Statistics.__struct_fields__:
        a, b = getattr(one, name), getattr(other, name)
        if name == "done":
            values[name] = a and b
        elif name == "requests":
            values[name] = sorted([*a, *b], key=lambda request: request.arrival)[:MAX_REQUESTS]
        elif name in LARGEST:
            values[name] = (
                {key: max(a.get(key, 0), b.get(key, 0)) for key in {**a, **b}} if isinstance(a, dict) else max(a, b)
            )
        elif isinstance(a, list):
            values[name] = _added_by_key([*a, *b])
        else:
            values[name] = _added(a, b)
    return Statistics(**values)


def _added_by_key(entries: list[Any]) -> list[Any]:
    """Return one entry for all that are about the same: their first values, which are texts or one number."""
    found: dict[tuple[Any, ...], Any] = {}
    for entry in entries:
        is_struct = isinstance(entry, msgspec.Struct)
        row = tuple(msgspec.structs.astuple(entry)) if is_struct else entry
        num_keys = max(sum(isinstance(value, str) for value in row), 1)
        key, rest = row[:num_keys], row[num_keys:]
        before = found.get(key)
        old = None if before is None else (msgspec.structs.astuple(before) if is_struct else before)[num_keys:]
        total = rest if old is None else tuple(map(_added, old, rest))
        found[key] = type(entry)(*key, *total) if is_struct else (*key, *total)
    return list(found.values())


def _added(a: Any, b: Any) -> Any:
    """Return the sum of two values of one field: of numbers, of the values of dicts, of the fields of structs."""
    if a is None or b is None:
        return a if b is None else b
    if isinstance(a, bool):
        return a or b
    if isinstance(a, dict):
        return {key: _added(a.get(key), b.get(key)) for key in {**a, **b}}
    if isinstance(a, Histogram):
        counts = [x + y for x, y in zip(a.counts, b.counts, strict=True)]
        return Histogram(a.bounds, counts, a.total + b.total)
    if isinstance(a, msgspec.Struct):
        return type(a)(*map(_added, msgspec.structs.astuple(a), msgspec.structs.astuple(b)))
    return a + b
