"""The pages as a site: `make docs`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.full
def test_the_site_has_every_page_and_no_broken_link(tmp_path: Path) -> None:
    """In strict mode mkdocs refuses links and anchors that lead nowhere."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "mkdocs",
        "build",
        "-q",
        "-f",
        ROOT / "tools/site/mkdocs.yml",
        "-d",
        tmp_path,
    ]
    done = subprocess.run(command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    home = (tmp_path / "index.html").read_text()
    places = [*(f"docs/{page.stem}/" for page in ROOT.glob("docs/*.md") if page.stem != "README"), "scheduler_proc/kv/"]
    assert all((tmp_path / place / "index.html").is_file() for place in places)
    listed = (ROOT / "tools/site/mkdocs.yml").read_text()
    assert all(f"docs/{page.name}" in listed for page in ROOT.glob("docs/*.md")), "a page is not in the navigation"
    assert 'href="scheduler_proc/kv/"' in home
    (style,) = re.findall(r'href="(assets/stylesheets/main[^"]*)"', home)
    assert (tmp_path / style).is_file()
    assert 'id="quire.launch.offline.llm.LLM.generate"' in (tmp_path / "docs/api/index.html").read_text()
    assert (tmp_path / "docs/tour/index.html").read_text().count('class="mermaid"') > 0
