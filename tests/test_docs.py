"""The pages that list flags and sampling parameters are those of the declarations."""

import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from matrix_page import PAGE, causal_types, read_table

ROOT = Path(__file__).parent.parent


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


def test_the_table_of_models_has_a_row_for_each_architecture() -> None:
    from quire.protocol.model.model_config import SUPPORTED_ARCHITECTURES

    rows = re.findall(r"^\|[^|]*\| (`\w+`[^|]*)\|[^|]*\| `\[", (ROOT / "docs/models.md").read_text(), re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert named >= set(SUPPORTED_ARCHITECTURES)


def test_the_table_of_transformers_names_each_causal_type_once() -> None:
    """Of another release ``tests/nightly/models/transformers_matrix.py`` shows the difference."""
    about, types = read_table(PAGE.read_text())
    if about != version("transformers"):
        pytest.skip(f"the table is about transformers {about}")
    assert sorted(name for name, _ in types) == causal_types()
    assert all(outcome.kind != "unequal" and (outcome.reason or outcome.kind == "equal") for _, outcome in types)


def test_three_files_name_the_same_minutes_for_make_test() -> None:
    places = {
        "README.md": r"`make test` takes about (\d+) minutes",
        "Makefile": r"default tests \(about (\d+) minutes",
        "CONTRIBUTING.md": r"\| `make test` \|[^|]*\| about (\d+) minutes",
    }
    found = [re.findall(form, " ".join((ROOT / file).read_text().split())) for file, form in places.items()]
    assert len(found[0]) == 1 and found == [found[0]] * 3
