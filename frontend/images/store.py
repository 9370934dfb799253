"""Files of images and given embeddings in shared memory, each as long as its object is referenced."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import TypeVar

from quire.frontend.images.refused import Refused
from quire.frontend.images.source import StoredImage, StoredRows

PREFIX = "quire-items-"
SHARED_MEMORY = Path("/dev/shm")
KEPT_PART = 4
"""Files of this part of the memory are kept for later requests, such as the next turn of a conversation."""

Stored = TypeVar("Stored", StoredImage, StoredRows)


class ItemStore:
    """The files of one process. Thread-safe.

    Its folder is locked while the process lives, and removed with it; what a killed process left is removed by the next
    one that starts.
    """

    def __init__(self, max_bytes: int, parent: Path | None = None) -> None:
        """Args:
        max_bytes: size of all files at which new ones are refused.
        parent: folder for the folder; None: shared memory if it has room for ``max_bytes``, else that of temporary
            files (a container has 64 MB of shared memory by default).
        """
        self._max_bytes = max_bytes
        self._folder, lock = _make_folder(parent or _place(max_bytes))
        self._lock = threading.Lock()
        self._num_files = 0
        self._stored: weakref.WeakValueDictionary[bytes, StoredImage | StoredRows] = weakref.WeakValueDictionary()
        self._by_content: weakref.WeakValueDictionary[bytes, StoredImage] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[bytes, StoredImage] = OrderedDict()
        self.close = weakref.finalize(self, _remove_folder, self._folder, lock, os.getpid())

    def new_path(self) -> str:
        """Return a path for a new file. Raises Refused if there is no room."""
        with self._lock:
            if self._num_bytes() >= self._max_bytes:
                self._kept.clear()
            if self._num_bytes() >= self._max_bytes:
                raise Refused("cannot be read now, because images of other requests fill the memory", is_busy=True)
            self._num_files += 1
            return str(self._folder / str(self._num_files))

    def known(self, content: bytes) -> StoredImage | None:
        """Return the image of a file's content (its hash) if it is still stored."""
        with self._lock:
            found = self._by_content.get(content)
            if found is not None:
                self._keep(found)
            return found

    def add(self, made: Stored, content: bytes = b"") -> Stored:
        """Own the file of an item. Return the stored item with its digest, which may be another one.

        ``content``: hash of an image's file; the image is then kept for a while.
        """
        with self._lock:
            found = self._stored.get(made.digest)
            if isinstance(found, type(made)):
                remove_file(made.path)
                made = found
            else:
                self._stored[made.digest] = made
                weakref.finalize(made, _remove_own, made.path, os.getpid())
            if isinstance(made, StoredImage):
                self._by_content[content] = made
                self._keep(made)
            return made

    def _keep(self, image: StoredImage) -> None:
        self._kept[image.digest] = image
        self._kept.move_to_end(image.digest)
        while sum(each.num_bytes for each in self._kept.values()) > self._max_bytes // KEPT_PART:
            self._kept.popitem(last=False)

    def _num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._stored.values())


def remove_file(path: str) -> None:
    with contextlib.suppress(OSError):
        Path(path).unlink()


def _remove_own(path: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a process that a user's program forked
        remove_file(path)


def _remove_folder(folder: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _place(max_bytes: int) -> Path:
    with contextlib.suppress(OSError):
        if os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free >= max_bytes:
            return SHARED_MEMORY
    return Path(tempfile.gettempdir())


def _make_folder(parent: Path) -> tuple[Path, int]:
    """Remove the folders of killed processes; return a new one of mode 0700, and the descriptor that locks it."""
    for left in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # locked, removed, a link, or of another user
            if left.lstat().st_uid == os.getuid():
                _remove_folder(left, _lock(left), os.getpid())
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # another start is removing it
            lock = _lock(folder)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _lock(folder: Path) -> int:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock
