"""Which points of a matrix ``make test`` tries. The others are marked ``full`` and wait for ``make test-full``."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(values: Iterable[Any], keep: int) -> list[Any]:
    """All of ``values`` for a parametrize mark; ``keep`` of them, spread evenly, run in ``make test``."""
    each = list(values)
    kept = {place * len(each) // keep for place in range(keep)}
    return [value if place in kept else _full(value) for place, value in enumerate(each)]


def _full(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "marks"):
        return value._replace(marks=(*value.marks, pytest.mark.full))
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.full)
