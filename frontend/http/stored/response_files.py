"""Stored responses, and those that still run in the background, as files that outlive their front end.

They are in the server's private directory, which all of its front ends share and which ends with the server. A file is
a list of parts: the response, and what was appended to it.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from quire.frontend.http.stored.stored_response import BegunResponse, StoredResponse
from quire.frontend.ids import front_end_of
from quire.protocol.process.log import event_logger

log = event_logger("http")

ID = re.compile(r"resp_[0-9a-f]{32}")
Kind = type[StoredResponse | BegunResponse]
SUFFIXES: dict[Kind, str] = {StoredResponse: "", BegunResponse: ".begun"}
SIZE_BYTES = 4
R = TypeVar("R", StoredResponse, BegunResponse)


class ResponseFiles:
    """The files of all front ends, of which this one writes its own."""

    def __init__(self, folder: Path | None = None, index: int = 0) -> None:
        """``folder``: None to keep nothing; ``index``: number of this front end."""
        self._folder, self._index = folder, index
        if folder is not None:
            folder.mkdir(mode=0o700, exist_ok=True)

    def write(self, response_id: str, response: StoredResponse) -> None:
        """Write a response that has ended; its images are left out."""
        try:
            self.begin(response_id, msgspec.structs.replace(response, images=())).close()
        except OSError as error:
            text = "a stored response is known to its front end only, and lost with it"
            log.warning(text, id=response_id, error=error.strerror)

    def begin(self, response_id: str, response: StoredResponse | BegunResponse) -> BinaryIO:
        """Write a response. Return its file, for ``append``.

        Raises:
            OSError: there is no room, and no file.
        """
        file = (self._path(response_id, type(response)) or Path(os.devnull)).open("wb", buffering=0)
        try:
            _write(file, msgspec.msgpack.encode(response))
        except OSError:  # a part of it would take the room of others until the server ends
            file.close()
            self.delete(response_id, type(response))
            raise
        return file

    def read(self, kind: type[R], tenant: int, response_id: str) -> R | None:
        """Return a response that has ended (StoredResponse), or one that has not (BegunResponse)."""
        path = self._path(response_id, kind)
        found = None if path is None else _read(path, kind)
        return found[0] if found is not None and found[0].tenant == tenant else None

    def own(self, kind: type[R]) -> Iterator[tuple[Path, R, list[bytes]]]:
        """Yield what this front end's predecessor has left, the oldest first: files, responses, what was appended."""
        paths = [] if self._folder is None else list(self._folder.glob(f"resp_*{SUFFIXES[kind]}"))
        own = [path for path in paths if path.suffix == SUFFIXES[kind] and front_end_of(path.stem) == self._index]
        for path in sorted(own, key=lambda path: path.stat().st_mtime_ns):
            if (found := _read(path, kind)) is not None:
                response, parts = found
                os.truncate(path, sum(SIZE_BYTES + len(part) for part in parts))  # more may be appended
                yield path, response, parts[1:]

    def delete(self, response_id: str, kind: Kind = StoredResponse) -> None:
        if (path := self._path(response_id, kind)) is not None:
            path.unlink(missing_ok=True)

    def _path(self, response_id: str, kind: Kind) -> Path | None:
        """Return the file of a response. None: there are none, or a client has invented the id."""
        if self._folder is None or ID.fullmatch(response_id) is None:
            return None
        return self._folder / (response_id + SUFFIXES[kind])


def append(file: BinaryIO, data: bytes) -> None:
    """Append a part. Without room, the file ends before it: what follows is lost with this front end."""
    if file.closed:
        return
    try:
        _write(file, data)
    except OSError as error:
        file.close()
        name, text = Path(file.name).stem, "the rest of a background response is computed again if its front end dies"
        log.warning(text, id=name, error=error.strerror)


def _write(file: BinaryIO, data: bytes) -> None:
    part = len(data).to_bytes(SIZE_BYTES) + data
    if file.write(part) < len(part):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _read(path: Path, kind: type[R]) -> tuple[R, list[bytes]] | None:
    """Return the response and all parts of a file. None: it has gone, or another process has damaged it."""
    try:
        parts = _parts(path)
        return (msgspec.msgpack.decode(parts[0], type=kind), parts) if parts else None
    except (msgspec.MsgspecError, ValueError):
        log.warning("a stored response is damaged, and lost", id=path.stem)
        return None


def _parts(path: Path) -> list[bytes]:
    """Return the parts of a file, but for a last one that is not whole: its process writes it still, or has died."""
    found = []
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # it was dropped, or has ended, meanwhile
        while len(head := file.read(SIZE_BYTES)) == SIZE_BYTES:
            part = file.read(size := int.from_bytes(head))
            found += [part] if len(part) == size else []
    return found
