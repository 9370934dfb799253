"""Items of a fake worker: an encoder cache, files with contents, and encodings that a test lets run.

What a position of an item gives depends on its digest and on the row, so that a hit of another item's blocks is found
out. A step that computes a position whose rows are not there fails.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256

from quire.protocol.wire.item_messages import Encode, Encoded, InputItem


def image(name: str, *ranges: tuple[int, int], path: str = "", kind: str = "image") -> InputItem:
    """Return an item with the digest of ``name``."""
    return InputItem(sha256(name.encode()).digest(), list(ranges), path or f"/shm/{name}", kind)


def mixes_of(items: Sequence[InputItem]) -> dict[int, int]:
    """Return by position of an item the number that changes the context there."""
    found: dict[int, int] = {}
    for item in items:
        row = int.from_bytes(item.digest[:8], "little") | 1
        for first, count in item.ranges:
            for position in range(first, first + count):
                found[position] = row = row * 3 % 2**64
    return found


class FakeItems:
    """The rows of items. Raises AssertionError on an Encode that no correct scheduler would send.

    Attributes:
        capacity: most rows.
        rows: key of each item whose rows are there to their number.
        pending: received encodings in order.
        fault: called with each Encode; returns a problem, or an empty string.
        of: request id to the items that it was sent with.
        log: keys in the order of their encodings.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.rows: dict[bytes, int] = {}
        self.pending: list[Encode] = []
        self.fault: Callable[[Encode], str] = lambda encode: ""
        self.of: Callable[[str], Sequence[InputItem]] = lambda request_id: ()
        self.log: list[bytes] = []

    def forget(self) -> None:
        """Become a new process."""
        self.rows.clear()
        self.pending.clear()

    def receive(self, encode: Encode) -> None:
        for key in encode.dropped:
            self.rows.pop(key, None)
        item = encode.item
        assert item.key not in self.rows, "rows are there, and encoded again"
        assert all(item.key != other.item.key for other in self.pending), "an item is encoded twice at a time"
        self.pending.append(encode)
        used = sum(self.rows.values()) + sum(each.item.num_rows for each in self.pending)
        assert used <= self.capacity, f"{used} rows in an encoder cache of {self.capacity}"

    def run(self, index: int = 0) -> Encoded:
        """Run a pending encoding, and return its answer."""
        encode = self.pending.pop(index)
        key = encode.item.key
        self.log.append(key)
        if problem := self.fault(encode):
            return Encoded(key, problem)
        self.rows[key] = encode.item.num_rows
        return Encoded(key, "", 0.002)

    def check(self, name: str, rows: Sequence[InputItem], begin: int, end: int) -> None:
        """Raise AssertionError unless all rows are there that the positions of a request from ``begin`` on need."""
        for item in self.of(name):
            if any(first < end and first + count > begin for first, count in item.ranges):
                keys = [each.key for each in rows if each.ranges == item.ranges]
                assert keys == [item.key], f"{name}: its row lacks an item"
                assert item.key in self.rows, f"{name}: no rows for {item.ranges}"
