"""The families of abuse by the table of ``tests/abuse/README.md``: which tests try each, and how many mutations.

A family is a kind of hostile input; a mutation is one such input. Behind a test's name stands their number: of
its parameters, or of what it goes through in a loop, which are lists of its module.
"""

import importlib.util
import inspect
import math
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

TESTS = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (A\d+) \| ([^|]+) \| (\d+) \| (.+) \|$", re.MULTILINE)
SOURCE = re.compile(r"`([\w/]+\.py::[\w.]+)` (\d+)(?: = `([^`]+)`)?")


class Source(NamedTuple):
    """One test of a family.

    Attributes:
        test: file below ``tests/abuse`` or ``tests``, and the test in it.
        told: mutations, as the page says.
        lists: what the test goes through each time: sums and products of names and numbers. Empty: its parameters.
    """

    test: str
    told: int
    lists: str = ""

    def num_mutations(self) -> int:
        """Raises LookupError where there is no such test, or where it does not even name what is counted."""
        file, _, name = self.test.partition("::")
        module = _module(TESTS / (file if "/" in file else f"abuse/{file}"))
        if not self.lists:
            return _num_parameters(module, name)
        source = inspect.getsource(_test(module, name))
        return sum(
            math.prod(_length(module, source, factor.strip()) for factor in product.split("*"))
            for product in self.lists.split(" + ")
        )


class Family(NamedTuple):
    title: str
    told: int
    sources: list[Source]


def families(page: str) -> dict[str, Family]:
    """By number, as the table says."""
    return {
        number: Family(
            title, int(told), [Source(test, int(each), lists) for test, each, lists in SOURCE.findall(tests)]
        )
        for number, title, told, tests in ROW.findall(page)
    }


def _length(module: ModuleType, source: str, name: str) -> int:
    if name.isdecimal():
        return int(name)
    name, _, fields = name.rstrip(")").partition("(")
    if not re.search(rf"\b{name}\b", source):
        raise LookupError(f"{module.__name__}: the test does not go through {name}")
    value = vars(module)[name]
    if fields:  # of fields that have a range, what is outside of it
        return sum(len(each.outside()) for each in value if each.name in fields.split(", "))
    value = value() if callable(value) else value
    return value if isinstance(value, int) else len(value)


def _num_parameters(module: ModuleType, name: str) -> int:
    total = 1
    holder: Any = module
    for part in name.split("."):
        holder = _test(holder, part)
        marks = vars(holder).get("pytestmark", [])
        for mark in marks if isinstance(marks, list) else [marks]:
            if mark.name == "parametrize":
                total *= len(list(mark.args[1]))
    return total


def _test(holder: Any, name: str) -> Any:
    for part in name.split("."):
        if part not in vars(holder):
            raise LookupError(f"{holder.__name__} has no {part}")
        holder = vars(holder)[part]
    return holder


@cache
def _module(path: Path) -> ModuleType:
    """A test module as it is, or was, imported by pytest; its fixtures are not begun."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    spec = importlib.util.spec_from_file_location(f"counted_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
