"""Reads the folders of adapters: what a front end needs of each, kept until one of its files changes."""

import errno
import threading
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from quire.frontend.adapters.names import Identity, NamedAdapter, file_identity
from quire.protocol.model.adapter import WEIGHTS, read_adapter
from quire.protocol.model.adapter_config import CONFIG, AdapterError
from quire.protocol.model.model_config import ModelConfig

MAX_KNOWN = 2**14
"""Folders whose outcome is kept; the least recently used one is forgotten."""


_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
_Files = tuple[Identity | None, ...]


class _Known(NamedTuple):
    files: _Files
    outcome: NamedAdapter | AdapterError


class AdapterReader:
    """Reads and checks adapters for one model. Thread-safe.

    An adapter that cannot be used is kept with its error, too, so that a client that repeats its request does not have
    the folder read again.
    """

    def __init__(self, model: ModelConfig, max_rank: int) -> None:
        self._model = model
        self._max_rank = max_rank
        self._lock = threading.Lock()
        self._known: OrderedDict[Path, _Known] = OrderedDict()

    def known(self, folder: Path) -> NamedAdapter | None:
        """Return the adapter in a folder if it was read before and its files have not changed, or None.

        Raises:
            FileNotFoundError: the folder does not exist.
            AdapterError: the adapter cannot be used, with its folder, the value and what is allowed.
        """
        return self._find(folder, _identities(folder))

    def read(self, folder: Path) -> NamedAdapter:
        """Return the adapter in a folder, under the folder's name. Its files are read unless they are known.

        Raises:
            FileNotFoundError, AdapterError: as ``known``.
        """
        files = _identities(folder)
        if (found := self._find(folder, files)) is not None:
            return found
        outcome: NamedAdapter | AdapterError
        try:
            adapter = read_adapter(folder, self._model, self._max_rank)
        except AdapterError as error:
            outcome = error.with_traceback(None)
        else:
            size = {"rank": adapter.rank, "num_bytes": adapter.num_bytes}
            outcome = NamedAdapter(name=folder.name, path=str(folder.resolve()), digest=adapter.digest, **size)
        if files == _identities(folder):  # it was not written meanwhile
            with self._lock:
                self._known.pop(folder, None)
                self._known[folder] = _Known(files, outcome)
                if len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
        return _adapter(outcome)

    def _find(self, folder: Path, files: _Files) -> NamedAdapter | None:
        with self._lock:
            known = self._known.get(folder)
            if known is not None:
                self._known.move_to_end(folder)
        return None if known is None or known.files != files else _adapter(known.outcome)


def _adapter(outcome: NamedAdapter | AdapterError) -> NamedAdapter:
    if isinstance(outcome, AdapterError):
        raise AdapterError(*outcome.args)
    return outcome


def _identities(folder: Path) -> _Files:
    """Return the identity of each file of an adapter, or None for one that is missing.

    Raises:
        FileNotFoundError, AdapterError: as ``AdapterReader.known``.
    """
    try:
        if not folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, "not found")
        return tuple(_identity(folder / name) for name in (CONFIG, WEIGHTS))
    except OSError as error:
        if error.errno in _MISSING:
            raise FileNotFoundError(errno.ENOENT, "not found") from None
        raise AdapterError(f"{folder}: cannot be read: {error.strerror or error}") from None


def _identity(path: Path) -> Identity | None:
    try:
        return file_identity(path)
    except OSError as error:
        if error.errno in _MISSING:
            return None
        raise
