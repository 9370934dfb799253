"""Each mermaid drawing of the pages, drawn by the newest release of mermaid in an installed chromium."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from browser import Browser, find_browser

PROGRAM = find_browser()
ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no chromium here: `make test-browser` installs it"),
]


def test_each_drawing_is_drawn(tmp_path: Path) -> None:
    packed = subprocess.run(["npm", "pack", "mermaid", "--silent"], cwd=tmp_path, capture_output=True, text=True)
    if packed.returncode:
        pytest.skip("the package registry is not reachable")
    subprocess.run(["tar", "-xzf", packed.stdout.strip()], cwd=tmp_path, check=True)
    assert PROGRAM is not None
    wrong = []
    with Browser(PROGRAM) as browser:
        browser.visit("data:text/html,<body></body>")
        browser.evaluate(
            (tmp_path / "package/dist/mermaid.min.js").read_text() + ";mermaid.initialize({startOnLoad: false})"
        )
        listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
        for page in listed.stdout.split():
            for number, drawing in enumerate(re.findall(r"```mermaid\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)):
                made = f"mermaid.render('d' + Math.random().toString(36).slice(2), {json.dumps(drawing)})"
                found = browser.evaluate(
                    f"{made}.then(({{ svg }}) => svg.length > 500 ? '' : svg, (error) => String(error))"
                )
                wrong += [f"{page} {number}: {found}"] if found else []
    assert wrong == []
