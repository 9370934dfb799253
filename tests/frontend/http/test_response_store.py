"""The store of responses: bounded memory, shared fairly."""

from quire.frontend.http.stored.response_store import ResponseStore
from quire.frontend.http.stored.stored_response import StoredResponse


def test_memory_is_bounded_and_shared_among_tenants() -> None:
    def response(size: int, name: str) -> StoredResponse:
        return StoredResponse(b"x" * size, (b"item",), 0, 0, (name,))

    store = ResponseStore(10_000)
    store.add(1, "first", response(2000, "i0"))
    for i in range(100):
        store.add(2, f"r{i}", response(2000, f"i{i}"))
    assert store.num_bytes <= 10_000
    assert store.get(1, "first") is not None  # another tenant's many responses have not evicted it
    kept = [i for i in range(100) if store.get(2, f"r{i}") is not None]
    assert kept == [97, 98, 99]
    newest = store.with_item(2, "i99")
    assert newest is store.get(2, "r99") is not None
    assert store.with_item(2, "i0") is None
    store.add(2, "large", response(10_000, "l"))
    assert store.get(2, "large") is None
    for tenant, name in ((1, "first"), *((2, f"r{i}") for i in kept)):
        assert store.delete(tenant, name)
        assert not store.delete(tenant, name)
    assert store.num_bytes == 0
