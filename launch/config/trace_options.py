"""The flags of traces and crash dumps, as absolute paths: the scheduler's process gets no relative one."""

import os
from pathlib import Path

from quire.protocol.errors import ConfigError

MIN_PART_BYTES = 65_536


def trace_path(path: str | None, max_bytes: int) -> str:
    """Return the absolute path of ``--trace``, or "". The scheduler, which writes the file, checks that it can.

    Raises:
        ConfigError: the folder is not there, or the size of ``--trace-max-bytes`` is too small to be meant.
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
    """Where ``--crash-dump-dir`` says (empty: nowhere), else in the user's folder of such things, if there is a user.

    It is made when it is needed.
    """
    if path is not None:
        return str(Path(path).expanduser().absolute()) if path else ""
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError:
        return ""
    return str(state.absolute() / "quire" / "crash-dumps")
