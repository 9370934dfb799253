"""The store of responses: bounded memory, shared fairly."""

from quire.frontend.http.stored.response_store import ResponseStore
from quire.frontend.http.stored.stored_response import StoredResponse
from quire.frontend.images.source import StoredItem


def test_memory_is_bounded_and_shared_among_tenants() -> None:
    def response(tenant: int, size: int) -> StoredResponse:
        return StoredResponse(tenant, b"x" * size, (b"item",), 0, 0)

    store = ResponseStore(10_000)
    store.add("first", response(1, 2000))
    for i in range(100):
        store.add(f"r{i}", response(2, 2000))
    assert store.num_bytes <= 10_000
    assert store.get(1, "first") is not None  # another tenant's many responses have not evicted it
    kept = [i for i in range(100) if store.get(2, f"r{i}") is not None]
    assert kept == [97, 98, 99]
    store.add("large", response(2, 10_000))
    assert store.get(2, "large") is None
    for tenant, name in ((1, "first"), *((2, f"r{i}") for i in kept)):
        assert store.delete(tenant, name)
        assert not store.delete(tenant, name)
    assert store.num_bytes == 0


def test_images_and_then_events_that_alone_exceed_the_memory_are_left_out() -> None:
    store, images = ResponseStore(10_000), (StoredItem(digest=b"", path="", num_rows=0, num_bytes=10_000),)
    for name, events in (("some", (b"event",)), ("long", (b"event" * 2000,))):
        store.add(name, StoredResponse(1, b"x", (b"item",), 0, 0, images=images, events=events))
    some, long = store.get(1, "some"), store.get(1, "long")
    assert some is not None and (some.images, some.events) == ((), (b"event",))
    assert long is not None and (long.images, long.events) == ((), None)
