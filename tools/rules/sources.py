"""The files of the repository, each read and parsed at most once for all rules."""

import ast
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tuple(sorted(link.name for link in (ROOT / "quire").iterdir() if link.is_symlink()))
TEXTS = {".py", ".md", ".cpp", ".h", ".js", ".css", ".toml", ".yml", ".yaml", ""}
HIDDEN = (".ci", ".github", ".pre-commit-config.yaml")
NOT_OURS = {"build", "__pycache__"}


class Source:
    """A file: its path below the root, its text, and what Python's parser makes of it."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.package = name.partition("/")[0]
        self.is_python = name.endswith(".py")
        self.is_product = self.is_python and self.package in PACKAGES

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))


def all_names(root: Path = ROOT) -> Iterator[str]:
    """Yield the paths of the files that have rules, in order."""
    tops = [root / name for name in HIDDEN if (root / name).exists()]
    tops += [path for path in root.iterdir() if not path.name.startswith(".") and path.name not in NOT_OURS]
    for top in sorted(tops):
        if top.is_file() and top.suffix in TEXTS:
            yield top.name
        elif not top.is_symlink():
            for folder, folders, files in os.walk(top):
                folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in NOT_OURS)
                below = Path(folder).relative_to(root).as_posix()
                yield from (f"{below}/{name}" for name in sorted(files) if Path(name).suffix in TEXTS)
