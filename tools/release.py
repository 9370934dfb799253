"""Prints the version of the project, or its notes in CHANGELOG.md, for `.github/workflows/release.yml`."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def version() -> str:
    (found,) = re.findall(r'^__version__ = "(.*)"$', (ROOT / "quire/version.py").read_text("utf-8"), re.MULTILINE)
    return str(found)


def notes() -> str:
    """Return the text about the version, without its lists of changes. Exits with status 1 if there is none."""
    sections = re.split(r"^## \[", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)
    found = next((text for text in sections if text.startswith(f"{version()}]")), None)
    if found is None:
        sys.exit(f"error: CHANGELOG.md has no section [{version()}]")
    return found.partition("\n")[2].partition("\n### ")[0].strip()


if __name__ == "__main__":
    print({"version": version, "notes": notes}[sys.argv[1]]())
