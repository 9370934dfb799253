"""Pages of the site: every Markdown file of the repository in its own folder, so that the links between them hold."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ("tests/", "tools/")
PACKAGES = (
    *("protocol", "scheduler_proc", "router_proc", "worker_proc", "kernels", "frontend", "launch", "replay", "bench"),
)
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")


def _tracked() -> list[Path]:
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, check=True, text=True).stdout
    return [Path(name) for name in listed.split("\0") if name]


def on_config(config: MkDocsConfig) -> None:
    """Put each package's pages into the navigation, those of its folders below it."""
    pages = [name for name in _tracked() if name.name == "README.md" and not str(name).startswith("quire/")]
    packages = []
    for package in PACKAGES:
        own = sorted(str(page) for page in pages if page.parts[0] == package and "assets" not in page.parts)
        packages.append({package: [{Path(page).parent.as_posix(): page} for page in own]})
    assert config.nav
    config.nav[-1] = {"Packages": packages}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of ``docs`` by those of the repository: pages, and what they link to."""
    found: dict[str, File] = {}

    def add(name: Path) -> None:
        place = name.as_posix()
        found[place] = File.generated(config, place, abs_src_path=str(ROOT / name))

    pages = [name for name in _tracked() if name.suffix == ".md" and not str(name).startswith(LEFT_OUT)]
    for page in pages:
        add(page)
        for link in LINK.findall((ROOT / page).read_text("utf-8")):
            target = (ROOT / page.parent / link).resolve()
            if target.is_file() and target.is_relative_to(ROOT):
                add(target.relative_to(ROOT))
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*of_theme, *found.values()])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to folders lead to their pages."""
    folder = (ROOT / page.file.src_uri).parent

    def led(match: re.Match[str]) -> str:
        target: Any = folder / match[0]
        return f"{match[0].rstrip('/')}/README.md" if (target / "README.md").is_file() else match[0]

    return LINK.sub(led, markdown)
