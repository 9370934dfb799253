"""The table of docs/models.md about the causal models of transformers, as written and read."""

import ast
import re
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"

SECTIONS = {
    "equal": "equal: transformers' greedy tokens, and a prefix cache hit",
    "unequal": "unequal, which is a fault",
    "refused": "refused at start",
    "failing": "not tried, because transformers itself fails on a tiny checkpoint",
}
"""Outcomes and their titles."""

_TABLE = re.compile(r"<!-- matrix of transformers (\S+) -->\n(.*?)<!-- end of matrix -->\n", re.DOTALL)


class Outcome(NamedTuple):
    """One of ``SECTIONS``, and why it is not equal."""

    kind: str
    reason: str = ""


def read_table(page: str) -> tuple[str, list[tuple[str, Outcome]]]:
    """Return the version of transformers that the page's table is about, and its model types in order."""
    found = _TABLE.search(page)
    assert found is not None, f"{PAGE}: no table of causal models"
    version, table = found.groups()
    types: list[tuple[str, Outcome]] = []
    for kind, title in SECTIONS.items():
        for part in re.findall(rf"^\*\*\d+ {re.escape(title)}\*\*\n\n(.*?)\n\n", table, re.DOTALL | re.MULTILINE):
            for entry in re.split(r"^\* ", part, flags=re.MULTILINE):
                before, _, names = " ".join(entry.split()).rpartition(": ")
                types += [(name, Outcome(kind, before)) for name in re.findall(r"`([^`]+)`", names)]
    return version, types


def write_table(page: str, version: str, types: Mapping[str, Outcome]) -> str:
    """Return the page with another table."""
    lines = [f"<!-- matrix of transformers {version} -->"]
    for kind, title in SECTIONS.items():
        reasons: dict[str, list[str]] = defaultdict(list)
        for name, outcome in sorted(types.items()):
            if outcome.kind == kind:
                reasons[outcome.reason].append(f"`{name}`")
        if reasons:
            lines += [f"**{sum(map(len, reasons.values()))} {title}**", ""]
            for reason, names in sorted(reasons.items(), key=lambda each: (-len(each[1]), each[0])):
                entry = f"* {reason}: {', '.join(names)}" if reason else ", ".join(names)
                lines += textwrap.wrap(
                    entry, 100, subsequent_indent="  " * bool(reason), break_on_hyphens=False, break_long_words=False
                )
            lines += [""]
    text = "\n".join([*lines, "<!-- end of matrix -->\n"])
    return _TABLE.sub(lambda _: text, page)


def causal_types() -> list[str]:
    """Return the causal model types of the installed transformers, without importing it, which takes seconds."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py").read_text()
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Call):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if ast.unparse(targets[0]) == "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES":
                return sorted(name for name, _ in ast.literal_eval(statement.value.args[0]))
    raise AssertionError("transformers has no table of causal models")
