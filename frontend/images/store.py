"""Files of images and given embeddings in shared memory, each as long as its object is referenced."""

import contextlib
import os
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.frontend.images.refused import Refused
from quire.frontend.images.source import StoredItem
from quire.protocol.process.owned_folder import make_folder, remove_folder

PREFIX = "quire-items-"
SHARED_MEMORY = Path("/dev/shm")
KEPT_PART = 4
"""Files of this part of the memory are kept for later requests, such as the next turn of a conversation."""


class ItemStore:
    """The files of one process. Thread-safe. Its folder is removed with the process: see ``owned_folder.py``."""

    def __init__(self, max_bytes: int, parent: Path | None = None) -> None:
        """Args:
        max_bytes: size of all files at which new ones are refused.
        parent: folder for the folder; None: shared memory if it has room for ``max_bytes``, else that of temporary
            files (a container has 64 MB of shared memory by default).
        """
        self._max_bytes = max_bytes
        self._folder, lock = make_folder(parent or _place(max_bytes), PREFIX)
        self._lock = threading.Lock()
        self._num_files = 0
        self._stored: weakref.WeakValueDictionary[bytes, StoredItem] = weakref.WeakValueDictionary()
        self._by_content: weakref.WeakValueDictionary[bytes, StoredItem] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[bytes, StoredItem] = OrderedDict()
        self.close = weakref.finalize(self, _by_owner, os.getpid(), remove_folder, self._folder, lock)

    def new_path(self) -> str:
        """Return a path for a new file. Raises Refused if there is no room."""
        with self._lock:
            if self._num_bytes() >= self._max_bytes:
                self._kept.clear()
            if self._num_bytes() >= self._max_bytes:
                raise Refused("cannot be read now, because images of other requests fill the memory", is_busy=True)
            self._num_files += 1
            return str(self._folder / str(self._num_files))

    def known(self, content: bytes) -> StoredItem | None:
        """Return the image of a file or a data URL with this hash if it is still stored."""
        with self._lock:
            found = self._by_content.get(content)
            if found is not None:
                self._keep(found)
            return found

    def add(self, made: StoredItem, content: bytes = b"") -> StoredItem:
        """Own the file of an item. Return the stored item with its digest, which may be another one.

        ``content``: hash of an image's file or data URL; the image is then kept for a while.
        """
        with self._lock:
            found = self._stored.setdefault(made.digest, made)
            if found is made:
                weakref.finalize(made, _by_owner, os.getpid(), Path(made.path).unlink, True)
            else:
                Path(made.path).unlink(missing_ok=True)
            if content:
                self._by_content[content] = found
                self._keep(found)
            return found

    def _keep(self, image: StoredItem) -> None:
        self._kept[image.digest] = image
        self._kept.move_to_end(image.digest)
        while sum(each.num_bytes for each in self._kept.values()) > self._max_bytes // KEPT_PART:
            self._kept.popitem(last=False)

    def _num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._stored.values())


def _by_owner(owner: int, remove: Callable[..., None], *args: Any) -> None:
    if os.getpid() == owner:  # not in a process that a user's program forked
        remove(*args)


def _place(max_bytes: int) -> Path:
    with contextlib.suppress(OSError):
        if os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free >= max_bytes:
            return SHARED_MEMORY
    return Path(tempfile.gettempdir())
