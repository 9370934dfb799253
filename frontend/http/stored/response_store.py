"""Responses that clients may refer to later, in bounded memory."""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec


class StoredResponse(msgspec.Struct, frozen=True):
    """A finished response.

    Attributes:
        body: the response as JSON.
        conversation: all items up to and with its output, as JSON. The responses of one chain share them.
        num_before: items of ``conversation`` that belong to ``previous_response_id``.
        num_input: items of the request's own input, which follow those.
        output_ids: ids of the items after those; empty if requests cannot refer to single items.
        only_for: the connection that alone may refer to the response, or None for all of the tenant.
        chain: id of the first response of its chain, or "" if it is the first.
        images: all StoredImages of ``conversation``, in order; empty in a copy for another front end.
    """

    body: bytes
    conversation: tuple[bytes, ...]
    num_before: int
    num_input: int
    output_ids: tuple[str, ...]
    only_for: Any = None
    chain: str = ""
    images: tuple[Any, ...] = ()

    @property
    def input(self) -> tuple[bytes, ...]:
        return self.conversation[self.num_before : self.num_before + self.num_input]

    @property
    def output(self) -> tuple[bytes, ...]:
        return self.conversation[self.num_before + self.num_input :]

    def item(self, item_id: str) -> bytes:
        """Return the output item with this id, one of ``output_ids``, as JSON."""
        return self.output[self.output_ids.index(item_id)]

    @property
    def num_bytes(self) -> int:
        """The size, with shared items counted in full, so that the sum is an upper bound."""
        of_images: int = sum(image.num_bytes for image in self.images)
        return len(self.body) + sum(map(len, self.conversation)) + 128 * len(self.conversation) + of_images


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
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._tenants: dict[int, _OfTenant] = {}
        self._lock = threading.Lock()

    @property
    def is_enabled(self) -> bool:
        return self._max_bytes > 0

    def add(self, tenant: int, response_id: str, response: StoredResponse) -> None:
        """Store a response, unless it alone exceeds the limit."""
        size = response.num_bytes
        if size > self._max_bytes:
            return
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
        return self.store.get(self.tenant, response_id, self.connection)

    def delete(self, response_id: str) -> bool:
        return self.store.delete(self.tenant, response_id, self.connection)

    def with_item(self, item_id: str) -> StoredResponse | None:
        return self.store.with_item(self.tenant, item_id)
