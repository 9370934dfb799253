"""Which points of a matrix ``make test`` runs. The others are marked ``full`` and run in ``make test-full``."""

import os
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def thinned(values: Iterable[Any], keep: int) -> list[Any]:
    """Return all of ``values`` for a parametrize mark; ``keep`` of them, spread evenly, run in ``make test``. A tuple
    holds the values of several parameters. A value that already has a mark is not changed."""
    each = list(values)
    plain = [place for place, value in enumerate(each) if not getattr(value, "marks", ())]
    kept = {plain[number * len(plain) // keep] for number in range(keep)}
    return [_full(value) if place in plain and place not in kept else value for place, value in enumerate(each)]


def covering(*axes: Iterable[Any], pairs: bool = False) -> list[Any]:
    """Return the product of ``axes`` for a parametrize mark; in ``make test`` run the points that show each value of
    an axis once, or with ``pairs`` each pair of values."""
    values = [list(axis) for axis in axes]
    points = list(product(*(range(len(axis)) for axis in values)))
    shows = {point: set(combinations(enumerate(point), 2 if pairs else 1)) for point in points}
    left, kept = set().union(*shows.values()), set()
    while left:
        kept.add(best := max(points, key=lambda point: len(shows[point] & left)))
        left -= shows[best]
    named = {point: tuple(axis[at] for axis, at in zip(values, point, strict=True)) for point in points}
    return [named[point] if point in kept else _full(named[point]) for point in points]


def examples(number: int) -> int:
    """Return how many examples of hypothesis a test has: ``number``, or in ``make test`` a quarter, at least 15."""
    return max(15, number // 4) if is_default() else number


def is_default() -> bool:
    """Whether the tests of ``make test`` run alone."""
    return os.environ.get("QUIRE_TESTS_TIER") == "default"


def _full(value: Any) -> Any:
    if hasattr(value, "marks"):
        return value._replace(marks=(pytest.mark.full,))
    values = value if type(value) is tuple else (value,)  # a named value is one value
    return pytest.param(*values, marks=pytest.mark.full)
