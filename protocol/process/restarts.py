"""Files of the supervisor, which outlives all others, for the front ends: restarts, and the ids of all processes."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

FILE = "restarts"
PIDS_FILE = "pids"


class Restarts(msgspec.Struct):
    """Number of restarts. A worker group counts once for all its ranks, an engine once for all its processes."""

    scheduler: int = 0
    worker: int = 0
    frontend: int = 0
    engine: int = 0
    router: int = 0


def write_restarts(directory: Path, restarts: Restarts) -> None:
    replace_file(directory / FILE, restarts)


def write_pids(directory: Path, pids: Mapping[str, list[int]]) -> None:
    """Publish the ids of all processes of the engine by their role."""
    replace_file(directory / PIDS_FILE, pids)


def read_pids(directory: Path) -> dict[str, list[int]]:
    """Return the ids by role; none if they are not known yet."""
    try:
        return msgspec.json.decode((directory / PIDS_FILE).read_bytes(), type=dict[str, list[int]])
    except (OSError, msgspec.DecodeError):
        return {}


def replace_file(path: Path, content: object) -> None:
    """Replace a file in the socket directory; readers see the old or the new one."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(content))
    fresh.replace(path)


def read_restarts(directory: Path) -> Restarts:
    """Return the counts; all 0 if nothing was restarted so far."""
    try:
        return msgspec.json.decode((directory / FILE).read_bytes(), type=Restarts)
    except (OSError, msgspec.DecodeError):
        return Restarts()
