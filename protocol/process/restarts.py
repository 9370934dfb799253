"""Restarts of the engine's processes since it started, counted by the supervisor, which outlives all others."""

from pathlib import Path

import msgspec

FILE = "restarts"


class Restarts(msgspec.Struct):
    """Number of restarts. A worker group counts once for all its ranks."""

    scheduler: int = 0
    worker: int = 0
    frontend: int = 0


def write_restarts(directory: Path, restarts: Restarts) -> None:
    """Replace the file in the socket directory; readers see the old or the new one."""
    fresh = directory / f"{FILE}.new"
    fresh.write_bytes(msgspec.json.encode(restarts))
    fresh.replace(directory / FILE)


def read_restarts(directory: Path) -> Restarts:
    """Return the counts; all 0 if nothing was restarted so far."""
    try:
        return msgspec.json.decode((directory / FILE).read_bytes(), type=Restarts)
    except (OSError, msgspec.DecodeError):
        return Restarts()
