"""Responses that clients may refer to later, in bounded memory."""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from quire.frontend.http.stored.response_files import BegunResponse, ResponseFiles
from quire.frontend.http.stored.running_responses import RunningResponse, RunningResponses
from quire.frontend.http.stored.stored_response import StoredResponse


@dataclass(slots=True)
class _OfTenant:
    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    items: dict[str, str] = field(default_factory=dict)
    """Ids of responses, by those of their output items."""
    num_bytes: int = 0


class ResponseStore:
    """The responses of one front end, of each tenant apart. Thread-safe.

    When the store is full, the tenant with the most bytes loses its oldest response: a client that stores much cannot
    evict what others have stored.

    Attributes:
        files: what is stored, for the front end that replaces this one; the store begins with what its predecessor had.
        running: responses that have not ended, and run without a client.
    """

    def __init__(self, max_bytes: int, files: ResponseFiles | None = None) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._tenants: dict[int, _OfTenant] = {}
        self._lock = threading.Lock()
        self.running = RunningResponses(max_bytes)
        self.files = files or ResponseFiles()
        for response_id, tenant, response in self.files.own():
            self._keep(tenant, response_id, response)

    @property
    def is_enabled(self) -> bool:
        return self._max_bytes > 0

    def add(self, tenant: int, response_id: str, response: StoredResponse) -> None:
        """Store a response, unless it alone exceeds the limit; without its events if it exceeds it with them."""
        if response.num_bytes > self._max_bytes:
            response = msgspec.structs.replace(response, events=None)
        if response.num_bytes > self._max_bytes:
            return
        if response.only_for is None:
            self.files.write(tenant, response_id, response)
        self._keep(tenant, response_id, response)

    def _keep(self, tenant: int, response_id: str, response: StoredResponse) -> None:
        size = response.num_bytes
        with self._lock:
            mine = self._tenants.setdefault(tenant, _OfTenant())
            mine.responses[response_id] = response
            mine.items.update(dict.fromkeys(response.output_ids, response_id))
            mine.num_bytes += size
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                largest = max(self._tenants, key=lambda each: self._tenants[each].num_bytes)
                self._drop(largest, next(iter(self._tenants[largest].responses)))

    def get(self, tenant: int, response_id: str, connection: object | None = None) -> StoredResponse | None:
        """Return the response. ``connection``: the one that asks, if it keeps responses of its own."""
        with self._lock:
            return self._visible(tenant, response_id, connection)

    def delete(self, tenant: int, response_id: str, connection: object | None = None) -> bool:
        """Return whether the response was stored."""
        with self._lock:
            if self._visible(tenant, response_id, connection) is None:
                return False
            self._drop(tenant, response_id)
            return True

    def _visible(self, tenant: int, response_id: str, connection: object | None) -> StoredResponse | None:
        mine = self._tenants.get(tenant)
        found = None if mine is None else mine.responses.get(response_id)
        return found if found is not None and found.only_for in (None, connection) else None

    def with_item(self, tenant: int, item_id: str) -> StoredResponse | None:
        """Return the response that has the output item with this id."""
        with self._lock:
            mine = self._tenants.get(tenant)
            return None if mine is None or item_id not in mine.items else mine.responses[mine.items[item_id]]

    def _drop(self, tenant: int, response_id: str) -> None:
        mine = self._tenants[tenant]
        dropped = mine.responses.pop(response_id)
        for item_id in dropped.output_ids:
            del mine.items[item_id]
        mine.num_bytes -= dropped.num_bytes
        self.num_bytes -= dropped.num_bytes
        self.files.delete(response_id)
        if not mine.responses:
            del self._tenants[tenant]


@dataclass(frozen=True, slots=True)
class OwnResponses:
    """The responses that one client may refer to: those of its tenant, and of its connection if that has its own."""

    store: ResponseStore
    tenant: int
    connection: object | None = None

    @property
    def is_enabled(self) -> bool:
        return self.store.is_enabled

    def add(self, response_id: str, response: StoredResponse) -> None:
        self.store.add(self.tenant, response_id, response)

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response of this front end, or of another one, which may have died."""
        found = self.store.get(self.tenant, response_id, self.connection)
        return found or self.store.files.read(self.tenant, response_id)

    def running(self, response_id: str) -> RunningResponse | None:
        return self.store.running.get(self.tenant, response_id)

    def begun(self, response_id: str) -> BegunResponse | None:
        """Return a response that runs in another front end, or that no front end has continued yet."""
        return self.store.files.begun(self.tenant, response_id)

    def delete(self, response_id: str) -> bool:
        return self.store.delete(self.tenant, response_id, self.connection)

    def with_item(self, item_id: str) -> StoredResponse | None:
        return self.store.with_item(self.tenant, item_id)
