"""Names of adapters, and the table of those that all front ends of a server share."""

import contextlib
import fcntl
from collections.abc import Callable
from pathlib import Path

import msgspec

from quire.protocol.errors import printable

MAX_NAME_CHARS = 256
MAX_NAMES = 4096
"""Names in the table, which is read as a whole after each change. Adapters of ``--lora-dir`` are not in it."""

Identity = tuple[int, int, int, int]


class NamedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter under one of its names.

    Attributes:
        path: its folder, absolute.
        digest: SHA-256 of its content.
        rank: its highest rank.
        num_bytes: bytes of its weights.
        created: when it got this name, in seconds of the epoch.
    """

    name: str
    path: str
    digest: bytes
    rank: int
    num_bytes: int
    created: int = 0


def name_problem(name: str) -> str:
    """Return what is wrong with the name of an adapter, or ""."""
    if 1 <= len(name) <= MAX_NAME_CHARS and name.isprintable() and name[0] not in "./" and "\\" not in name:
        return ""
    allowed = f'1 to {MAX_NAME_CHARS} printable characters without "\\", and not begin with a dot or "/"'
    return f"the name of an adapter must have {allowed} (got {printable(name)})"


def file_identity(path: Path) -> Identity:
    """Return what changes when a file is written or replaced: device, inode, size and time of the last change."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class NameTable:
    """A file with the adapters of a server by name. Any process of the server may change it; thread-safe.

    A change replaces the file as a whole under a lock, which ends with the process that holds it. The death of a front
    end therefore loses no name, and leaves no half of a table.
    """

    def __init__(self, path: Path) -> None:
        """``path``: in a private directory of the server. No file: an empty table."""
        self._path = path
        self._read: tuple[Identity | None, dict[str, NamedAdapter]] = (None, {})

    def names(self) -> dict[str, NamedAdapter]:
        """Return the table by name, which the caller does not change. The file is read if it was replaced."""
        try:
            identity = file_identity(self._path)
        except FileNotFoundError:
            return {}
        known, names = self._read
        if known != identity:
            names = self._load()
            self._read = (identity, names)  # at once: other threads read it
        return names

    def change(self, edit: Callable[[dict[str, NamedAdapter]], None]) -> None:
        """Replace the table by what ``edit`` makes of it. If that raises, nothing is changed."""
        with self._path.with_suffix(".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            names = self._load()
            edit(names)
            written = self._path.with_suffix(".new")
            written.write_bytes(msgspec.msgpack.encode(list(names.values())))
            written.replace(self._path)

    def _load(self) -> dict[str, NamedAdapter]:
        data = b""
        with contextlib.suppress(FileNotFoundError):
            data = self._path.read_bytes()
        found = msgspec.msgpack.decode(data, type=list[NamedAdapter]) if data else []
        return {each.name: each for each in found}


def table_path(directory: Path) -> Path:
    """Return the table's file in the directory of a server."""
    return directory / "adapters"
