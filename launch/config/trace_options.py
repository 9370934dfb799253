"""The flags of traces and crash dumps. Their paths are made absolute before they are sent to the scheduler."""

import os
from pathlib import Path

from quire.protocol.errors import ConfigError

MIN_PART_BYTES = 65_536


def trace_path(path: str | None, max_bytes: int) -> str:
    """Return the absolute path of ``--trace``, or "". The scheduler checks that the file is writable.

    Raises:
        ConfigError: the folder does not exist, or ``--trace-max-bytes`` is out of range.
    """
    if max_bytes and not MIN_PART_BYTES <= max_bytes < 2**60:
        raise ConfigError(f"--trace-max-bytes must be 0 (one file) or at least {MIN_PART_BYTES}, not {max_bytes}")
    if not path:
        return ""
    absolute = Path(path).expanduser().absolute()
    if not absolute.parent.is_dir():
        raise ConfigError(f"--trace {path} cannot be written: {absolute.parent} is not a folder")
    return str(absolute)


def crash_dump_dir(path: str | None) -> str:
    """Return the folder of ``--crash-dump-dir`` (empty: none), by default one in the user's state folder.

    "" if the user has no home folder. The folder is created when the first dump is written.
    """
    if path is not None:
        return str(Path(path).expanduser().absolute()) if path else ""
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError:
        return ""
    return str(state.absolute() / "quire" / "crash-dumps")
