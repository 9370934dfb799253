"""Adapters of a fake worker: slots, copies in host memory, folders with contents, and loads that a test lets run.

What a request with an adapter gets depends on the content that is in the slot when the step runs, so that a stale or
wrong slot, and a hit of another adapter's blocks, are found out.
"""

from collections.abc import Callable
from hashlib import sha256

from quire.protocol.wire.adapter_messages import AdapterLoaded, AdapterRef, LoadAdapter


def adapter_ref(name: str, content: str = "") -> AdapterRef:
    """Return an adapter of this name; ``content``: what its digest is of, the name by default."""
    return AdapterRef(name, sha256((content or name).encode()).digest(), f"/adapters/{name}")


def mix_of(digest: bytes) -> int:
    """Return the number that changes the contexts of requests with this adapter; 0 without one."""
    return int.from_bytes(digest[:8], "little")


class FakeAdapters:
    """Slots and copies. Raises AssertionError on a load that no correct scheduler would send.

    Attributes:
        slots: (number, digest) of the adapter in each slot that is loaded.
        copies: digest by number of the adapters in host memory.
        folders: digest of the content of a folder by its path; others have the content that is asked for.
        pending: received loads in order.
        fault: called for each load; returns a problem, or an empty string.
    """

    def __init__(self, max_active: int, max_copies: int) -> None:
        self.max_active, self.max_copies = max_active, max_copies
        self.slots: dict[int, tuple[int, bytes]] = {}
        self.copies: dict[int, bytes] = {}
        self.folders: dict[str, bytes] = {}
        self.pending: list[LoadAdapter] = []
        self.fault: Callable[[], str] = lambda: ""
        self.num_run = self.num_read = 0

    def forget(self) -> None:
        """Become a new process."""
        self.slots.clear()
        self.copies.clear()
        self.pending.clear()

    def receive(self, load: LoadAdapter) -> None:
        assert 0 <= load.slot <= self.max_active, f"slot {load.slot}"
        assert all(load.slot != other.slot for other in self.pending), "two loads to one slot"
        self.slots.pop(load.slot, None)
        for number in load.dropped:
            self.copies.pop(number, None)
            self.slots = {slot: held for slot, held in self.slots.items() if held[0] != number}
        assert self.copies.get(load.number, load.digest) == load.digest, "a number is used for another content"
        self.copies.setdefault(load.number, b"")
        assert len(self.copies) <= self.max_copies, "too many copies in host memory"
        self.pending.append(load)

    def run(self, index: int = 0) -> AdapterLoaded:
        """Run a pending load, and return its answer."""
        load = self.pending.pop(index)
        was_cached = bool(self.copies[load.number])
        self.num_run += 1
        self.num_read += not was_cached
        problem = self.fault()
        if not was_cached and self.folders.get(load.path, load.digest) != load.digest:
            problem = f"{load.path}: its content has changed"
        if problem:
            self.copies.pop(load.number)
        else:
            self.copies[load.number] = load.digest
            self.slots[load.slot] = load.number, load.digest
        return AdapterLoaded(load.number, load.slot, problem, 1, 0.001, was_cached)

    def mix(self, number: int) -> int:
        """Return what changes the contexts of requests with this adapter."""
        if not number:
            return 0
        digests = [digest for held, digest in self.slots.values() if held == number]
        assert len(digests) == 1, f"a step uses adapter {number}, which is in {len(digests)} slots"
        return mix_of(digests[0])
