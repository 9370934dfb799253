"""The families of attacks in the table of ``tests/abuse/README.md``: the tests of each, and the number of mutations.

A family is a kind of hostile input; a mutation is one such input. The number after a test's name counts its parameters,
or the items of lists in its module that it loops over.
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
        stated: number of mutations in the page.
        lists: what the test loops over: sums and products of names and numbers. Empty: its parameters.
    """

    test: str
    stated: int
    lists: str = ""

    def num_mutations(self) -> int:
        """Raises LookupError if the test does not exist, or does not name the lists that are counted."""
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
    stated: int
    sources: list[Source]


def families(page: str) -> dict[str, Family]:
    """Families by number, from the table."""
    return {
        number: Family(
            title, int(stated), [Source(test, int(each), lists) for test, each, lists in SOURCE.findall(tests)]
        )
        for number, title, stated, tests in ROW.findall(page)
    }


def _length(module: ModuleType, source: str, name: str) -> int:
    if name.isdecimal():
        return int(name)
    name, _, fields = name.rstrip(")").partition("(")
    if not re.search(rf"\b{name}\b", source):
        raise LookupError(f"{module.__name__}: the test does not go through {name}")
    value = vars(module)[name]
    if fields:  # values out of range, for fields with a range
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
    """Return a test module as pytest has imported it, or import it without starting its fixtures."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    spec = importlib.util.spec_from_file_location(f"counted_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
