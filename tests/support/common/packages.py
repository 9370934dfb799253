"""The packages of the project: the folders that ``quire/`` has a link to."""

from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = tuple(sorted(link.name for link in (ROOT / "quire").iterdir() if link.is_symlink()))
