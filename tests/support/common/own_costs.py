"""Learned costs of loads that belong to one test."""

import os
import shutil
from pathlib import Path

import pytest


class OwnCosts:
    """Quire's cache folder with costs of its own; the rest, such as the native library, is shared.

    While costs are unknown, requests load what they find.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shared = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"
        own = folder / "quire"
        own.mkdir(mode=0o700, parents=True)
        for entry in shared.glob("*"):
            if entry.name != "costs":
                (own / entry.name).symlink_to(entry)
        self._costs = own / "costs"
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))

    def forget(self) -> None:
        """Let the next engine start without costs."""
        shutil.rmtree(self._costs, ignore_errors=True)
