"""The store of responses: bounded memory, shared fairly."""

from quire.frontend.http.stored.response_store import ResponseStore
from quire.frontend.http.stored.stored_response import StoredResponse


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
