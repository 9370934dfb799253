"""The documents are true: every name in the tour and every linked page exists, and commands are targets of make."""

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from sources import PACKAGES, ROOT, Source

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def facts(source: Source) -> dict[str, Any]:
    """Return the links of a page, and what else the rule compares: the tour's stops, commands, names of a module."""
    name = source.name
    if source.is_python:
        return {"names": sorted(_names(source))} if source.package != "tests" else {}
    if name == "docs/tour.md":
        return _links(source) | {"stops": re.findall(r"`([\w/]+\.py):([\w.]+)`", source.text)}
    if name == "Makefile":
        return {"targets": re.findall(r"^([a-z-]+):.*## ", source.text, re.MULTILINE)}
    if name in (".ci/run", ".github/workflows/tests.yml"):
        return {"commands": re.findall(r"^(?: +run: )?make (\S+)$", source.text, re.MULTILINE)}
    if name in ("README.md", "CONTRIBUTING.md"):
        return _links(source) | {"commands": re.findall(r"(?:`|^ {4})make ([a-z-]+)", source.text, re.MULTILINE)}
    return _links(source)


def _links(source: Source) -> dict[str, Any]:
    path = PurePosixPath(source.name)
    is_page = path.suffix == ".md" and (len(path.parts) == 1 or path.parts[0] == "docs" or path.name == "README.md")
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", source.text) if is_page else []
    return {"links": links} if links else {}


def _names(source: Source) -> set[str]:
    """Return the functions and classes of a file; methods as ``Class.method`` and by themselves."""
    found: set[str] = set()
    for node in source.nodes:
        if isinstance(node, FUNCTIONS | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{method.name}" for method in node.body if isinstance(method, FUNCTIONS)}
    return found


def problems(facts: dict[str, dict[str, Any]]) -> Iterator[str]:
    for page, of in facts.items():
        for target in of.get("links", ()):
            if not ((ROOT / page).parent / target).exists():
                yield f"{page}: the link {target} leads to no file"
    stops = facts["docs/tour.md"]["stops"]
    if len(stops) < 15:
        yield f"docs/tour.md: {len(stops)} stops were found"
    for file, name in stops:
        if name not in facts.get(file, {}).get("names", ()):
            yield f"docs/tour.md: {file} has no {name}"
    targets = set(facts["Makefile"]["targets"])
    for command in ("serve", "test", "test-full"):
        if command not in targets or command not in facts["README.md"]["commands"]:
            yield f"make {command}: is not in both the Makefile and README.md"
    for script in (".ci/run", ".github/workflows/tests.yml"):
        if facts[script]["commands"] != ["test", "test-rest"]:
            yield f"{script}: runs other commands than make test and make test-rest"
    for command in sorted({"test", "test-full", "lint", *facts["CONTRIBUTING.md"]["commands"]} - targets):
        yield f"CONTRIBUTING.md: the Makefile has no target {command}"
    yield from (
        f"{package}/README.md: is missing" for package in PACKAGES if not (ROOT / package / "README.md").exists()
    )
