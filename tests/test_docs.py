"""The documents are true: every name in the tour exists, and the README's commands are targets of the Makefile."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import packages

ROOT = Path(__file__).parent.parent
PACKAGES = (*packages.PACKAGES, "tests", "tools")


def _names(file: Path) -> set[str]:
    """Return the functions and classes of a file; methods as ``Class.method`` and by themselves."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


def test_every_stop_of_the_tour_exists() -> None:
    stops = re.findall(r"`([\w/]+\.py):([\w.]+)`", (ROOT / "docs/tour.md").read_text())
    assert len(stops) >= 15
    for file, name in stops:
        assert (ROOT / file).is_file(), file
        assert name in _names(ROOT / file), f"{file}:{name}"


def test_every_linked_page_exists() -> None:
    for page in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *(page for package in PACKAGES for page in (ROOT / package).rglob("README.md")),
    ]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_the_commands_are_in_makefile_readme_and_workflow() -> None:
    makefile, readme = (ROOT / "Makefile").read_text(), (ROOT / "README.md").read_text()
    for command in ("serve", "test", "test-full"):
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)
        assert f"make {command}" in readme
    for script in (".ci/run", ".github/workflows/tests.yml"):
        commands = re.findall(r"^(?: +run: )?make (\S+)$", (ROOT / script).read_text(), re.MULTILINE)
        assert commands == ["test", "test-rest"], script


def test_targets_named_for_contributors_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text()))
    assert {"test", "test-full", "lint"} <= named <= targets


def test_the_tables_of_flags_are_those_of_the_declarations(tmp_path: Path) -> None:
    """To update: ``python -P tools/flags_page.py docs/flags.md docs/sampling.md``."""
    copies = [Path(shutil.copy(ROOT / f"docs/{name}.md", tmp_path)) for name in ("flags", "sampling")]
    pages = [copy.read_text() for copy in copies]
    subprocess.run([sys.executable, "-P", ROOT / "tools/flags_page.py", *copies], check=True)
    assert [copy.read_text() for copy in copies] == pages
    assert all("<!-- end -->" in page for page in pages)


def test_each_flag_is_documented() -> None:
    from quire.frontend.serve_options import ServeOptions
    from quire.launch.config.options import EngineOptions

    page = (ROOT / "docs/flags.md").read_text().replace("[no-]", "")
    for options in (EngineOptions, ServeOptions):
        for name in options.__struct_fields__:
            if name != "model":
                assert f"--{name.replace('_', '-')}" in page, name
