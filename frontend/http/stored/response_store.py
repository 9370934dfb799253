"""Responses that clients may refer to later, in bounded memory."""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from quire.frontend.http.schema.errors import ApiError, shorten
from quire.frontend.http.stored.response_files import ResponseFiles
from quire.frontend.http.stored.running_responses import RunningResponse, RunningResponses
from quire.frontend.http.stored.stored_response import BegunResponse, StoredResponse


@dataclass(slots=True)
class _OfTenant:
    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class ResponseStore:
    """The responses of one front end, of each tenant apart. Thread-safe.

    When the store is full, the tenant with the most bytes loses its oldest response: a client that stores much cannot
    evict what others have stored.

    Attributes:
        files: what is stored, for the other front ends; the store begins with what the predecessor of this one had.
        running: responses that have not ended, and run without a client.
    """

    def __init__(self, max_bytes: int, files: ResponseFiles | None = None) -> None:
        self._max_bytes, self.is_enabled = max_bytes, max_bytes > 0
        self.num_bytes = 0
        self._tenants: dict[int, _OfTenant] = {}
        self._lock = threading.RLock()
        self.running = RunningResponses(max_bytes)
        self.files = files or ResponseFiles()
        for path, response, _ in self.files.own(StoredResponse):
            self._keep(path.stem, response)

    def add(self, response_id: str, response: StoredResponse) -> None:
        """Store a response. One that alone exceeds the limit is stored without its images, which are then read again,
        or also without its events, or not at all."""
        if response.num_bytes > self._max_bytes:
            response = msgspec.structs.replace(response, images=())
        if response.num_bytes > self._max_bytes:
            response = msgspec.structs.replace(response, events=None)
        if response.num_bytes > self._max_bytes:
            return
        if response.only_for is None:
            self.files.write(response_id, response)
        self._keep(response_id, response)

    def _keep(self, response_id: str, response: StoredResponse) -> None:
        size = response.num_bytes
        with self._lock:
            mine = self._tenants.setdefault(response.tenant, _OfTenant())
            mine.responses[response_id] = response
            mine.num_bytes += size
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                largest = max(self._tenants, key=lambda each: self._tenants[each].num_bytes)
                self._drop(largest, next(iter(self._tenants[largest].responses)))

    def get(self, tenant: int, response_id: str, connection: object | None = None) -> StoredResponse | None:
        """Return the response. ``connection``: the one that asks, if it keeps responses of its own."""
        with self._lock:
            mine = self._tenants.get(tenant)
            found = None if mine is None else mine.responses.get(response_id)
        return found if found is not None and found.only_for in (None, connection) else None

    def delete(self, tenant: int, response_id: str, connection: object | None = None) -> bool:
        """Return whether the response was stored."""
        with self._lock:
            if self.get(tenant, response_id, connection) is None:
                return False
            self._drop(tenant, response_id)
            return True

    def _drop(self, tenant: int, response_id: str) -> None:
        mine = self._tenants[tenant]
        size = mine.responses.pop(response_id).num_bytes
        mine.num_bytes -= size
        self.num_bytes -= size
        self.files.delete(response_id)
        if not mine.responses:
            del self._tenants[tenant]


@dataclass(frozen=True, slots=True)
class OwnResponses:
    """The responses that one client may refer to: those of its tenant, and of its connection if that has its own."""

    store: ResponseStore
    tenant: int
    connection: object | None = None

    def find(self, response_id: str) -> StoredResponse | RunningResponse | BegunResponse | None:
        """Return a response of this front end or of another one, which may have died. Without one that has taken its
        place, what it ran is a BegunResponse."""
        running, files = self.store.running.get(response_id), self.store.files
        if running is not None and running.tenant == self.tenant:
            return running
        return (
            self.store.get(self.tenant, response_id, self.connection)
            or files.read(StoredResponse, self.tenant, response_id)
            or files.read(BegunResponse, self.tenant, response_id)
        )

    def ended(self, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a response that has ended.

        Raises:
            ApiError: 404, it is not stored; 409, it has not ended.
        """
        found = self.find(response_id)
        if isinstance(found, StoredResponse):
            return found
        if found is not None:
            text = f"response {shorten(response_id)} has not ended: wait for its end, or cancel it"
            raise ApiError(409, text, param, "response_not_ended")
        hint = "it may have been dropped" if self.store.is_enabled else "this server stores no responses"
        text = f"response {shorten(response_id)} not found; {hint}: send the whole conversation as input"
        raise ApiError(404, text, param, "previous_response_not_found" if param else "not_found")

    def delete(self, response_id: str) -> None:
        if not self.store.delete(self.tenant, response_id, self.connection):
            for kind in (StoredResponse, BegunResponse):  # its front end has died, perhaps between the two
                self.store.files.delete(response_id, kind)
