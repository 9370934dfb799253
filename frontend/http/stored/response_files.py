"""Stored responses, and those that still run in the background, as files that outlive their front end.

They are in the server's private directory, which all of its front ends share and which ends with the server.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from quire.frontend.http.stored.stored_response import StoredResponse
from quire.frontend.ids import front_end_of
from quire.protocol.process.log import event_logger

log = event_logger("http")

ID = re.compile(r"resp_[0-9a-f]{32}")
BEGUN, NEW = ".begun", ".new"
SIZE_BYTES = 4


class BegunResponse(msgspec.Struct, frozen=True):
    """What another front end needs to continue a background response.

    Attributes:
        tenant, client_id, headers: of the client that sent the request; without keys.
        body: the request, as JSON.
        created: when it was sent, in seconds since 1970.
        shown: the response as clients see it until it is continued, as JSON.
    """

    tenant: int
    client_id: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    created: int
    shown: bytes


class ResponseFiles:
    """The files of all front ends, of which this one writes its own."""

    def __init__(self, folder: Path | None = None, index: int = 0) -> None:
        """``folder``: None to keep nothing; ``index``: number of this front end."""
        self._folder, self._index = folder, index
        if folder is not None:
            folder.mkdir(mode=0o700, exist_ok=True)

    def write(self, tenant: int, response_id: str, response: StoredResponse) -> None:
        """Write a response that has ended; its images are left out."""
        if self._folder is None:
            return
        path = self._folder / response_id
        try:
            path.with_suffix(NEW).write_bytes(
                msgspec.msgpack.encode((tenant, msgspec.structs.replace(response, images=())))
            )
            path.with_suffix(NEW).rename(path)
        except OSError as error:  # it is in memory
            log.warning("a stored response is lost if its front end dies", id=response_id, error=error.strerror)

    def read(self, tenant: int, response_id: str) -> StoredResponse | None:
        found = None if self._path(response_id) is None else self._read(response_id)
        return found[1] if found is not None and found[0] == tenant else None

    def delete(self, response_id: str) -> None:
        if (path := self._path(response_id)) is not None:
            path.unlink(missing_ok=True)

    def end(self, response_id: str) -> None:
        """Delete what ``begin`` has written."""
        if (path := self._path(response_id, BEGUN)) is not None:
            path.unlink(missing_ok=True)

    def own(self) -> Iterator[tuple[str, int, StoredResponse]]:
        """Yield the responses of this front end's predecessor with their ids and tenants, the oldest first."""
        for response_id in self._own_ids(""):
            if (found := self._read(response_id)) is not None:
                yield response_id, *found

    def begin(self, response_id: str, begun: BegunResponse) -> BinaryIO | None:
        """Write a response that begins. Return the file, for ``append`` and its own ``close``.

        Raises:
            OSError: there is no room.
        """
        path = self._path(response_id, BEGUN)
        if path is None:
            return None
        append(file := path.open("ab", buffering=0), msgspec.msgpack.encode(begun))
        return file

    def begun(self, tenant: int, response_id: str) -> BegunResponse | None:
        """Return a response that has begun and not ended."""
        path = self._path(response_id, BEGUN)
        parts = [] if path is None else _parts(path)
        begun = msgspec.msgpack.decode(parts[0], type=BegunResponse) if parts else None
        return begun if begun is not None and begun.tenant == tenant else None

    def own_begun(self) -> Iterator[tuple[str, BegunResponse, list[bytes], BinaryIO]]:
        """Yield what this front end's predecessor has not ended: ids, requests, what was appended, and the files."""
        for response_id in self._own_ids(BEGUN):
            path = self._path(response_id, BEGUN)
            if path is not None and (parts := _parts(path)):
                begun = msgspec.msgpack.decode(parts[0], type=BegunResponse)
                yield response_id, begun, parts[1:], path.open("ab", buffering=0)

    def _own_ids(self, suffix: str) -> list[str]:
        paths = [] if self._folder is None else list(self._folder.glob(f"resp_*{suffix}"))
        own = [path for path in paths if path.suffix == suffix and front_end_of(path.stem) == self._index]
        return [path.stem for path in sorted(own, key=lambda path: path.stat().st_mtime_ns)]

    def _path(self, response_id: str, suffix: str = "") -> Path | None:
        """Return the file of a response. None: there are none, or a client has invented the id."""
        if self._folder is None or ID.fullmatch(response_id) is None:
            return None
        return self._folder / (response_id + suffix)

    def _read(self, response_id: str) -> tuple[int, StoredResponse] | None:
        assert self._folder is not None
        try:
            return msgspec.msgpack.decode((self._folder / response_id).read_bytes(), type=tuple[int, StoredResponse])
        except FileNotFoundError:  # it was dropped meanwhile
            return None


def append(file: BinaryIO, data: bytes) -> None:
    file.write(len(data).to_bytes(SIZE_BYTES) + data)


def _parts(path: Path) -> list[bytes]:
    """Return what was appended to a file. The last part is dropped if the death of its process has cut it off."""
    try:
        data = memoryview(path.read_bytes())
    except FileNotFoundError:  # it has ended meanwhile
        return []
    found, at = [], 0
    while len(data) - at >= SIZE_BYTES:
        end = at + SIZE_BYTES + int.from_bytes(data[at : at + SIZE_BYTES])
        if end > len(data):
            break
        found.append(bytes(data[at + SIZE_BYTES : end]))
        at = end
    return found
