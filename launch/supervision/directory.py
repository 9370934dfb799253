"""Socket directories: private, locked while their owner lives, and removed after it."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from quire.protocol.errors import ConfigError
from quire.protocol.process.child import ENDED, remove_sockets

PREFIX = "quire-"
NEW = ".new"
SHORT = "/tmp"
MAX_PARENT_BYTES = 50
"""Sockets below a socket directory add up to 55 bytes, and the path of a socket has at most 107."""
LOCK = "lock"
"""A file in the socket directory that its owner keeps locked. If it is unlocked, the owner has exited."""


def make_directory() -> tuple[Path, int]:
    """Remove the directories of killed owners; return a new directory of mode 0700, and a descriptor of its lock.

    It has its name once it is locked, so that a directory without a lock is never that of a living owner.
    """
    parent = parent_of_sockets()
    for directory in Path(parent).glob(f"{PREFIX}*"):
        _remove_if_abandoned(directory)
    while True:
        fresh = Path(tempfile.mkdtemp(prefix=PREFIX, suffix=NEW, dir=parent))  # mkdtemp makes it 0700
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # another start has just removed it
            lock = os.open(fresh / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fresh.rename(fresh.with_suffix("")), lock


def parent_of_sockets() -> str:
    """Return the folder of temporary files, or /tmp if sockets in that one would have too long paths."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) <= MAX_PARENT_BYTES:
        return folder
    if not os.access(SHORT, os.W_OK | os.X_OK):
        text = f"TMPDIR must have at most {MAX_PARENT_BYTES} bytes for sockets (got {folder})"
        raise ConfigError(f"{text}: choose a shorter folder, because {SHORT} is not writable")
    return SHORT


def remove_directory(directory: Path, lock: int) -> None:
    """Remove a directory and release its lock; ``lock``: -1 if another process has it. May be called twice."""
    if lock >= 0:
        with contextlib.suppress(OSError):
            os.close(lock)
    remove_sockets(directory)


def _remove_if_abandoned(directory: Path) -> None:
    """Remove a directory of this user whose lock no process holds, or whose removal or start was cut off."""
    try:
        if directory.is_symlink() or directory.stat().st_uid != os.getuid():
            return
        if directory.suffix == ENDED:
            shutil.rmtree(directory, ignore_errors=True)
        elif directory.suffix == NEW:
            with contextlib.suppress(OSError):  # it has a lock
                directory.rmdir()
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    else:
        remove_sockets(directory)
    finally:
        os.close(lock)
