"""Folders of one process: private, locked while it lives, and removed after it."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

NEW = ".new"
ENDED = ".ended"
"""Ends the name of a folder that is being removed."""
LOCK = "lock"
"""A file in the folder that its owner keeps locked. If it is unlocked, the owner has exited."""


def make_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """Remove the folders of killed owners; return a new one of mode 0700, and a descriptor of its lock.

    It has its name once it is locked, so that a folder without a lock is never that of a living owner.
    """
    for folder in parent.glob(f"{prefix}*"):
        _remove_if_abandoned(folder)
    while True:
        fresh = Path(tempfile.mkdtemp(prefix=prefix, suffix=NEW, dir=parent))  # mkdtemp makes it 0700
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # another start has just removed it
            lock = os.open(fresh / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fresh.rename(fresh.with_suffix("")), lock


def remove_folder(folder: Path, lock: int = -1) -> None:
    """Remove a folder to which other processes may still write: they no longer find it by its name.

    May be called twice. If all callers are killed meanwhile, the next start finds it by its new name.

    Args:
        lock: descriptor that is closed; -1: another process has it.
    """
    if lock >= 0:
        with contextlib.suppress(OSError):
            os.close(lock)
    ended = folder.with_name(folder.name + ENDED)
    with contextlib.suppress(OSError):  # another process was first, and may end before it has removed all
        # Renamed before it is removed, in one step: a process that still creates a socket meanwhile fails, instead of
        # leaving a half-removed folder that looks like a running server's.
        folder.rename(ended)
    shutil.rmtree(ended, ignore_errors=True)


def _remove_if_abandoned(folder: Path) -> None:
    """Remove a folder of this user whose lock no process holds, or whose removal or start was cut off."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return
        if folder.suffix == ENDED:
            shutil.rmtree(folder, ignore_errors=True)
        elif folder.suffix == NEW:
            with contextlib.suppress(OSError):  # it has a lock
                folder.rmdir()
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    else:
        remove_folder(folder)
    finally:
        os.close(lock)
