"""Socket directories: folders of their own in a parent whose path is short enough."""

import os
import tempfile
from pathlib import Path

from quire.protocol.errors import ConfigError
from quire.protocol.process.owned_folder import make_folder

PREFIX = "quire-"
SHORT = "/tmp"
MAX_PARENT_BYTES = 50
"""Sockets below a socket directory add up to 55 bytes, and the path of a socket has at most 107."""


def make_directory() -> tuple[Path, int]:
    """Return a new socket directory, and a descriptor of its lock, as ``make_folder``."""
    return make_folder(Path(parent_of_sockets()), PREFIX)


def parent_of_sockets() -> str:
    """Return the folder of temporary files, or /tmp if sockets in that one would have too long paths."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) <= MAX_PARENT_BYTES:
        return folder
    if not os.access(SHORT, os.W_OK | os.X_OK):
        text = f"TMPDIR must have at most {MAX_PARENT_BYTES} bytes for sockets (got {folder})"
        raise ConfigError(f"{text}: choose a shorter folder, because {SHORT} is not writable")
    return SHORT
