"""Folders in this user's cache, for what a later start need not compute again."""

import os
from contextlib import suppress
from pathlib import Path


def cache_path(name: str) -> Path:
    """Return the absolute path of one of Quire's cache folders, which may not exist. ``XDG_CACHE_HOME`` moves them.

    Raises:
        RuntimeError: there is no home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "quire" / name


def private_folder(name: str) -> Path:
    """Make one of Quire's cache folders if there is none, and return it: only this user may read or write it.

    Raises:
        OSError: it cannot be made, or others may use it.
        RuntimeError: there is no home folder.
    """
    folder = cache_path(name)
    for each in (folder.parent, folder):  # mkdir gives the folders above the last one the mode of the umask
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (info := folder.stat()).st_uid != os.getuid() or info.st_mode & 0o077:
        raise PermissionError(0, "others may use the folder", str(folder))
    return folder


def set_compiler_folder() -> None:
    """Give torch's compiler a cache folder. Call this before transformers is imported, which imports the compiler.

    The compiler then makes its folder, by default with a known name in the folder for temporary files, where it stays.
    """
    with suppress(RuntimeError, OSError):  # no home folder, or one that cannot be written: then by default
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(private_folder("inductor")))
